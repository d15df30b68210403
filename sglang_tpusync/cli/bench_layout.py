"""Options of `tpusync bench layout`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["layout"]


def layout(
    pages: Annotated[int, typer.Option(help="Pages of the pools; 4096 are 512 MiB.", min=128)] = 4096,
    rounds: Annotated[int, typer.Option(help="Rounds; every arm is in every round.", min=1)] = 9,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Changes of layout beside memcpy of the same bytes, on one thread.

    Exit code: 0 every goal met, 1 not so.
    """
    from sglang_tpusync import _core
    from sglang_tpusync.bench.host import describe_host
    from sglang_tpusync.bench.layout import measure
    from sglang_tpusync.bench.report import meets_goal, write_report

    rows = measure(pages, rounds)
    for row in rows:
        goal = "" if row.goal is None else f" (goal {row.goal:g})"
        peers = "".join(f", {name} {value:.2f}" for name, value in row.peers.items())
        ratio = f"{row.ratio:.2f} of memcpy {row.limit_value:.2f}{goal}"
        typer.echo(f"{row.case:58} {row.value:6.2f} GB/s, {ratio}{peers}, spread {row.spread:.2f}")
    if json_file is not None:
        write_report(json_file, "layout", describe_host(kernels=_core.layout.KERNELS[-1], pages=pages), rows)
    if any(meets_goal(row) is False for row in rows):
        raise typer.Exit(1)
