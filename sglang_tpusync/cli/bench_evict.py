"""Options of `tpusync bench evict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["evict"]


def evict(
    traces: Annotated[
        Path | None,
        typer.Option(
            help="Directory with mooncake/*_trace.jsonl and kv-cache-tester/trace_*.json. Default: generated."
        ),
    ] = None,
    front_blocks: Annotated[
        int, typer.Option(help="Also behind a cache of so many blocks that hides its hits.", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the generated requests.", min=0)] = 0,
    requests: Annotated[int, typer.Option(help="Generated requests.", min=1)] = 20_000,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """What the store's eviction hits beside LRU, S3-FIFO and Belady's optimum, replayed without IO.

    Exit code: 0 every goal met, 1 not so, 2 the traces cannot be read.
    """
    from sglang_tpusync.bench.evict import measure
    from sglang_tpusync.bench.host import describe_host
    from sglang_tpusync.bench.report import meets_goal, write_report
    from sglang_tpusync.bench.traces import generate, read_traces
    from sglang_tpusync.errors import ConfigError

    try:
        workloads = [generate(seed, requests)] if traces is None else read_traces(traces)
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    rows = measure(workloads, front_blocks)
    for row in rows:
        goal = "" if meets_goal(row) is not False else " MISSED"
        limit = "" if row.limit is None else f", {row.limit} {row.limit_value:.2f}{goal}"
        peers = "".join(f", {name} {value:.2f}" for name, value in row.peers.items())
        typer.echo(f"{row.case:62} {row.value:9.2f} {row.unit}{limit}{peers}")
    if json_file is not None:
        write_report(json_file, "evict", describe_host(front_blocks=front_blocks, seed=seed), rows)
    if any(meets_goal(row) is False for row in rows):
        raise typer.Exit(1)
