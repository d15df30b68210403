"""Random damage to the files of a closed store: a damaged page is a miss and counted, wrong bytes never come back."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

from sglang_tpusync._core import FlashStore
from sglang_tpusync.bench.report import Row
from sglang_tpusync.testing.tamper import ClosedRegion, regions_of
from tests.campaigns.campaign import as_count, fraction, main
from tests.campaigns.pages import chain_keys, get, open_store, put

NUM_CHAINS, PAGES_PER_CHAIN = 8, 16
CAPACITY_BYTES = 16 << 20  # twice what is stored: most of the files is in use
DAMAGES_PER_RUN = 10

Places = dict[bytes, tuple[int, int]]  # slot and length of each key


def run(seed: int, runs: int) -> list[Row]:
    choice = random.Random(seed)
    keys = [key for chain in range(NUM_CHAINS) for key in chain_keys(seed, chain, PAGES_PER_CHAIN)]
    tally = {
        "damaged": 0,
        "served": 0,
        "right": 0,
        "whole": 0,
        "whole served": 0,
        "bad": 0,
        "bad counted": 0,
        "open": 0,
    }
    with tempfile.TemporaryDirectory(dir=Path.cwd() / "build") as directory:
        pristine, path = Path(directory) / "pristine", Path(directory) / "store"
        _fill(pristine, seed)
        for _ in range(runs):
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(pristine, path)
            (region,) = regions_of(path)
            places = {key: (record.slot, record.length_bytes) for key, record in region.records().items()}
            damages = [_damage(region, places, choice) for _ in range(DAMAGES_PER_RUN)]
            damaged = set[bytes]().union(*(touched for touched, _ in damages))
            silent = set[bytes]().union(*(touched for touched, zeroed in damages if zeroed))
            _check(path, keys, damaged, silent, tally)
    return [
        as_count("damages", [runs * DAMAGES_PER_RUN]),
        as_count("pages damaged", [tally["damaged"]]),
        fraction("damaged stores that open", tally["open"], runs, "all of them"),
        fraction("served pages whose bytes are right", tally["right"], tally["served"], "all of them"),
        fraction("undamaged pages that are served", tally["whole served"], tally["whole"], "all of them"),
        fraction("damaged pages that were counted", tally["bad counted"], tally["bad"], "all of them"),
    ]


def _fill(path: Path, seed: int) -> None:
    store = open_store(path, capacity_bytes=CAPACITY_BYTES)
    for chain in range(NUM_CHAINS):
        outcomes = put(store, chain_keys(seed, chain, PAGES_PER_CHAIN))
        assert not outcomes.any(), outcomes
    store.close()


def _damage(region: ClosedRegion, places: Places, choice: random.Random) -> tuple[set[bytes], bool]:
    """Damages one file in one of four ways; answers the keys whose slot or record it touched, and whether records
    may be zeros now, which say that a slot is free: a miss that nobody can count.
    """
    file = choice.choice([region.table, region.slots])
    size = file.stat().st_size
    start, length = choice.randrange(size), choice.choice([1, 1, 1, 7, 64, 512, 4096, 100_000])
    end = min(size, start + length)
    touched = _touched(region, places, file, start, end)
    with open(file, "r+b") as opened:
        opened.seek(start)
        old = opened.read(end - start)
        way = choice.choice(["flip", "zero", "noise"])
        if way == "flip":
            new = bytes(byte ^ (1 << choice.randrange(8)) for byte in old)
        else:
            new = bytes(len(old)) if way == "zero" else choice.randbytes(len(old))
        opened.seek(start)
        opened.write(new)
    return touched, way == "zero" and file == region.table


def _touched(region: ClosedRegion, places: Places, file: Path, start: int, end: int) -> set[bytes]:
    touched = set()
    for key, (slot, length_bytes) in places.items():
        if file == region.table:
            first, length = 4096 + slot * 64, 64
        else:
            first, length = slot * region.slot_bytes, length_bytes
        if start < first + length and first < end:
            touched.add(key)
    return touched


def _check(path: Path, keys: list[bytes], damaged: set[bytes], silent: set[bytes], tally: dict[str, int]) -> None:
    store = open_store(path, capacity_bytes=CAPACITY_BYTES)
    tally["open"] += 1
    try:
        outcomes, right = get(store, keys)
        again, _ = get(store, keys)
        for key, outcome, once_more, good in zip(keys, outcomes, again, right, strict=True):
            tally["served"] += outcome == 0
            tally["right"] += bool(outcome == 0 and good)
            if key not in damaged:
                tally["whole"] += 1
                tally["whole served"] += bool(outcome == 0 and once_more == 0)
        tally["damaged"] += len(damaged)
        missed = sum(outcome != 0 and key not in silent for key, outcome in zip(keys, outcomes, strict=True))
        tally["bad"] += missed
        tally["bad counted"] += min(missed, _num_counted(store))
    finally:
        store.close()


def _num_counted(store: FlashStore) -> int:
    """Damaged records that recovery dropped, and payloads that reads found wrong."""
    stats = store.stats()
    return sum(int(value) for name, value in stats.items() if "corrupt" in name and isinstance(value, int))


if __name__ == "__main__":
    main("corrupt_store", run, runs=1000)
