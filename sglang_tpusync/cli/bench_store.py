"""Options of `tpusync bench store`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["store"]

_SIZES = "4KiB,64KiB,1MiB,4MiB"
_MIN, _MAX = 4096, 64 << 20


def store(
    pages: Annotated[str, typer.Option(help="Sizes of a page, separated by commas.")] = _SIZES,
    rounds: Annotated[int, typer.Option(help="Rounds; every arm is in every round.", min=1)] = 9,
    peer: Annotated[
        list[str] | None, typer.Option(help="file, lmcache, nixl or none; default: all, installed when needed.")
    ] = None,
    io: Annotated[str, typer.Option(help="Engine of our store: auto, uring, threads or buffered.")] = "auto",
    path: Annotated[
        Path | None, typer.Option(help="Directory on the disk to measure; default: under your cache directory.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Pages in batches of 128 to the disk and cold from it, with checksums, beside fio and beside other stores.

    Exit code: 0 every goal met and no peer ahead, 1 not so, 2 it could not be measured.
    """
    from sglang_tpusync.bench.host import describe_host
    from sglang_tpusync.bench.report import meets_goal, write_report
    from sglang_tpusync.bench.serving.command import scratch_parent
    from sglang_tpusync.bench.store.measure import PEERS, behind, measure

    sizes = [_size(text) for text in pages.split(",")]
    peers = _choice("--peer", peer or list(PEERS), (*PEERS, "none"))
    _choice("--io", [io], ("auto", "uring", "threads", "buffered"))
    parent = path if path is not None else scratch_parent()
    parent.mkdir(parents=True, exist_ok=True)
    rows = measure(
        sizes,
        num_rounds=rounds,
        peers=[name for name in peers if name != "none"],
        parent=parent,
        io=io,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    for row in rows:
        others = "".join(f", {name} {value:.2f}" for name, value in row.peers.items())
        typer.echo(
            f"{row.case:28} {row.value:5.2f} GB/s, {row.ratio:.2f} of fio {row.limit_value:.2f} (goal {row.goal:g}), "
            f"spread {row.spread:.2f}{others}"
        )
    if json_file is not None:
        write_report(json_file, "store", describe_host(parent, rounds=rounds, io=io, fsync="none"), rows)
    if any(meets_goal(row) is False or behind(row) for row in rows):
        raise typer.Exit(1)


def _size(text: str) -> int:
    from sglang_tpusync.config import size_in_bytes
    from sglang_tpusync.errors import ConfigError

    size = size_in_bytes("--pages", text, 0) or 0
    if not _MIN <= size <= _MAX or size % _MIN:
        raise ConfigError(f"--pages {text!r}: allowed are multiples of 4 KiB from 4 KiB to 64 MiB")
    return size


def _choice(option: str, values: list[str], allowed: tuple[str, ...]) -> list[str]:
    from sglang_tpusync.errors import ConfigError

    for value in values:
        if value not in allowed:
            raise ConfigError(f"{option} {value!r}: allowed are {', '.join(allowed)}")
    return values
