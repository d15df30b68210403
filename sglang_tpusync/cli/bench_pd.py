"""Options of `tpusync bench pd`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["pd"]


def pd(
    model: Annotated[str, typer.Option(help="A directory, or a model that is built here: long-llama, smollm2.")] = (
        "long-llama"
    ),
    prompt_tokens: Annotated[str, typer.Option(help="Lengths of prompts, separated by commas.")] = "2048,8192",
    rounds: Annotated[int, typer.Option(help="Rounds; every arm is in every round.", min=1)] = 5,
    concurrency: Annotated[int, typer.Option(help="Requests at once, in the last row.", min=1, max=8)] = 8,
    logs: Annotated[Path | None, typer.Option(help="Directory for the logs of the servers.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Prefill and decode on real servers of their own, beside one server that does both.

    Exit code: 0, or 1 for a server that failed or an answer that differs.
    """
    from sglang_tpusync.bench.host import describe_host
    from sglang_tpusync.bench.pd import pd_rows
    from sglang_tpusync.bench.report import write_report
    from sglang_tpusync.errors import TpuSyncError

    try:
        lengths = [int(length) for length in prompt_tokens.split(",")]
    except ValueError:
        lengths = []
    if not lengths or not all(1 <= length <= 65000 for length in lengths):
        raise typer.BadParameter(f"{prompt_tokens!r}: allowed are numbers from 1 to 65000, separated by commas")
    directory = logs or Path(tempfile.mkdtemp(prefix="bench-pd-"))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        rows = pd_rows(directory, model=model, lengths=lengths, num_rounds=rounds, concurrency=concurrency)
    except TpuSyncError as error:
        typer.echo(f"error: {error}\nlogs: {directory}", err=True)
        raise typer.Exit(1) from error
    for row in rows:
        beside = "" if row.ratio is None else f"  {row.ratio:.2f} of {row.limit}"
        typer.echo(f"{row.case:36} {row.value:8.3f} {row.unit:17} spread {row.spread:.2f}{beside}")
    if json_file is not None:
        write_report(json_file, "pd", describe_host(directory), rows)
