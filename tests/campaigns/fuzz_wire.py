"""Mutated frames and handshakes against libFuzzer with ASan and UBSan: no crash, and what decodes encodes to the same.

One run is a second of fuzzing. Builds the target with clang; the seeded smoke of the C++ tests needs none.
"""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

from sglang_tpusync.bench.report import Row
from tests.campaigns.campaign import main
from tests.campaigns.room_program import FUZZ_FLAGS, build_program, clang, fuzz

ROOMS = ("base", "wire")
# One of each kind that docs/formats/wire-v1.md draws.
SEEDS = (
    struct.pack("<4sBBHII4Q", b"TPS1", 1, 1, 0, 48, 9, 7, 1, 2, 3),
    struct.pack("<QII", 7, 2, 0) + struct.pack("<IIQ", 1, 2, 3) * 2,
    struct.pack("<QII", 7, 1, 0) + struct.pack("<IIQIIQ", 1, 2, 3, 4, 0, 5),
    struct.pack("<B3xIQQ", 2, 1, 4096, 8192),
    struct.pack("<QB", 1, 8) + b"reason",
    struct.pack("<Q", 7),
    struct.pack("<4sHHHHIQ16s32s", b"TPSH", 1, 0, 4, 0, 0, 7, bytes(16), bytes(32)),
    struct.pack("<4sHH16s32s", b"TPSH", 1, 0, bytes(16), bytes(32)),
)


def run(seed: int, runs: int) -> list[Row]:
    """Fuzzes for `runs` seconds; every execution that ends well counts."""
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary) / "wire_fuzzer"
        build_program(clang(), "fuzz/wire_fuzzer.cc", ROOMS, FUZZ_FLAGS, target, libraries=["-lsodium"])
        return fuzz(target, SEEDS, seed, runs)


if __name__ == "__main__":
    main("fuzz_wire", run, runs=300)
