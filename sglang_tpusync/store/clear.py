"""What may go from a store directory: regions without a writer, and files that belong to none."""

from __future__ import annotations

import msgspec

from sglang_tpusync.errors import TpuSyncError
from sglang_tpusync.store.view import NamespaceView, RegionView, StoreView, age_s

__all__ = ["CLEAR_OF_A_SERVER", "Removal", "clear_regions", "remove_orphans", "why_busy"]

CLEAR_OF_A_SERVER = "POST /hicache/storage-backend/clear of that server"


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """One region, removed or not."""

    base_path: str
    disk_bytes: int
    refused: str = ""  # why it is still there; empty
    has_writer: bool = False


def why_busy(region: RegionView) -> str:
    """Why a region may not be changed; empty if it may."""
    if region.writer == "live":
        return f"process {region.process_id} writes it"
    if region.writer == "unknown":
        return f"whether somebody writes it is unknown: {region.trouble or 'the directory stays locked'}"
    if region.is_newer:
        return f"format version {region.format_version} is newer than this program: left alone"
    return ""


def clear_regions(
    view: StoreView, *, namespace: str | None = None, older_than_s: float | None = None, dry_run: bool = False
) -> list[Removal]:
    """Removes the regions of namespaces that begin with `namespace` and that were last written longer ago than
    `older_than_s`; None: any. Namespaces that have no region left go, too.
    """
    removals = [
        _remove(view.path, region, dry_run)
        for space, region in view.regions
        if _is_meant(view, space, region, namespace, older_than_s)
    ]
    if not dry_run and any(not removal.refused for removal in removals):
        remove_orphans(view, dry_run=False)
    return removals


def remove_orphans(view: StoreView, *, dry_run: bool) -> list[str]:
    """Paths of files and directories that belong to no region; removed as well, unless `dry_run`."""
    from sglang_tpusync import _core

    return _core.store.remove_orphans(view.path, dry_run=dry_run)


def _is_meant(
    view: StoreView, space: NamespaceView, region: RegionView, namespace: str | None, older_than_s: float | None
) -> bool:
    if not region.has_table or (namespace is not None and not space.name.startswith(namespace)):
        return False
    age = age_s(view, region.modified_unix_ns)
    return older_than_s is None or (age is not None and age > older_than_s)


def _remove(path: str, region: RegionView, dry_run: bool) -> Removal:
    from sglang_tpusync import _core

    removal = Removal(base_path=region.base_path, disk_bytes=region.disk_bytes)
    if region.writer == "live":
        refused = f"{why_busy(region)}: the way there is {CLEAR_OF_A_SERVER}"
        return msgspec.structs.replace(removal, refused=refused, has_writer=True)
    if reason := why_busy(region):
        return msgspec.structs.replace(removal, refused=reason)
    if dry_run:
        return removal
    try:
        _core.store.remove_region(path, region.base_path)
    except TpuSyncError as error:
        return msgspec.structs.replace(removal, refused=str(error))
    return removal
