"""What a store directory holds: namespaces, regions, entries, limits."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from sglang_tpusync.config import Options, size_in_bytes
from sglang_tpusync.errors import StorageError, TpuSyncError, UnsupportedError

__all__ = [
    "NOT_RECORDED",
    "Finding",
    "FindingKind",
    "Limits",
    "NamespaceView",
    "RegionView",
    "StoreView",
    "Tree",
    "age_s",
    "is_there",
    "read_store",
]

# What one might look for and the format does not have.
NOT_RECORDED = (
    "hits of an entry: only a running server counts them, for itself",
    "last use of an entry: the table has when it was written",
    "limits of a running server: those shown are what the options of this environment give",
)


FindingKind = Literal["record", "payload", "unreadable", "header", "short_table"]


class Finding(msgspec.Struct, frozen=True):
    """One damage of a region."""

    kind: FindingKind
    slot: int  # of "short_table": the number of records
    text: str


class Tree(msgspec.Struct, frozen=True):
    """Pages of a region that continue each other."""

    root: str  # key of the first of them, 64 hex digits
    root_depth: int  # pages before the root, which are not in the region; 0 for the head of a prefix
    num_pages: int
    num_pages_longest: int  # of the longest path


class RegionView(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one writer process. Times are nanoseconds since 1970."""

    name: str
    base_path: str  # without suffix
    has_table: bool
    has_slots: bool
    writer: Literal["none", "live", "unknown"]
    process_id: int | None  # who writes, or wrote last
    opened_unix_ns: int | None  # by that process
    format_version: int | None  # None: the header is damaged or was never written
    page_bytes: int | None
    slot_bytes: int | None
    created_unix_ns: int | None
    modified_unix_ns: int
    table_bytes: int
    slots_bytes: int
    disk_bytes: int
    trouble: str  # why it cannot be read; empty
    # From the table; None where it cannot be read or was not asked for.
    num_slots: int | None = None
    num_entries: int | None = None
    num_damaged: int | None = None  # records; beside a writer, some may only be half written
    num_trees: int | None = None
    oldest_unix_ns: int | None = None  # when the entry was written that was written first; None: there is none
    newest_unix_ns: int | None = None  # and last
    largest: tuple[Tree, ...] = ()

    @property
    def is_newer(self) -> bool:
        from sglang_tpusync import _core

        return self.format_version is not None and self.format_version > _core.store.FORMAT_VERSION


class NamespaceView(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that belongs to one identity."""

    name: str  # the first 32 hex digits of its digest
    identity: dict[str, Any] | None  # the readable fields; None: missing or not JSON
    digest: bytes | None  # 32 bytes, where the identity proves it
    regions: tuple[RegionView, ...]
    foreign: tuple[str, ...]  # file names that no store gives
    temporaries: tuple[str, ...]  # left behind by a process that was killed

    @property
    def disk_bytes(self) -> int:
        return sum(region.disk_bytes for region in self.regions)

    @property
    def num_entries(self) -> int:
        return sum(region.num_entries or 0 for region in self.regions)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of the directory, as the options of this environment give them."""

    capacity_bytes: int
    floor_bytes: int
    write_budget_bytes_per_day: int
    budget_left_bytes: int | None  # None: no ledger, or a damaged one


class StoreView(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    format_version: int
    other_versions: tuple[int, ...]  # directories of formats that this program leaves alone
    namespaces: tuple[NamespaceView, ...]
    foreign: tuple[str, ...]
    used_bytes: int
    file_system_bytes: int
    available_bytes: int
    limits: Limits
    handed_out_bytes: int | None  # of the write budget since the ledger began
    ledger_damaged: bool
    wants_space: bool  # a server below its share waits for it
    unix_ns: int  # when this was read
    not_recorded: tuple[str, ...] = NOT_RECORDED

    @property
    def regions(self) -> list[tuple[NamespaceView, RegionView]]:
        return [(namespace, region) for namespace in self.namespaces for region in namespace.regions]


def is_there(base_path: str) -> bool:
    """Whether the region has both files now; a server may remove one that has no writer at any time."""
    return os.path.exists(base_path + ".table") and os.path.exists(base_path + ".slots")


def age_s(view: StoreView, unix_ns: int | None) -> float | None:
    """Seconds from a time stamp of the view to the moment it was read."""
    return None if unix_ns is None else max(0.0, (view.unix_ns - unix_ns) / 1e9)


def read_store(path: Path, options: Options, *, tables: bool = True, num_trees: int = 0) -> StoreView:
    """The store at `path`. `tables`: count entries, and keep the `num_trees` largest trees of each region.

    Raises StorageError if there is no store or it cannot be read, UnsupportedError if all that is there is of another
    format version.
    """
    from sglang_tpusync import _core

    if not path.exists():
        raise StorageError(f"path = '{path}': there is nothing; allowed is the directory of a store")
    raw = _core.store.view(str(path))
    if not raw["has_store"]:
        if raw["other_versions"]:
            raise UnsupportedError(
                f"path = '{path}': holds format version {max(raw['other_versions'])}, "
                f"this program knows {_core.store.FORMAT_VERSION} and leaves it alone"
            )
        raise StorageError(f"path = '{path}': holds no store; allowed is the directory of one, with v1 in it")
    ledger = raw["ledger"]
    return StoreView(
        path=str(path),
        format_version=_core.store.FORMAT_VERSION,
        other_versions=tuple(raw["other_versions"]),
        namespaces=tuple(_namespace(path, entry, tables, num_trees) for entry in raw["namespaces"]),
        foreign=tuple(raw["strangers"]),
        used_bytes=raw["used_bytes"],
        file_system_bytes=raw["total_bytes"],
        available_bytes=raw["available_bytes"],
        limits=_limits(path, options, raw["total_bytes"]),
        handed_out_bytes=None if ledger is None else ledger[2],
        ledger_damaged=raw["ledger_damaged"],
        wants_space=raw["wants_space"],
        unix_ns=time.time_ns(),
    )


def _limits(path: Path, options: Options, file_system_bytes: int) -> Limits:
    from sglang_tpusync import _core

    sizes = {
        key: size_in_bytes(key, getattr(options, key), file_system_bytes)
        for key in ("capacity", "floor", "write_budget_per_day")
    }
    found = _core.store.limits(
        path=str(path),
        capacity_bytes=sizes["capacity"],
        floor_bytes=sizes["floor"],
        write_budget_bytes_per_day=sizes["write_budget_per_day"],
    )
    return msgspec.convert(found, Limits)


def _namespace(path: Path, raw: dict[str, Any], tables: bool, num_trees: int) -> NamespaceView:
    digest = hashlib.sha256(raw["json"]).digest()
    proven = digest if raw["json"] and digest.hex().startswith(raw["name"]) else None
    directory = path / "v1" / raw["name"]
    return NamespaceView(
        name=raw["name"],
        identity=_identity(raw["json"]),
        digest=proven,
        regions=tuple(_region(directory, entry, proven, tables, num_trees) for entry in raw["regions"]),
        foreign=tuple(raw["strangers"]),
        temporaries=tuple(raw["temporaries"]),
    )


def _identity(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _region(directory: Path, raw: dict[str, Any], digest: bytes | None, tables: bool, num_trees: int) -> RegionView:
    base_path = str(directory / raw["name"])
    region: RegionView = msgspec.convert(
        {key: value for key, value in raw.items() if key != "namespace"} | {"base_path": base_path}, RegionView
    )
    if not tables or not region.has_table or not region.has_slots or region.trouble or region.is_newer:
        return region
    return _with_table(region, digest, num_trees)


def _with_table(region: RegionView, digest: bytes | None, num_trees: int) -> RegionView:
    from sglang_tpusync import _core

    try:
        summary = _core.store.summarize(region.base_path, digest, num_trees)
    except TpuSyncError as error:
        return msgspec.structs.replace(region, trouble=str(error) if is_there(region.base_path) else "")
    trees = tuple(
        Tree(tree["root"].hex(), tree["root_depth"], tree["num_pages"], tree["num_pages_longest"])
        for tree in summary.pop("largest")
    )
    return msgspec.structs.replace(region, largest=trees, **summary)
