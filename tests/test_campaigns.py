"""A seeded smoke of every campaign, run as the script runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sglang_tpusync.bench.report import meets_goal, read_report

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.campaign


def run_smoke(name: str, runs: int, tmp_path: Path) -> None:
    (ROOT / "build").mkdir(exist_ok=True)
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", f"tests.campaigns.{name}", "--seed", "1", "--runs", str(runs), "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = read_report(path)
    assert report.bench == name
    assert any(row.goal is not None for row in report.rows)
    assert all(meets_goal(row) is not False for row in report.rows)


@pytest.mark.parametrize(
    ("name", "runs"),
    [("crash_store", 4), ("corrupt_store", 20), ("soak_store", 3), ("model_node", 12), ("abort_transfer", 500)],
)
def test_smoke(name: str, runs: int, tmp_path: Path) -> None:
    run_smoke(name, runs, tmp_path)


def test_the_spinning_thread_is_not_held_up(tmp_path: Path) -> None:
    """Lenient, since other processes may want the cores: a path that holds the GIL leaves a few percent of the rate."""
    (ROOT / "build").mkdir(exist_ok=True)
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.campaigns.gil", "--runs", "3", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    rate, moved = read_report(path).rows
    assert rate.ratio is not None
    assert rate.ratio > 0.5
    assert moved.value > 0


@pytest.mark.server
@pytest.mark.sglang
@pytest.mark.timeout(1200)
def test_smoke_of_a_server(tmp_path: Path) -> None:
    run_smoke("crash_server", 1, tmp_path)
