"""DRAM regions of a node as tools see them: what they hold, whether it is whole, and which may go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from sglang_tpusync.errors import TpuSyncError
from sglang_tpusync.store.check import Pace, RegionReport
from sglang_tpusync.store.clear import CLEAR_OF_A_SERVER, Removal
from sglang_tpusync.store.view import Finding

__all__ = ["DramRegionView", "DramView", "check_dram", "clear_dram", "read_dram"]


class DramRegionView(msgspec.Struct, frozen=True, kw_only=True):
    """The host pool of one process, living or not. Times are nanoseconds since 1970."""

    path: str
    namespace: bytes  # 32 bytes
    has_writer: bool
    process_id: int | None  # who writes, or wrote last
    opened_unix_ns: int | None  # by that process
    modified_unix_ns: int
    memory_bytes: int
    page_bytes: int
    num_slots: int
    num_pages: int  # that are sealed
    num_damaged: int  # seals
    trouble: str  # why it cannot be read; empty


class DramView(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    regions: tuple[DramRegionView, ...] = ()

    @property
    def memory_bytes(self) -> int:
        return sum(region.memory_bytes for region in self.regions)


def read_dram(path: Path) -> DramView:
    """The regions under `path`; none where there is no such directory. Raises ConfigError for one that others may
    read or that is another user's.
    """
    from sglang_tpusync import _core

    if not path.exists():
        return DramView(path=str(path))
    regions = [msgspec.convert(raw, DramRegionView) for raw in _core.store.view_dram(str(path))]
    return DramView(path=str(path), regions=tuple(regions))


def check_dram(
    region: DramRegionView,
    *,
    bytes_per_s: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> RegionReport:
    """Compares pages with their seals. Never raises for what is wrong with the region."""
    from sglang_tpusync import _core

    pace = Pace(bytes_per_s)
    try:
        check = _core.store.DramCheck(region.path, region.namespace)
    except TpuSyncError as error:
        if not Path(region.path).exists():
            return RegionReport(base_path=region.path, skipped="was removed meanwhile")
        return RegionReport(base_path=region.path, findings=(Finding("unreadable", 0, str(error)),))
    goes_on = True
    while goes_on:
        goes_on = check.step(pace.step_bytes)
        progress = check.progress
        on_progress(progress["num_looked_at"], progress["num_slots"])
        pace.wait(progress["num_bytes"])
    return RegionReport(
        base_path=region.path,
        num_slots=progress["num_slots"],
        num_intact=progress["num_intact"],
        num_moved=progress["num_moved"],
        num_bytes=progress["num_bytes"],
        findings=tuple(Finding(**finding) for finding in check.findings),
    )


def clear_dram(
    view: DramView, *, unix_ns: int, namespace: str | None, older_than_s: float | None, dry_run: bool
) -> list[Removal]:
    """Removes regions without a writer, as clear_regions does. `unix_ns`: now."""
    return [
        _remove(view, region, dry_run)
        for region in view.regions
        if (namespace is None or region.namespace.hex().startswith(namespace))
        and (older_than_s is None or (unix_ns - region.modified_unix_ns) / 1e9 > older_than_s)
    ]


def _remove(view: DramView, region: DramRegionView, dry_run: bool) -> Removal:
    from sglang_tpusync import _core

    removal = Removal(base_path=region.path, disk_bytes=region.memory_bytes, has_writer=region.has_writer)
    busy = f"process {region.process_id} writes it: the way there is {CLEAR_OF_A_SERVER}"
    if region.has_writer:
        return msgspec.structs.replace(removal, refused=busy)
    if dry_run or _core.store.remove_dram(view.path, region.path) or not Path(region.path).exists():
        return removal
    return msgspec.structs.replace(removal, refused=busy, has_writer=True)
