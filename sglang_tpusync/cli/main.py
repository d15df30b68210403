"""`tpusync`: the one command. Exit codes: 0 all is well, 1 with warnings or a goal missed, 2 it does not work."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from sglang_tpusync import __version__
from sglang_tpusync.cli.bench import app as bench_app
from sglang_tpusync.cli.demo import demo
from sglang_tpusync.cli.doctor import doctor
from sglang_tpusync.cli.layout import app as layout_app
from sglang_tpusync.cli.store import clear, export_metrics, inspect, repair, verify
from sglang_tpusync.cli.top import top
from sglang_tpusync.errors import TpuSyncError

__all__ = ["app", "main"]

app = typer.Typer(
    name="tpusync",
    help="A memory hierarchy for SGLang: check, measure and inspect.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("doctor")(doctor)
app.command("demo")(demo)
app.command("inspect")(inspect)
app.command("verify")(verify)
app.command("repair")(repair)
app.command("clear")(clear)
app.command("export-metrics")(export_metrics)
app.command("top")(top)
app.add_typer(bench_app, name="bench")
app.add_typer(layout_app, name="layout")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A memory hierarchy for SGLang: check, measure and inspect."""


def main() -> None:
    """The console script. An error of ours becomes one line on stderr and exit code 2; SIGTERM ends it as Ctrl-C
    does, with servers stopped and scratch directories removed.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        app()
    except TpuSyncError as error:
        typer.secho(f"tpusync: {error}", fg="red", err=True)
        sys.exit(2)
