"""Instructions per byte of the layout kernels, counted by Callgrind: progress that a noisy machine cannot hide.

Callgrind has no AVX-512, so that the AVX2 and the portable kernels are what is counted. Needs g++ and valgrind. Counts
are exact; one run is enough.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from sglang_tpusync.bench.report import Row
from sglang_tpusync.errors import UnsupportedError
from tests.campaigns.campaign import main
from tests.campaigns.room_program import build_program

FLAGS = ["-O2", "-g"]  # as in a release
# Instructions per byte that are accepted: a tenth or so above what was counted when the case was added.
MOST_PER_BYTE = {
    "avx2": {"bf16-untile": 0.3, "bf16-tile": 0.27, "bf16-heads-apart": 0.8,
             "fp8-untile": 0.34, "fp8-tile": 0.28, "bf16-pages-in-lanes": 0.85},
    "portable": {"bf16-untile": 2.6, "bf16-tile": 2.9, "bf16-heads-apart": 2.9,
                 "fp8-untile": 12.0, "fp8-tile": 10.0, "bf16-pages-in-lanes": 3.6},
}  # fmt: skip


def _count(program: Path, case: str, kernels: str) -> tuple[int, int]:
    """(instructions inside measured(), bytes moved)"""
    out = program.parent / f"{case}.{kernels}"
    command = ["valgrind", "--tool=callgrind", "--toggle-collect=measured", f"--callgrind-out-file={out}"]
    done = subprocess.run([*command, str(program), case, kernels], capture_output=True, text=True, check=True)
    counted = re.search(r"^(?:summary|totals): (\d+)", out.read_text(), re.MULTILINE)
    if not counted:
        raise RuntimeError(f"Callgrind counted nothing in {case}, {kernels}")
    return int(counted[1]), int(done.stdout)


def run(seed: int, runs: int) -> list[Row]:
    """One row per change of layout and kind of kernel."""
    if shutil.which("valgrind") is None:
        raise UnsupportedError("instructions needs valgrind (apt-get install valgrind)")
    with tempfile.TemporaryDirectory() as temporary:
        program = build_program(
            "g++", "bench/layout_instructions.cc", ("base", "layout"), FLAGS, Path(temporary) / "program"
        )
        rows = []
        for kernels, most_by_case in MOST_PER_BYTE.items():
            for case, most in most_by_case.items():
                instructions, moved = _count(program, case, kernels)
                value = instructions / moved
                rows.append(
                    Row(
                        case=f"{case}, {kernels}", value=value, unit="instructions/byte", better="lower",
                        limit="the most that is accepted", limit_value=most, ratio=value / most, goal=1.0,
                    )
                )  # fmt: skip
    return rows


if __name__ == "__main__":
    main("instructions", run, runs=1)
