"""`tpusync top`: what the servers of this node do with their tiers, live."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from sglang_tpusync.observe import Status, Statuses

__all__ = ["top"]

_SILENT_AFTER_S = 5.0
# Title, and the counter whose rate it is; pages a second, or bytes.
_RATES = (
    ("asked", "pages_queried"),
    ("hit", "pages_hit"),
    ("read", "pages_read"),
    ("stored", "pages_stored"),
    ("read B/s", "bytes_read"),
    ("stored B/s", "bytes_stored"),
)
# Where hits were, from the nearest tier on; a store without a shared host pool has the last one only.
_TIERS = (
    ("own DRAM", "tier_match_own_pages_total"),
    ("peers' DRAM", "tier_match_peer_pages_total"),
    ("disk", "tier_match_flash_pages_total"),
)
# Everything that was wanted and did not happen: counters that are one for each reason, and others.
_LOSSES_BY_REASON = ("pages_missed_", "pages_refused_")
_LOSSES = (
    "faults", "corrupt", "io_errors", "refused_budget", "refused_space",
    "refused_admission", "refused_busy", "refused_io", "refused_breaker", "expired", "cancelled", "match_declined",
    "host_seals_not_in_use_total", "host_seals_cancelled_total", "host_pages_corrupt_total",
    "host_reads_overtaken_total", "tier_match_declined_pages_total", "tier_get_missed_pages_total",
    "tier_get_corrupt_pages_total", "spill_pages_refused_total", "spill_pages_not_queued_total",
    "spill_pages_gone_total", "copies_redone",
)  # fmt: skip

StatusPath = Annotated[Path | None, typer.Option("--status-path", help="Status files (default: the configured ones).")]


def top(
    interval: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Two looks, one table, and end.")] = False,
    status_path: StatusPath = None,
    json_output: Annotated[bool, typer.Option("--json", help="One look as one JSON document, and end.")] = False,
) -> None:
    """Show the stores that servers have open: tiers, rates, hits by tier, and what was lost by reason.

    Without a terminal as with --once. Exit code: 0 all status files can be read, 1 one cannot, 2 it cannot run.
    """
    from sglang_tpusync.config import read_options, status_path_of
    from sglang_tpusync.observe import read_statuses

    directory = status_path.expanduser().absolute() if status_path is not None else status_path_of(read_options(None))
    seen = read_statuses(directory)
    if json_output:
        import msgspec

        document = {"exit_code": int(bool(seen.trouble)), **msgspec.to_builtins(seen)}
        typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    elif once or not sys.stdout.isatty():
        from rich.console import Console

        time.sleep(interval)
        before, seen = seen, read_statuses(directory)
        Console(soft_wrap=True, highlight=False).print(_picture(before, seen))
    else:
        seen = _watch(directory, interval, seen)
    raise typer.Exit(1 if seen.trouble else 0)


def _watch(directory: Path, interval: float, seen: Statuses) -> Statuses:
    from rich.live import Live

    from sglang_tpusync.observe import read_statuses

    try:
        with Live(_picture(seen, seen), auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(interval)
                before, seen = seen, read_statuses(directory)
                live.update(_picture(before, seen), refresh=True)
    except KeyboardInterrupt:
        return seen


def _picture(before: Statuses, now: Statuses) -> RenderableType:
    from rich.console import Group
    from rich.markup import escape
    from rich.text import Text

    parts: list[Any] = []
    if not now.found:
        parts.append(Text(f"no process has a store open ({now.path} has no status of a living one)"))
    else:
        parts += [_table_of_tiers(now), Text(), _table_of_rates(before, now), Text(), *_losses(now)]
    parts += [Text.from_markup(f"[red]unreadable:[/] {escape(line)}") for line in now.trouble]
    return Group(*parts)


def _table_of_tiers(now: Statuses) -> Table:
    from sglang_tpusync.cli.store_text import size_text

    table = _table("process", "namespace", "DRAM pages", "DRAM slots", "disk pages", "disk", "of", "budget left", "")
    for status in now.found:
        number = _numbers_of(status)
        has_dram = "host_slots" in number
        table.add_row(
            str(status.process_id),
            _plain(status.namespace[:8]),
            f"{number['host_pages_sealed']:,.0f}" if has_dram else "-",
            f"{number['host_slots']:,.0f}" if has_dram else "-",
            f"{number.get('entries', 0):,.0f}",
            size_text(int(number.get("bytes_on_disk", 0))),
            size_text(int(number.get("capacity_bytes", 0))),
            size_text(int(number.get("budget_left_bytes", 0))),
            ", ".join(_remarks(status, now.unix_ns)),
        )
    return table


def _remarks(status: Status, unix_ns: int) -> Iterator[str]:
    number = _numbers_of(status)
    silent_s = (unix_ns - status.unix_ns) / 1e9
    if silent_s > _SILENT_AFTER_S:
        yield f"[red]silent for {silent_s:.0f} s[/]"
    if number.get("breaker_open"):
        yield "[red]writing paused: the disk is slow or fails[/]"
    if number.get("read_breaker_open"):
        yield "[red]look-ups paused: the disk is slow or fails[/]"
    if number.get("open") == 0:
        yield "not open"


def _table_of_rates(before: Statuses, now: Statuses) -> Table:
    from sglang_tpusync.cli.store_text import size_text

    table = _table("process", *(title for title, _ in _RATES), "", *(f"hits in {title}" for title, _ in _TIERS))
    earlier = {(status.process_id, status.namespace): status for status in before.found}
    for status in now.found:
        old = earlier.get((status.process_id, status.namespace), status)
        seconds = (status.unix_ns - old.unix_ns) / 1e9
        number, was = _numbers_of(status), _numbers_of(old)
        cells = []
        for title, name in _RATES:
            rate = max(0.0, number.get(name, 0) - was.get(name, 0)) / seconds if seconds > 0 else 0.0
            cells.append(size_text(int(rate)) if title.endswith("B/s") else f"{rate:,.0f}/s")
        hits = [f"{number[name]:,.0f}" if name in number else "-" for _, name in _TIERS]
        if "tier_match_flash_pages_total" not in number:
            hits[-1] = f"{number.get('pages_hit', 0):,.0f}"
        table.add_row(str(status.process_id), *cells, "", *hits)
    return table


def _losses(now: Statuses) -> Iterator[Text]:
    from rich.text import Text

    for status in now.found:
        number = _numbers_of(status)
        names = [name for name in number if name.startswith(_LOSSES_BY_REASON)]
        lost = [f"{name.removesuffix('_total')} {number[name]:,.0f}" for name in (*names, *_LOSSES) if number.get(name)]
        yield Text(f"{status.process_id}: lost: {', '.join(lost) if lost else 'nothing'}")


def _numbers_of(status: Status) -> dict[str, float]:
    return {name: value for name, value in status.stats.items() if isinstance(value, int | float)}


def _table(*titles: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="left" if title in ("process", "namespace", "") else "right", no_wrap=True)
    return table


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape("".join(char for char in text if char.isprintable()))
