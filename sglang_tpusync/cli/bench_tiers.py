"""Options of `tpusync bench tiers`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["tiers"]


def tiers(
    page_kib: Annotated[str, typer.Option(help="Sizes of pages, separated by commas.")] = "16,64,256,1024",
    pages: Annotated[str, typer.Option(help="Numbers of pages to look up among.")] = "1000000",
    prefix_pages: Annotated[int, typer.Option(help="Pages of one lookup.", min=1)] = 128,
    queries: Annotated[int, typer.Option(help="Lookups.", min=90)] = 20000,
    adopt_gib: Annotated[float, typer.Option(help="Size of the region that is adopted.", min=0.001)] = 8,
    rounds: Annotated[int, typer.Option(help="Rounds; every arm is in every round.", min=1)] = 9,
    root: Annotated[Path, typer.Option(help="Directory in memory for the regions.")] = Path("/dev/shm"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Seal, get, match and adoption of DRAM regions, beside memcpy of the same pages.

    Exit code: 0 every goal met, 1 not so.
    """
    from sglang_tpusync.bench.host import describe_host
    from sglang_tpusync.bench.report import meets_goal, write_report
    from sglang_tpusync.bench.tiers import adopt_row, copy_rows, match_rows

    rows = copy_rows(root, [int(size) * 1024 for size in page_kib.split(",")], rounds)
    rows += match_rows(root, [int(count) for count in pages.split(",")], prefix_pages, queries)
    rows.append(adopt_row(root, int(adopt_gib * 2**30), rounds))
    for row in rows:
        beside = "" if row.ratio is None else f"  {row.ratio:.2f} of {row.limit}"
        typer.echo(f"{row.case:48} {row.value:10.4g} {row.unit:5} spread {row.spread:.2f}{beside}")
    if json_file is not None:
        write_report(json_file, "tiers", describe_host(root), rows)
    raise typer.Exit(0 if all(meets_goal(row) is not False for row in rows) else 1)
