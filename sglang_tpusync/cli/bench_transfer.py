"""Options of `tpusync bench transfer`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["transfer"]


def transfer(
    streams: Annotated[int, typer.Option(help="TCP streams, of ours and of raw TCP.", min=1, max=64)] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds; every arm is in every round.", min=1)] = 9,
    sample_mib: Annotated[int, typer.Option("--sample-mib", help="Bytes of one batched sample.", min=16)] = 256,
    set_mib: Annotated[
        int | None, typer.Option("--set-mib", help="Working set. Default: 4 times the last-level cache.", min=16)
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Bytes between two processes of this machine, by TCP and by memory, beside raw TCP and memcpy.

    Exit code: 0 every goal met, 1 not so, 2 it could not be measured.
    """
    from sglang_tpusync.bench.host import describe_host
    from sglang_tpusync.bench.report import meets_goal, write_report
    from sglang_tpusync.bench.transfer import TransferBench

    try:
        with TransferBench(num_streams=streams, set_bytes=None if set_mib is None else set_mib << 20) as bench:
            host = describe_host(streams=streams, set_bytes=bench.set_bytes, checksum=True, rounds=rounds)
            rows = bench.rows(num_rounds=rounds, sample_bytes=sample_mib << 20)
    except RuntimeError as error:
        typer.echo(f"could not be measured: {error}", err=True)
        raise typer.Exit(2) from error
    for row in rows:
        ratio = "" if row.ratio is None else f"  {row.ratio:.2f} of {row.limit_value:.2f} ({row.limit})"
        mark = {True: "  goal met", False: f"  goal {row.goal} MISSED", None: ""}[meets_goal(row)]
        typer.echo(f"{row.case:32} {row.value:7.3f} {row.unit}, spread {row.spread:.2f}{ratio}{mark}")
    if json_file is not None:
        write_report(json_file, "transfer", host, rows)
    raise typer.Exit(0 if all(meets_goal(row) is not False for row in rows) else 1)
