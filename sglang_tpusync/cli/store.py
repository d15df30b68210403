"""`tpusync inspect`, `verify`, `repair`, `clear` and `export-metrics`: a store directory, beside servers or alone."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglang_tpusync.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from sglang_tpusync.store import DramView, RegionReport, StoreView

__all__ = ["clear", "export_metrics", "inspect", "repair", "verify"]

_RATE_ALLOWED = "bytes per second from 1 on, such as '500MB' or '64MiB'"
_AGE_ALLOWED = "a number with a unit: '90s', '30m', '12h', '7d' or '2w'"
_AGE = re.compile(r"([0-9]+)([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_NAMESPACE = re.compile(r"[0-9a-f]{1,32}")

StorePath = Annotated[Path | None, typer.Argument(help="Directory of the store (default: the configured one).")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
DramPath = Annotated[Path | None, typer.Option("--dram-path", help="DRAM regions (default: the configured ones).")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
Rate = Annotated[str | None, typer.Option(metavar="BYTES", help="Read at most this much per second: 500MB.")]
Lines = Annotated[int, typer.Option(min=0, help="Damages to print; all of them are counted.")]


def inspect(
    path: StorePath = None,
    top: Annotated[int, typer.Option(min=0, max=1000, help="Largest prefixes to show per namespace.")] = 5,
    dram_path: DramPath = None,
    json_output: AsJson = False,
) -> None:
    """Show namespaces, regions, entries, prefixes and limits of a store, and the node's DRAM regions.

    Exit code: 0 all of it can be read, 1 something cannot or is damaged, 2 there is no store to look at.
    """
    from sglang_tpusync.cli.store_text import print_dram, print_view

    view, dram = _read(path, num_trees=top), _read_dram(dram_path)
    code = 1 if _has_trouble(view) or any(region.trouble or region.num_damaged for region in dram.regions) else 0
    if json_output:
        _print_json(view, code, dram=dram)
    else:
        print_view(view, top)
        print_dram(dram, view.unix_ns)
    raise typer.Exit(code)


def verify(
    path: StorePath = None,
    rate: Rate = None,
    lines: Lines = 20,
    dram_path: DramPath = None,
    json_output: AsJson = False,
) -> None:
    """Compare all checksums of tables and slots, and of DRAM regions; also beside servers that write.

    Exit code: 0 clean, 1 damage found, 2 it cannot run.
    """
    from sglang_tpusync.cli.store_text import print_reports

    view, dram = _read(path), _read_dram(dram_path)
    reports = _check_all(view, _bytes_per_s(rate), quiet=json_output)
    reports += _check_dram(dram, _bytes_per_s(rate), quiet=json_output)
    code = 1 if any(report.findings for report in reports) else 0
    if json_output:
        _print_json({"path": view.path, "regions": reports}, code)
    else:
        print_reports(reports, lines)
    raise typer.Exit(code)


def repair(
    path: StorePath = None,
    rate: Rate = None,
    lines: Lines = 20,
    dry_run: DryRun = False,
    json_output: AsJson = False,
) -> None:
    """Drop damaged entries of regions without a writer, and remove files that belong to no region.

    Exit code: 0 all that was found is repaired (with --dry-run: nothing was found), 1 something is left, 2 it cannot
    run.
    """
    from sglang_tpusync.cli.store_text import print_orphans, print_reports
    from sglang_tpusync.store import remove_orphans

    view = _read(path)
    reports = _check_all(view, _bytes_per_s(rate), quiet=json_output, repair=True, dry_run=dry_run)
    orphans = remove_orphans(view, dry_run=dry_run)
    is_left = any(report.refused or report.num_repaired < len(report.findings) for report in reports)
    code = 1 if is_left or (dry_run and orphans) else 0
    if json_output:
        _print_json({"path": view.path, "dry_run": dry_run, "regions": reports, "orphans": orphans}, code)
    else:
        print_reports(reports, lines)
        print_orphans(orphans, dry_run)
    raise typer.Exit(code)


def clear(
    path: StorePath = None,
    namespace: Annotated[
        str | None, typer.Option(metavar="PREFIX", help="Only namespaces whose name begins with these hex digits.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Only regions that were last written longer ago: 7d.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every region.")] = False,
    dram: Annotated[bool, typer.Option("--dram", help="DRAM regions, in place of those of the store.")] = False,
    dram_path: DramPath = None,
    dry_run: DryRun = False,
    json_output: AsJson = False,
) -> None:
    """Remove regions that have no writer.

    Exit code: 0 all that was meant is gone, 1 something is left because a server writes it, 2 it cannot run.
    """
    from sglang_tpusync.cli.store_text import print_removals
    from sglang_tpusync.store import DramView, clear_dram, clear_regions

    if everything == (namespace is not None or older_than is not None):
        raise ConfigError("clear: allowed is either --all, or --namespace PREFIX, --older-than AGE or both of these")
    if dram and path is not None:
        raise ConfigError(f"clear {str(path)!r} --dram: allowed is either; a directory of DRAM regions is --dram-path")
    age_s = None if older_than is None else _seconds(older_than)
    place: StoreView | DramView = _read_dram(dram_path) if dram else _read(path, tables=False)
    if namespace is not None:
        _check_namespace(place, namespace)
    if isinstance(place, DramView):
        removals = clear_dram(place, unix_ns=time.time_ns(), namespace=namespace, older_than_s=age_s, dry_run=dry_run)
    else:
        removals = clear_regions(place, namespace=namespace, older_than_s=age_s, dry_run=dry_run)
    code = 1 if any(removal.refused for removal in removals) else 0
    if json_output:
        _print_json({"path": place.path, "dry_run": dry_run, "regions": removals}, code)
    else:
        print_removals(removals, dry_run)
    raise typer.Exit(code)


def export_metrics(path: StorePath = None) -> None:
    """Print what the directory shows in the text format of Prometheus.

    Exit code: 0 all of it can be read, 1 something cannot or is damaged, 2 there is no store to look at.
    """
    from sglang_tpusync.store import prometheus_text

    view = _read(path)
    typer.echo(prometheus_text(view), nl=False)
    raise typer.Exit(1 if _has_trouble(view) else 0)


def _read(path: Path | None, *, tables: bool = True, num_trees: int = 0) -> StoreView:
    from sglang_tpusync.config import read_options, store_path
    from sglang_tpusync.store import read_store

    options = read_options(None)
    place = path.expanduser().absolute() if path is not None else store_path(options)
    return read_store(place, options, tables=tables, num_trees=num_trees)


def _read_dram(path: Path | None) -> DramView:
    from sglang_tpusync.config import dram_path, read_options
    from sglang_tpusync.store import read_dram

    return read_dram(path.expanduser().absolute() if path is not None else dram_path(read_options(None)))


def _has_trouble(view: StoreView) -> bool:
    return view.ledger_damaged or any(
        region.trouble or (region.num_damaged and region.writer == "none") for _, region in view.regions
    )


def _check_all(
    view: StoreView, bytes_per_s: int | None, *, quiet: bool, repair: bool = False, dry_run: bool = False
) -> list[RegionReport]:
    from sglang_tpusync.store import RegionReport, check_region
    from sglang_tpusync.store.clear import why_busy

    reports = []
    for namespace, region in view.regions:
        # A server drops what it finds damaged by itself.
        if repair and not region.is_newer and (busy := why_busy(region)):
            reports.append(RegionReport(base_path=region.base_path, refused=busy))
            continue
        with _progress(f"{namespace.name[:8]} {region.name}", quiet) as on_progress:
            report = check_region(
                view.path,
                namespace,
                region,
                bytes_per_s=bytes_per_s,
                on_progress=on_progress,
                repair=repair and not dry_run,
            )
        reports.append(report)
    return reports


def _check_dram(dram: DramView, bytes_per_s: int | None, *, quiet: bool) -> list[RegionReport]:
    from sglang_tpusync.store import check_dram

    reports = []
    for region in dram.regions:
        with _progress(f"{region.namespace.hex()[:8]} DRAM", quiet) as on_progress:
            reports.append(check_dram(region, bytes_per_s=bytes_per_s, on_progress=on_progress))
    return reports


@contextmanager
def _progress(name: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _bytes_per_s(rate: str | None) -> int | None:
    from sglang_tpusync.config import size_in_bytes

    if rate is None:
        return None
    try:
        value = None if rate.strip().endswith("%") else size_in_bytes("--rate", rate, file_system_bytes=1)
    except ConfigError:
        value = None
    if not value:
        raise ConfigError(f"--rate {rate!r}: allowed are {_RATE_ALLOWED}")
    return value


def _seconds(age: str) -> int:
    found = _AGE.fullmatch(age.strip())
    if found is None:
        raise ConfigError(f"--older-than {age!r}: allowed is {_AGE_ALLOWED}")
    return int(found[1]) * _SECONDS[found[2]]


def _check_namespace(view: StoreView | DramView, prefix: str) -> None:
    from sglang_tpusync.store import DramView

    found = (
        sorted({region.namespace.hex()[:32] for region in view.regions})
        if isinstance(view, DramView)
        else [namespace.name for namespace in view.namespaces]
    )
    if _NAMESPACE.fullmatch(prefix) is None:
        raise ConfigError(f"--namespace {prefix!r}: allowed are 1 to 32 hex digits, as `tpusync inspect` prints them")
    if not any(name.startswith(prefix) for name in found):
        names = ", ".join(name[:8] for name in found) or "none"
        raise StorageError(f"--namespace {prefix!r}: no namespace begins with it; there are {names}")


def _print_json(document: Any, code: int, **more: Any) -> None:
    import msgspec

    fields = msgspec.to_builtins(document, builtin_types=(bytes,)) | msgspec.to_builtins(more, builtin_types=(bytes,))
    text = msgspec.json.encode({"exit_code": code, **_plain(fields)})
    typer.echo(msgspec.json.format(text, indent=2).decode())


def _plain(value: Any) -> Any:
    """Bytes as hex, at any depth."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
