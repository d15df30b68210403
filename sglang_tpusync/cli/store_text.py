"""What the commands on a store directory print for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from sglang_tpusync.store import (
    DramRegionView,
    DramView,
    NamespaceView,
    RegionReport,
    RegionView,
    Removal,
    StoreView,
    Tree,
)
from sglang_tpusync.store.view import age_s

__all__ = ["print_dram", "print_orphans", "print_removals", "print_reports", "print_view"]

_UNITS = ("B", "kB", "MB", "GB", "TB")
_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_WORTH_PRINTING = ("kv_dtype", "page_size", "layers", "heads", "context")


def _console() -> Console:
    return Console(soft_wrap=True, highlight=False)


def size_text(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "unknown"
    value = float(num_bytes)
    for unit in _UNITS:
        if value < 1000 or unit == _UNITS[-1]:
            return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def age_text(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    for length, unit in _AGES:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now"


def print_view(view: StoreView, top: int) -> None:
    console = _console()
    limits = view.limits
    console.print(f"[bold]{escape(view.path)}[/]  format version {view.format_version}")
    console.print(
        f"  used           {size_text(view.used_bytes)} of a capacity of {size_text(limits.capacity_bytes)}; "
        f"{size_text(view.available_bytes)} of {size_text(view.file_system_bytes)} are free, "
        f"floor {size_text(limits.floor_bytes)}"
    )
    console.print(f"  write budget   {_budget(view)}")
    for version in view.other_versions:
        console.print(f"  v{version}             another format version: left alone")
    for name in view.foreign:
        console.print(f"  {escape(name)}: no part of a store")
    if view.wants_space:
        console.print("  a server waits for space that others hold beyond their share")
    for namespace in view.namespaces:
        _print_namespace(console, view, namespace, top)
    if not view.namespaces:
        console.print("  empty: nothing was stored yet")
    console.print("\nNot recorded on disk: " + "; ".join(view.not_recorded) + ".")


def print_dram(dram: DramView, unix_ns: int) -> None:
    if not dram.regions:
        return
    console = _console()
    console.print(f"\n[bold]{escape(dram.path)}[/]  DRAM regions, {size_text(dram.memory_bytes)} of memory")
    for region in dram.regions:
        writer = "[green]written by process" if region.has_writer else "no writer, last process"
        end = "[/]" if region.has_writer else ""
        console.print(
            f"  {region.path.rsplit('/', 1)[-1][:16]}...  {writer} {region.process_id or 'unknown'}{end}, "
            f"{size_text(region.memory_bytes)}"
        )
        if region.trouble:
            console.print(f"    [red]cannot be read[/]: {escape(region.trouble)}")
            continue
        damaged = f", [red]{region.num_damaged:,} damaged seals[/]" if region.num_damaged else ""
        console.print(
            f"    {region.num_pages:,} of {region.num_slots:,} slots hold a page of {size_text(region.page_bytes)}, "
            f"opened {age_text(_since(region, unix_ns))}{damaged}"
        )


def _since(region: DramRegionView, unix_ns: int) -> float | None:
    return None if region.opened_unix_ns is None else max(0.0, (unix_ns - region.opened_unix_ns) / 1e9)


def _budget(view: StoreView) -> str:
    day = f"{size_text(view.limits.write_budget_bytes_per_day)} a day"
    if view.ledger_damaged:
        return f"{day}; [yellow]the ledger is damaged[/]: the next server begins a new one"
    if view.limits.budget_left_bytes is None:
        return f"{day}; nothing was taken yet"
    return (
        f"{day}, {size_text(view.limits.budget_left_bytes)} left now; "
        f"{size_text(view.handed_out_bytes)} handed out since the ledger began"
    )


def _print_namespace(console: Console, view: StoreView, namespace: NamespaceView, top: int) -> None:
    console.print(f"\n[bold]{namespace.name}[/]  {escape(_model(namespace.identity))}")
    fields = namespace.identity or {}
    shown = [f"{key} {_compact(fields[key])}" for key in _WORTH_PRINTING if fields.get(key) is not None]
    pool = fields.get("pool")  # of the KV pages: none
    if isinstance(pool, dict):
        shown.insert(0, f"pool {pool.get('name')}")
    if shown:
        console.print("  " + escape(", ".join(shown)))
    console.print(f"  {namespace.num_entries:,} entries, {size_text(namespace.disk_bytes)}")
    for region in namespace.regions:
        _print_region(console, view, region)
    for name in (*namespace.foreign, *namespace.temporaries):
        console.print(f"  {escape(name)}: belongs to no region")
    trees = sorted((tree for region in namespace.regions for tree in region.largest), key=lambda tree: -tree.num_pages)
    for tree in trees[:top]:
        console.print(f"    {_tree(tree)}")


def _model(identity: dict[str, Any] | None) -> str:
    if identity is None:
        return "identity unknown: namespace.json is missing or not JSON"
    model = identity.get("model")
    if not isinstance(model, dict):
        return f"model {_compact(model)}"
    name = model.get("fingerprint") or model.get("model_path") or "unknown"
    extra = [f"{key} {model[key]}" for key in ("revision", "quantization") if model.get(key)]
    return ", ".join([f"model {name}", *extra])


def _compact(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} {_compact(item)}" for key, item in value.items()) + "}"
    return str(value)


def _print_region(console: Console, view: StoreView, region: RegionView) -> None:
    writer = {
        "live": f"[green]written by process {region.process_id}[/]",
        "none": "no writer" + (f", last process {region.process_id}" if region.process_id else ""),
        "unknown": "[yellow]writer unknown[/]",
    }[region.writer]
    console.print(f"  {region.name}  {writer}, {size_text(region.disk_bytes)}")
    if region.is_newer:
        console.print(f"    [yellow]format version {region.format_version} is newer than this program[/]: left alone")
        return
    if region.trouble:
        console.print(f"    [red]cannot be read[/]: {escape(region.trouble)}")
    if not region.has_table or not region.has_slots:
        console.print(f"    [yellow]has no {'slot file' if region.has_table else 'table'}[/]")
    if region.num_slots is not None:
        console.print(
            f"    {region.num_entries:,} of {region.num_slots:,} slots hold a page of {size_text(region.page_bytes)}, "
            f"in {region.num_trees:,} prefixes" + _damaged(region)
        )
    if region.oldest_unix_ns is not None:
        console.print(
            f"    oldest entry {age_text(age_s(view, region.oldest_unix_ns))}, "
            f"newest {age_text(age_s(view, region.newest_unix_ns))}"
        )
    console.print(
        f"    made {age_text(age_s(view, region.created_unix_ns))}, "
        f"last written {age_text(age_s(view, region.modified_unix_ns))}"
    )


def _damaged(region: RegionView) -> str:
    return f", [red]{region.num_damaged:,} damaged records[/]" if region.num_damaged else ""


def _tree(tree: Tree) -> str:
    depth = f", {tree.root_depth} earlier pages are not here" if tree.root_depth else ""
    return f"prefix {tree.root[:16]}  {tree.num_pages:,} pages, longest path {tree.num_pages_longest:,}{depth}"


def print_reports(reports: Sequence[RegionReport], lines: int) -> None:
    console = _console()
    left = lines
    for report in reports:
        console.print(f"{escape(report.base_path)}: {_verdict(report)}")
        for finding in report.findings[:left]:
            console.print(f"    {finding.kind}: {escape(finding.text)}")
        left = max(0, left - len(report.findings))
    total = sum(len(report.findings) for report in reports)
    if total > lines:
        console.print(f"{total - lines:,} more damages are not printed")
    intact = sum(report.num_intact for report in reports)
    read = sum(report.num_bytes for report in reports)
    console.print(f"{intact:,} pages are whole, {size_text(read)} read, {total:,} damages")


def _verdict(report: RegionReport) -> str:
    if report.skipped:
        return f"[yellow]not checked[/]: {escape(report.skipped)}"
    if report.refused:
        return f"[yellow]not repaired[/]: {escape(report.refused)}"
    moved = f", {report.num_moved:,} changed meanwhile" if report.num_moved else ""
    counts = f"{report.num_intact:,} pages are whole{moved}"
    if not report.findings:
        return f"[green]clean[/], {counts}"
    repaired = f", {report.num_repaired:,} repaired" if report.num_repaired else ""
    return f"[red]{len(report.findings):,} damages[/]{repaired}, {counts}"


def print_orphans(orphans: Iterable[str], dry_run: bool) -> None:
    console = _console()
    for orphan in orphans:
        console.print(f"{escape(orphan)}: belongs to no region, {'would be removed' if dry_run else 'removed'}")


def print_removals(removals: Sequence[Removal], dry_run: bool) -> None:
    console = _console()
    for removal in removals:
        done = "would be removed" if dry_run else "removed"
        text = f"[yellow]left[/]: {escape(removal.refused)}" if removal.refused else done
        console.print(f"{escape(removal.base_path)}  {size_text(removal.disk_bytes)}  {text}")
    if not removals:
        console.print("no region is meant")
