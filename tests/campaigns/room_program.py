"""Programs of the campaigns that are made of the C++ room of layouts: compiled in one go, a minute or so."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__all__ = ["build_layout_program"]

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "csrc" / "tpusync"


def build_layout_program(compiler: str, main: str, flags: list[str], target: Path) -> Path:
    """Compiles `main` (a path under csrc/) with the rooms base and layout to `target`."""
    files = [path for path in (SOURCES / "layout").glob("*.cc") if not path.name.endswith("_test.cc")]
    files += [SOURCES / "base" / "error.cc", SOURCES / "base" / "checksum.cc", ROOT / "csrc" / main]
    command = [compiler, "-std=c++20", "-DFMT_HEADER_ONLY=1", f"-I{ROOT / 'csrc'}", *flags]
    objects = []
    for file in files:
        objects.append(str(target.parent / f"{file.stem}.o"))
        subprocess.run([*_launcher(), *command, "-c", str(file), "-o", objects[-1]], check=True)
    subprocess.run([compiler, *flags, *objects, "-o", str(target)], check=True)
    return target


def _launcher() -> list[str]:
    """CMake's own variable for ccache, where scripts set it."""
    name = os.environ.get("CMAKE_CXX_COMPILER_LAUNCHER")
    return [name] if name else []
