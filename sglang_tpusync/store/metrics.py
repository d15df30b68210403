"""What a store directory shows, in the text format of Prometheus: for the textfile collector of a node exporter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sglang_tpusync.store.view import NamespaceView, RegionView, StoreView

__all__ = ["prometheus_text"]

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

Sample = tuple[Mapping[str, str], float]


def prometheus_text(view: StoreView) -> str:
    """One document. Names end in their unit; times are seconds since 1970."""
    lines: list[str] = []
    for name, kind, text, samples in [*_of_store(view), *_of_regions(view)]:
        rows = [f"tpusync_store_{name}{_labels(labels)} {_number(value)}" for labels, value in samples]
        if rows:
            lines += [f"# HELP tpusync_store_{name} {text}", f"# TYPE tpusync_store_{name} {kind}", *rows]
    return "\n".join(lines) + "\n"


def _of_store(view: StoreView) -> Iterable[tuple[str, str, str, list[Sample]]]:
    def one(value: float | None) -> list[Sample]:
        return [] if value is None else [({"path": view.path}, value)]

    yield "used_bytes", "gauge", "What du says of the store.", one(view.used_bytes)
    yield "file_system_bytes", "gauge", "Size of the file system.", one(view.file_system_bytes)
    yield "available_bytes", "gauge", "Free bytes of the file system.", one(view.available_bytes)
    limits = view.limits
    yield "capacity_bytes", "gauge", "Capacity that the options of this environment give.", one(limits.capacity_bytes)
    yield "floor_bytes", "gauge", "Free space left to others, likewise.", one(limits.floor_bytes)
    yield "write_budget_left_bytes", "gauge", "What may still be written today.", one(limits.budget_left_bytes)
    yield (
        "write_budget_handed_out_bytes_total",
        "counter",
        "Write budget taken by processes since the ledger began.",
        one(view.handed_out_bytes),
    )


def _of_regions(view: StoreView) -> Iterable[tuple[str, str, str, list[Sample]]]:
    def each(value_of: str, scale: float = 1.0) -> list[Sample]:
        values = [(_region_labels(*pair), getattr(pair[1], value_of)) for pair in view.regions]
        return [(labels, value * scale) for labels, value in values if value is not None]

    yield "region_bytes", "gauge", "Disk space of a region.", each("disk_bytes")
    yield "region_page_bytes", "gauge", "Payload of one page.", each("page_bytes")
    yield "region_slots", "gauge", "Pages that the region has room for.", each("num_slots")
    yield "region_entries", "gauge", "Pages in the region.", each("num_entries")
    yield "region_damaged_records", "gauge", "Records that do not hold.", each("num_damaged")
    yield "region_prefixes", "gauge", "Trees of pages that continue each other.", each("num_trees")
    yield "region_created_timestamp_seconds", "gauge", "When it was made.", each("created_unix_ns", 1e-9)
    yield "region_modified_timestamp_seconds", "gauge", "When it was last written.", each("modified_unix_ns", 1e-9)
    oldest, newest = each("oldest_unix_ns", 1e-9), each("newest_unix_ns", 1e-9)
    yield "region_oldest_entry_timestamp_seconds", "gauge", "When the oldest entry was written.", oldest
    yield "region_newest_entry_timestamp_seconds", "gauge", "When the newest entry was written.", newest
    live: list[Sample] = [(_region_labels(*pair), float(pair[1].writer == "live")) for pair in view.regions]
    yield "region_writers", "gauge", "1 while a process writes the region.", live


def _region_labels(namespace: NamespaceView, region: RegionView) -> dict[str, str]:
    return {"namespace": namespace.name, "region": region.name}


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{key}="{value.translate(_ESCAPES)}"' for key, value in labels.items()) + "}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
