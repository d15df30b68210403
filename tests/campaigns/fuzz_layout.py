"""Mutated layout texts and plans against libFuzzer with ASan and UBSan: no crash, no broken promise.

One run is a second of fuzzing. Builds the target with clang; the seeded smoke of the C++ tests needs none.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from sglang_tpusync.bench.report import Row
from sglang_tpusync.errors import UnsupportedError
from tests.campaigns.campaign import as_count, fraction, main
from tests.campaigns.room_program import build_layout_program

FLAGS = ["-O1", "-g", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all"]
SEEDS = (
    b"{3,2,1,0:T(8,128)(2,1)}",
    b"{1,0:T(64,128)(8,1)E(4)S(5)}",
    b"{0:T(1024)(128)(2,1)}",
    b"{:T(128)}",
    b"{1,0:D(D,C)T(*,128)L(2)#(u32)SC(0:1)}",
)


def _clang() -> str:
    for name in ("clang++", *(f"clang++-{version}" for version in range(20, 13, -1))):
        if shutil.which(name):
            return name
    raise UnsupportedError("fuzz_layout needs clang++ with libFuzzer (apt-get install clang)")


def run(seed: int, runs: int) -> list[Row]:
    """Fuzzes for `runs` seconds; every execution that ends well counts."""
    from sglang_tpusync.layout import Shard, ShardSpec, TiledLayout, plan

    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        corpus = directory / "corpus"
        corpus.mkdir()
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
        for number, data in enumerate(seeds):
            (corpus / str(number)).write_bytes(data)
        target = build_layout_program(_clang(), "fuzz/layout_fuzzer.cc", FLAGS, directory / "layout_fuzzer")
        command = [str(target), str(corpus), f"-max_total_time={runs}", f"-seed={seed or 1}", "-print_final_stats=1"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory)
        counted = re.search(r"stat::number_of_executed_units:\s+(\d+)", done.stderr)
        executed = int(counted[1]) if counted else 0
        failed = int(done.returncode != 0)
        if failed:
            print(done.stderr[-4000:])
    return [
        fraction("executions without a crash or a broken promise", executed - failed, executed, "all executions"),
        as_count("executions", [executed]),
    ]


if __name__ == "__main__":
    main("fuzz_layout", run, runs=300)
