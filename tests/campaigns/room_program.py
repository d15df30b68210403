"""Programs of the campaigns that are made of rooms of the C++ core: compiled in one go, a minute or so."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sglang_tpusync.bench.report import Row
from sglang_tpusync.errors import UnsupportedError
from tests.campaigns.campaign import ROOT, as_count, fraction

__all__ = ["FUZZ_FLAGS", "build_program", "clang", "fuzz"]

SOURCES = ROOT / "csrc" / "tpusync"
FUZZ_FLAGS = ("-O1", "-g", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all")


def clang() -> str:
    """The newest clang++ that is installed."""
    for name in ("clang++", *(f"clang++-{version}" for version in range(20, 13, -1))):
        if shutil.which(name):
            return name
    raise UnsupportedError("fuzzing needs clang++ with libFuzzer (apt-get install clang)")


def build_program(
    compiler: str, main: str, rooms: Sequence[str], flags: Sequence[str], target: Path, libraries: Sequence[str] = ()
) -> Path:
    """Compiles `main` (a path under csrc/) with all sources of the rooms, or single ones, to `target`."""
    files = [ROOT / "csrc" / main]
    for room in rooms:
        if room.endswith(".cc"):
            files.append(SOURCES / room)
            continue
        files += [file for file in (SOURCES / room).glob("*.cc") if not file.name.endswith("_test.cc")]
    command = [compiler, "-std=c++20", "-DFMT_HEADER_ONLY=1", f"-I{ROOT / 'csrc'}", *flags]
    objects = []
    for file in files:
        objects.append(str(target.parent / f"{file.parent.name}-{file.stem}.o"))
        subprocess.run([*_launcher(), *command, "-c", str(file), "-o", objects[-1]], check=True)
    subprocess.run([compiler, *flags, *objects, *libraries, "-lpthread", "-o", str(target)], check=True)
    return target


def fuzz(target: Path, seeds: Sequence[bytes], seed: int, seconds: int) -> list[Row]:
    """Runs a libFuzzer target for so long from these inputs."""
    corpus = target.parent / "corpus"
    corpus.mkdir()
    for number, data in enumerate(seeds):
        (corpus / str(number)).write_bytes(data)
    command = [str(target), str(corpus), f"-max_total_time={seconds}", f"-seed={seed or 1}", "-print_final_stats=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=target.parent)
    counted = re.search(r"stat::number_of_executed_units:\s+(\d+)", done.stderr)
    executed = int(counted[1]) if counted else 0
    failed = int(done.returncode != 0)
    if failed:
        print(done.stderr[-4000:])
    return [
        fraction("executions without a crash or a broken promise", executed - failed, executed, "all executions"),
        as_count("executions", [executed]),
    ]


def _launcher() -> list[str]:
    """CMake's own variable for ccache, where scripts set it."""
    name = os.environ.get("CMAKE_CXX_COMPILER_LAUNCHER")
    return [name] if name else []
