"""kill -9 of a process that writes into a store, at random moments: nothing acknowledged is lost, nothing is torn."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from pathlib import Path

from sglang_tpusync._core import FlashStore
from sglang_tpusync.bench.report import Row
from tests.campaigns.campaign import as_count, fraction, main
from tests.campaigns.pages import chain_keys, get, num_files, open_store, put, stored_keys

CHAINS_PER_RUN = 400
PAGES_PER_CHAIN_MAX = 12
CAPACITY_BYTES = 8 << 30  # more than a campaign writes: nothing is evicted


def run(seed: int, runs: int) -> list[Row]:
    choice = random.Random(seed)
    tally = _Tally()
    with tempfile.TemporaryDirectory(dir=_disk()) as directory:
        path = Path(directory) / "store"
        for number in range(runs):
            _kill_a_writer(path, choice, tally, first_chain=number * CHAINS_PER_RUN, seed=seed)
            store = open_store(path, capacity_bytes=CAPACITY_BYTES)
            try:
                _check(store, path, tally)
            finally:
                store.close()
    return tally.rows(runs)


class _Tally:
    def __init__(self) -> None:
        self.acknowledged: set[bytes] = set()
        self.removed: set[bytes] = set()
        self.doubtful: set[bytes] = set()  # a removal that was under way
        self.found = self.expected = 0
        self.right = self.reported = 0
        self.known_files = self.files = 0
        self.revived = 0

    def rows(self, runs: int) -> list[Row]:
        return [
            as_count("SIGKILLs", [runs]),
            as_count("pages acknowledged", [len(self.acknowledged)]),
            fraction("acknowledged pages that are there after a SIGKILL", self.found, self.expected, "all of them"),
            fraction("reported pages that read back right", self.right, self.reported, "all of them"),
            fraction("files that belong to the store", self.known_files, self.files, "no orphans"),
            fraction("removed pages that stay removed", len(self.removed) - self.revived, len(self.removed), "all"),
        ]


def _kill_a_writer(path: Path, choice: random.Random, tally: _Tally, *, first_chain: int, seed: int) -> None:
    """The writer names on its standard output what it was told is done; the kill comes after a random line."""
    command = [sys.executable, "-m", "tests.campaigns.crash_store", "--write", str(path), str(seed), str(first_chain)]
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


def _write(path: Path, seed: int, first_chain: int) -> None:
    """Puts chains in pieces of random length, and removes a page now and then, until it is killed or done."""
    choice = random.Random(f"{seed}/{first_chain}")
    store = open_store(path, capacity_bytes=CAPACITY_BYTES)
    for chain in range(first_chain, first_chain + CHAINS_PER_RUN):
        keys = chain_keys(seed, chain, choice.randrange(1, PAGES_PER_CHAIN_MAX + 1))
        start = 0
        while start < len(keys):
            piece = keys[start : start + choice.randrange(1, 5)]
            outcomes = put(store, piece, keys[:start])
            _say("put", [key for key, outcome in zip(piece, outcomes, strict=True) if outcome == 0])
            start += len(piece)
        if choice.random() < 0.2:
            last = keys[-1:]
            _say("removing", last)
            store.remove(last[0])
            _say("removed", last)


def _say(verb: str, keys: list[bytes]) -> None:
    print(verb, *(key.hex() for key in keys), flush=True)


def _disk() -> Path:
    """A directory on a disk rather than in memory."""
    place = Path.cwd() / "build"
    place.mkdir(exist_ok=True)
    return place


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        _write(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        main("crash_store", run, runs=50)
