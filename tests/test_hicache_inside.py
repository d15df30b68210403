"""Runs tests/inside, which import SGLang, in a process that has the CPU engine environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sglang_tpusync.testing import cpu_engine

INSIDE = Path(__file__).with_name("inside")
ROOT = INSIDE.parent.parent


@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_inside_sglang() -> None:
    environment = cpu_engine.environment(omp_threads=1)
    environment["PYTHONPATH"] += f":{ROOT}"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "filterwarnings=default",
        str(INSIDE),
    ]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
