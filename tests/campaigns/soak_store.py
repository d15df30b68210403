"""A store at its cap for a long time: `runs` times the cap is written, and nothing grows but what was counted."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

from sglang_tpusync._core import FlashStore
from sglang_tpusync.bench.report import Row
from tests.campaigns.campaign import as_count, bound, disk, fraction, main
from tests.campaigns.pages import PAGE_BYTES, chain_keys, disk_bytes, get, open_store, put

CAPACITY_BYTES = 128 << 20
CHAIN_PAGES = 32
AMPLIFICATION_GOAL = 1.05
GROWTH_GOAL = 1.05


def run(seed: int, runs: int) -> list[Row]:
    choice = random.Random(seed)
    pages_of_cap = CAPACITY_BYTES // PAGE_BYTES
    wrong = served = over = looks = 0
    with tempfile.TemporaryDirectory(dir=disk()) as directory:
        path = Path(directory)
        store = open_store(path, capacity_bytes=CAPACITY_BYTES)
        chain = 0
        settled = _usage()
        written_before = _written_bytes()
        for number in range(runs):
            accepted = int(store.stats()["put_bytes"])
            while int(store.stats()["put_bytes"]) < accepted + pages_of_cap * PAGE_BYTES:
                keys = chain_keys(seed, chain, CHAIN_PAGES)
                put(store, keys)
                back = chain_keys(seed, max(0, chain - choice.randrange(1, 60)), CHAIN_PAGES)
                outcomes, right = get(store, back)
                served += int((outcomes == 0).sum())
                wrong += sum(outcome == 0 and not good for outcome, good in zip(outcomes, right, strict=True))
                chain += 1
            looks += 1
            over += disk_bytes(path) > CAPACITY_BYTES
            if number == min(4, runs // 2):
                settled = _usage()
        os.sync()
        written = _written_bytes() - written_before
        accepted = int(store.stats()["put_bytes"])
        end = _usage()
        rows = _rows(store, runs, wrong, served, over, looks)
        store.close()
    return [
        *rows,
        bound("bytes written to the disk per byte accepted", written / accepted, "bytes/byte", AMPLIFICATION_GOAL),
        bound("resident memory at the end, of that after it filled", end[0] / settled[0], "ratio", GROWTH_GOAL),
        bound("file descriptors at the end, of those after it filled", end[1] / settled[1], "ratio", 1.0),
    ]


def _rows(store: FlashStore, runs: int, wrong: int, served: int, over: int, looks: int) -> list[Row]:
    return [
        as_count("caps written", [runs]),
        as_count("pages evicted", [int(store.stats()["evicted"])]),
        fraction("served pages whose bytes are right", served - wrong, served, "all of them"),
        fraction("looks at the directory that found it below its cap", looks - over, looks, "all of them"),
    ]


def _usage() -> tuple[int, int]:
    """Resident bytes and open files of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))


def _written_bytes() -> int:
    """What this process has sent to block devices, page cache included once it is dirty."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["write_bytes"])


if __name__ == "__main__":
    main("soak_store", run, runs=50)
