"""Mutated slot tables and ledgers against libFuzzer with ASan and UBSan: no crash, no wrong page.

One run is a second of fuzzing. Builds the target with clang; the seeded smoke of the C++ tests needs none.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from sglang_tpusync.bench.report import Row
from tests.campaigns.campaign import main
from tests.campaigns.room_program import FUZZ_FLAGS, build_program, clang, fuzz

ROOMS = ("base", "os", "index", "exec", "flash", "testing/sim_disk.cc")
SEED_BYTES = 1 + 4096 + 24 * 64


def run(seed: int, runs: int) -> list[Row]:
    """Fuzzes for `runs` seconds; every execution that ends well counts."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        target = build_program(clang(), "fuzz/flash_fuzzer.cc", ROOMS, FUZZ_FLAGS, directory / "flash_fuzzer")
        # Both kinds start from zeros: where the first byte is odd, the target makes checksums of records right.
        return fuzz(target, [bytes(SEED_BYTES), b"\1" + bytes(SEED_BYTES - 1)], seed, runs)


if __name__ == "__main__":
    main("fuzz_flash", run, runs=300)
