"""What all campaigns share: their options, their report, their exit code.

A campaign runs as `./scripts/campaign NAME [--seed S] [--runs N] --json FILE`; it is a module with `run(seed, runs)`,
which answers rows. A smoke of each runs with the tests.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_tpusync.bench.host import describe_host
from sglang_tpusync.bench.report import Row, meets_goal, write_report

__all__ = ["ROOT", "as_count", "bound", "build_target", "disk", "fraction", "main"]

ROOT = Path(__file__).resolve().parents[2]


def main(name: str, run: Callable[[int, int], list[Row]], *, runs: int) -> None:
    """Runs the campaign as a script. Exit code: 0 every goal is met, 1 one is not."""
    parser = argparse.ArgumentParser(prog=f"campaign {name}", description=sys.modules[run.__module__].__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=runs)
    parser.add_argument("--json", type=Path, dest="json_file")
    options = parser.parse_args()
    rows = run(options.seed, options.runs)
    missed = [row for row in rows if meets_goal(row) is False]
    for row in rows:
        mark = "MISSED" if row in missed else "ok"
        print(f"{mark:<7} {row.case}: {row.value:.6g} {row.unit} (limit {row.limit}: {row.limit_value})")
    if options.json_file is not None:
        host = describe_host(seed=options.seed, runs=options.runs)
        write_report(options.json_file, name, host, rows)
    sys.exit(1 if missed else 0)


def build_target(name: str) -> Path:
    """Builds a program of the C++ side and answers where it is."""
    directory = ROOT / "build" / "campaign"
    options = ["-G", "Ninja", "-DTPUSYNC_PYTHON=OFF", "-DTPUSYNC_TESTS=ON"]
    subprocess.run(["cmake", "-S", ROOT, "-B", directory, *options], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", directory, "--target", name], check=True, stdout=subprocess.DEVNULL)
    return directory / name


def disk() -> Path:
    """A directory on a disk rather than in memory."""
    place = ROOT / "build"
    place.mkdir(exist_ok=True)
    return place


def bound(case: str, value: float, unit: str, most: float) -> Row:
    """A number that may be at most so large."""
    return Row(
        case=case, value=value, unit=unit, better="lower", limit="the bound", limit_value=most, ratio=value / most,
        goal=1.0,
    )  # fmt: skip


def fraction(case: str, part: int, whole: int, limit: str) -> Row:
    """The share that holds; the goal is all of it. An empty whole proves nothing and misses the goal."""
    value = float(part / whole) if whole else 0.0
    return Row(
        case=f"{case} ({part} of {whole})", value=value, unit="fraction", better="higher", limit=limit, limit_value=1.0,
        ratio=value, goal=1.0,
    )  # fmt: skip


def as_count(case: str, values: Sequence[int]) -> Row:
    """A plain number without a goal, so that a reader sees how much was tried."""
    return Row(case=case, value=float(sum(values)), unit="count", better="higher")
