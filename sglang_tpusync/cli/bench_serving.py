"""Options of `tpusync bench serving`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["serving"]


def serving(
    model: Annotated[str, typer.Option(help="long-llama, smollm2, or the directory of a model.")] = "long-llama",
    prompt_tokens: Annotated[
        str, typer.Option("--prompt-tokens", help="Lengths of the prompts, separated by commas.")
    ] = "2048,8192,16384",
    rounds: Annotated[int, typer.Option(help="Rounds; every arm is in every round.", min=1)] = 5,
    output_tokens: Annotated[int, typer.Option(help="Greedy tokens that are compared.", min=1)] = 16,
    seed: Annotated[int, typer.Option(help="Of the prompts.", min=0)] = 0,
    compare: Annotated[list[str] | None, typer.Option(help="A peer in the same run: file.")] = None,
    tp: Annotated[int, typer.Option(help="Tensor parallel ranks.", min=1)] = 1,
    tolerance: Annotated[
        float | None, typer.Option(help="Of a log probability. Default: 0 (the same bits) at --tp 1, else 0.02.")
    ] = None,
    control: Annotated[bool, typer.Option(help="Swap two stored pages of one prefix: the check must notice.")] = True,
    url: Annotated[
        str | None, typer.Option(help="Measure this running server (cold, L1, L3) instead of starting some.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the times here.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep stores and server logs in this directory.")] = None,
) -> None:
    """Time to the first token with KV from every tier, and proof that the answers are identical.

    Starts real servers on this machine's CPU: without cache, with our store, and with the peers. Each round asks new
    prompts cold, from our store after a flush, from host DRAM and from the device; then every server is killed with
    SIGKILL, started again, and asked once more. A tier that SGLang's own report does not confirm is an error.
    Exit code: 0 all identical and every goal met, 1 not so, 2 it could not be measured.
    """
    from sglang_tpusync.bench.serving.command import run_command

    raise typer.Exit(
        run_command(
            model=model,
            prompt_tokens=prompt_tokens,
            rounds=rounds,
            output_tokens=output_tokens,
            seed=seed,
            compare=tuple(compare or ()),
            tp=tp,
            tolerance=tolerance,
            control=control,
            url=url,
            json_file=json_file,
            png=png,
            keep=keep,
        )
    )
