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
from tests.campaigns.room_program import build_layout_program

FLAGS = ["-O2", "-g"]  # as in a release
# A word of 32 bits at a time takes about this much: load, shuffle, store and its share of the loop.
MOST_PER_BYTE = {"avx2": 0.5, "portable": 8.0}


def _count(program: Path, case: str, kernels: str) -> tuple[int, int]:
    """(instructions inside measured(), bytes moved)"""
    out = program.parent / f"{case}.{kernels}"
    command = ["valgrind", "--tool=callgrind", "--toggle-collect=measured", f"--callgrind-out-file={out}"]
    done = subprocess.run([*command, str(program), case, kernels], capture_output=True, text=True, check=True)
    counted = re.search(r"^(?:summary|totals): (\d+)", out.read_text(), re.MULTILINE)
    return (int(counted[1]) if counted else 0), int(done.stdout)


def run(seed: int, runs: int) -> list[Row]:
    """One row per change of layout and kind of kernel."""
    if shutil.which("valgrind") is None:
        raise UnsupportedError("instructions needs valgrind (apt-get install valgrind)")
    with tempfile.TemporaryDirectory() as temporary:
        program = build_layout_program("g++", "bench/layout_instructions.cc", FLAGS, Path(temporary) / "program")
        listed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
        cases = [line.split()[1] for line in listed if line.startswith("case ")]
        rows = []
        for case in cases:
            for kernels, most in MOST_PER_BYTE.items():
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
