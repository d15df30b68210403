"""Options of `tpusync demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["demo"]


def demo(
    out: Annotated[Path, typer.Option(help="Directory for report.json, report.md and ttft.png.")] = Path("demo-report"),
    rounds: Annotated[int, typer.Option(help="Rounds of the measurement.", min=1)] = 5,
) -> None:
    """Real servers, a crash, and the same answers sooner: with numbers, a picture and a verdict.

    Exit code: 0 PASS, 1 FAIL, 2 it could not run.
    """
    from sglang_tpusync.bench.serving.demo import run_demo

    raise typer.Exit(run_demo(out=out, rounds=rounds))
