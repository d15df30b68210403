"""Mutated layout texts and plans against libFuzzer with ASan and UBSan: no crash, no broken promise.

One run is a second of fuzzing. Builds the target with clang; the seeded smoke of the C++ tests needs none.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from sglang_tpusync.bench.report import Row
from tests.campaigns.campaign import main
from tests.campaigns.room_program import FUZZ_FLAGS, build_program, clang, fuzz

SEEDS = (
    b"{3,2,1,0:T(8,128)(2,1)}",
    b"{1,0:T(64,128)(8,1)E(4)S(5)}",
    b"{0:T(1024)(128)(2,1)}",
    b"{:T(128)}",
    b"{1,0:D(D,C)T(*,128)L(2)#(u32)SC(0:1)}",
)


def run(seed: int, runs: int) -> list[Row]:
    """Fuzzes for `runs` seconds; every execution that ends well counts."""
    from sglang_tpusync.layout import Shard, ShardSpec, TiledLayout, plan

    seeds = list(SEEDS)
    for dtype, dims, texts in [
        ("BF16", (4, 8, 16), ("{2,1,0:T(4,8)(2,1)}", "{2,1,0}")),
        ("F8E4M3FN", (7, 9), ("{1,0:T(4,4)(4,1)}", "{0,1:T(8,4)(4,1)}")),
        ("S4", (5, 7), ("{1,0:T(8,4)(2,1)E(4)}", "{0,1:E(4)}")),
    ]:
        origin = (0,) * len(dims)
        shards = [Shard(origin=origin, extent=dims, layout=TiledLayout.parse(text, dtype, dims)) for text in texts]
        src, dst = (ShardSpec(dims=dims, dtype=dtype, shards=(shard,)) for shard in shards)
        seeds.append(plan(src, dst).encode())
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary) / "layout_fuzzer"
        build_program(clang(), "fuzz/layout_fuzzer.cc", ("base", "layout"), FUZZ_FLAGS, target)
        return fuzz(target, seeds, seed, runs)


if __name__ == "__main__":
    main("fuzz_layout", run, runs=300)
