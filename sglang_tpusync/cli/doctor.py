"""`tpusync doctor`: does everything that the store needs work here, shown end to end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sglang_tpusync.cli.checks.result import Result
    from sglang_tpusync.config import Options

__all__ = ["doctor"]

_MARKS = {
    "ok": "[green]ok      [/]",
    "note": "[cyan]note    [/]",
    "warning": "[yellow]warning [/]",
    "failed": "[red]failed  [/]",
}


def doctor(
    path: Annotated[Path | None, typer.Option(help="Directory of the store (default: the configured one).")] = None,
    config: Annotated[
        str | None, typer.Option(help="Extra config as for SGLang: JSON text or @file (TOML, JSON).")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Check versions, hooks and disk, and pass one page through the store and back.

    Exit code: 0 all is well, 1 it works but there are warnings, 2 something does not work.
    """
    from sglang_tpusync.cli.checks.result import exit_code

    results = _results(path, config)
    code = exit_code(results)
    if json_output:
        _print_json(results, code)
    else:
        _print_text(results, code)
    raise typer.Exit(code)


def _results(path: Path | None, config: str | None) -> list[Result]:
    from sglang_tpusync.cli.checks.disk import check_disk
    from sglang_tpusync.cli.checks.hooks import check_hooks
    from sglang_tpusync.cli.checks.result import Result
    from sglang_tpusync.cli.checks.roundtrip import check_roundtrip
    from sglang_tpusync.cli.checks.software import check_software
    from sglang_tpusync.errors import ConfigError

    results = [*check_software(), *check_hooks()]
    try:
        options, place = _configured(path, config)
    except ConfigError as error:
        return [*results, Result(name="configuration", status="failed", finding=str(error))]
    disk = check_disk(place, options)
    results += disk
    if disk[0].status != "failed":
        results.append(check_roundtrip(place, options))
    return results


def _configured(path: Path | None, config: str | None) -> tuple[Options, Path]:
    from sglang_tpusync.config import read_options, store_path

    options = read_options(config)
    return options, path.expanduser().absolute() if path is not None else store_path(options)


def _print_json(results: Sequence[Result], code: int) -> None:
    import msgspec

    from sglang_tpusync.cli.checks.reminders import REMINDERS

    document = {"exit_code": code, "results": results, "reminders": REMINDERS}
    typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def _print_text(results: Sequence[Result], code: int) -> None:
    from rich.console import Console
    from rich.markup import escape

    from sglang_tpusync.cli.checks.reminders import REMINDERS

    console = Console(soft_wrap=True, highlight=False)
    for result in _hooks_in_one_line(results):
        console.print(f"{_MARKS[result.status]}{result.name:<12} {escape(result.finding)}")
        if result.remedy:
            console.print(f"{'':<10}-> {escape(result.remedy)}", style="dim")
    console.print("\nNo fault, but often taken for one:")
    for reminder in REMINDERS:
        console.print(f"  * {escape(reminder)}")
    console.print("\n" + ("all is well", "it works, with warnings", "something does not work")[code])


def _hooks_in_one_line(results: Sequence[Result]) -> list[Result]:
    """The hooks that took as one result; those that did not each on its own."""
    from sglang_tpusync.cli.checks.result import Result

    took = [result for result in results if result.name.startswith("hook ") and result.status == "ok"]
    if not took:
        return list(results)
    finding = f"{len(took)} took, {took[0].details['tried']}: " + ", ".join(r.name.removeprefix("hook ") for r in took)
    summary = Result(name="hooks", status="ok", finding=finding)
    place = list(results).index(took[0])
    return [r for r in (*results[:place], summary, *results[place:]) if r not in took]
