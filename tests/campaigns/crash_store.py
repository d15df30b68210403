"""kill -9 of a process that writes into a store, at random moments: nothing acknowledged is lost, nothing is torn."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from sglang_tpusync._core import FlashStore
from sglang_tpusync.bench.report import Row
from tests.campaigns.campaign import as_count, disk, fraction, main
from tests.campaigns.pages import PAGE_BYTES, chain_keys, get, num_files, open_store, put, stored_keys

CHAINS_PER_RUN = 400
PAGES_PER_CHAIN_MAX = 12
AMPLE_BYTES = 64 << 30  # more than a campaign writes: nothing is evicted, so all that was acknowledged is there
SCARCE_BYTES = 200 * PAGE_BYTES  # less than a run writes
KEPT_PAGES = 4096  # of the ample store, emptied when it has more: each run reads all it holds


def run(seed: int, runs: int) -> list[Row]:
    """Even runs in a store that evicts nothing, odd ones in a store that evicts all the time."""
    choice = random.Random(seed)
    tallies = {AMPLE_BYTES: _Tally(), SCARCE_BYTES: _Tally()}
    with tempfile.TemporaryDirectory(dir=disk()) as directory:
        for number in range(runs):
            capacity = (AMPLE_BYTES, SCARCE_BYTES)[number % 2]
            tally, path = tallies[capacity], Path(directory) / str(capacity)
            _kill_a_writer(path, choice, tally, first_chain=number * CHAINS_PER_RUN, seed=seed, capacity=capacity)
            store = open_store(path, capacity_bytes=capacity)
            try:
                _check(store, path, tally)
                if capacity == AMPLE_BYTES and len(stored_keys(store)) > KEPT_PAGES:
                    store.clear()
                    tally.removed |= tally.acknowledged
            finally:
                store.close()
    return _rows(runs, tallies[AMPLE_BYTES], tallies[SCARCE_BYTES])


class _Tally:
    def __init__(self) -> None:
        self.acknowledged: set[bytes] = set()
        self.removed: set[bytes] = set()
        self.doubtful: set[bytes] = set()  # a removal that was under way
        self.found = self.expected = 0
        self.right = self.reported = 0
        self.known_files = self.files = 0
        self.revived = 0


def _rows(runs: int, ample: _Tally, scarce: _Tally) -> list[Row]:
    num_lost = len(scarce.acknowledged) - len(scarce.removed) - scarce.found
    rows = [
        as_count("SIGKILLs", [runs]),
        as_count("pages acknowledged", [len(ample.acknowledged), len(scarce.acknowledged)]),
        as_count("pages of the store that evicts, acknowledged and gone", [max(0, num_lost)]),
        fraction("acknowledged pages that are there after a SIGKILL", ample.found, ample.expected, "all of them"),
        fraction("removed pages that stay removed", len(ample.removed) - ample.revived, len(ample.removed), "all"),
    ]
    for tally, which in ((ample, ""), (scarce, ", in the store that evicts")):
        if tally.files:
            rows += [
                fraction(f"reported pages that read back right{which}", tally.right, tally.reported, "all of them"),
                fraction(f"files that belong to the store{which}", tally.known_files, tally.files, "no orphans"),
            ]
    return rows


def _kill_a_writer(
    path: Path, choice: random.Random, tally: _Tally, *, first_chain: int, seed: int, capacity: int
) -> None:
    """The writer names on its standard output what it was told is done; the kill comes after a random line."""
    module = [sys.executable, "-m", "tests.campaigns.crash_store"]
    command = [*module, "--write", str(path), str(seed), str(first_chain), str(capacity)]
    lines_until_kill = choice.randrange(1, 300)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for number, line in enumerate(writer.stdout):
            _note(line, tally)
            if number >= lines_until_kill:
                writer.kill()
                break
        for line in writer.stdout:  # what it had said before it died
            _note(line, tally)


def _note(line: str, tally: _Tally) -> None:
    """A half line at the end says nothing."""
    if not line.endswith("\n"):
        return
    verb, _, text = line.strip().partition(" ")
    keys = {bytes.fromhex(word) for word in text.split()}
    if verb == "put":
        tally.acknowledged |= keys
    elif verb == "removing":
        tally.doubtful |= keys
    elif verb == "removed":
        tally.removed |= keys
        tally.doubtful -= keys
    else:
        raise ValueError(f"the writer said {line!r}")


def _check(store: FlashStore, path: Path, tally: _Tally) -> None:
    expected = sorted(tally.acknowledged - tally.removed - tally.doubtful)
    present = store.contains(b"".join(expected))
    tally.expected += len(expected)
    tally.found += int(present.sum())
    reported = stored_keys(store)
    tally.revived += len(tally.removed & set(reported))
    for start in range(0, len(reported), 128):
        outcomes, right = get(store, reported[start : start + 128])
        tally.reported += len(outcomes)
        tally.right += sum(good and outcome == 0 for good, outcome in zip(right, outcomes, strict=True))
    files, known = num_files(path)
    tally.files += files
    tally.known_files += known


def _write(path: Path, seed: int, first_chain: int, capacity: int) -> None:
    """Puts chains in pieces of random length and removes a page now and then, until it is killed or done; another
    thread reads what was put.
    """
    choice = random.Random(f"{seed}/{first_chain}")
    store = open_store(path, capacity_bytes=capacity)
    recent: list[bytes] = []
    threading.Thread(target=_read, args=(store, recent), daemon=True).start()
    for chain in range(first_chain, first_chain + CHAINS_PER_RUN):
        keys = chain_keys(seed, chain, choice.randrange(1, PAGES_PER_CHAIN_MAX + 1))
        start = 0
        while start < len(keys):
            piece = keys[start : start + choice.randrange(1, 5)]
            outcomes = put(store, piece, keys[:start])
            _say("put", [key for key, outcome in zip(piece, outcomes, strict=True) if outcome == 0])
            recent[:] = [*recent[-60:], *piece]
            start += len(piece)
        if choice.random() < 0.2:
            last = keys[-1:]
            _say("removing", last)
            store.remove(last[0])
            _say("removed", last)


def _read(store: FlashStore, recent: list[bytes]) -> None:
    """A reader that finds wrong bytes ends the process with a message that the campaign does not understand."""
    while True:
        keys = recent[:20]
        outcomes, right = get(store, keys) if keys else ([], [])
        for key, outcome, good in zip(keys, outcomes, right, strict=True):
            if outcome == 0 and not good:
                print("WRONG", key.hex(), flush=True)


def _say(verb: str, keys: list[bytes]) -> None:
    print(verb, *(key.hex() for key in keys), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        _write(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    else:
        main("crash_store", run, runs=500)
