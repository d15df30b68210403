"""The language of every benchmark: one report per run, one row per measured case.

`{"bench": name, "host": {...}, "rows": [...]}`. A row holds the median of its rounds, its spread (interquartile range
over median), the limit that the same run measured (what the value could be at best, or what it is compared with) and
the peers, all in the row's unit. `goal` is a bound on `ratio`: a minimum where higher is better, else a maximum.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

__all__ = [
    "Report",
    "Row",
    "ServingRow",
    "Source",
    "is_ahead",
    "measured",
    "meets_goal",
    "read_report",
    "spread_of",
    "write_report",
]

Source = Literal["nocache", "cold", "l1", "l2", "l3", "restart", "control"]


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured case. Immutable. Construction raises ValueError for a number that cannot be one."""

    case: str
    value: float
    unit: str
    better: Literal["higher", "lower"]
    spread: float = 0.0
    limit: str | None = None
    limit_value: float | None = None
    ratio: float | None = None
    goal: float | None = None
    peers: dict[str, float] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.case or not self.unit:
            raise ValueError("a row names its case and its unit")
        numbers = {"value": self.value, "spread": self.spread, "limit_value": self.limit_value, **self.peers}
        for name, number in numbers.items():
            if number is not None and not math.isfinite(number):
                raise ValueError(f"{self.case}: {name} = {number} is not a finite number")
        if self.spread < 0:
            raise ValueError(f"{self.case}: spread = {self.spread} is negative")
        if (self.limit is None) != (self.limit_value is None):
            raise ValueError(f"{self.case}: limit and limit_value come together")
        expected = None if not self.limit_value else self.value / self.limit_value
        if not _same(self.ratio, expected):
            raise ValueError(f"{self.case}: ratio = {self.ratio}, but value/limit_value = {expected}")
        if self.goal is not None and self.ratio is None:
            raise ValueError(f"{self.case}: a goal bounds the ratio, and there is none")


class ServingRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of `bench serving`: the time to the first token of prompts whose KV came from `source`."""

    prompt_tokens: int
    source: Source
    backend: str
    ttft_s: float
    cached_tokens: int
    identical: bool
    cached_by_tier: dict[str, int] = msgspec.field(default_factory=dict)
    loaded_bytes: int = 0


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a benchmark writes. Immutable."""

    bench: str
    host: dict[str, object]
    rows: list[Row]


def spread_of(values: Sequence[float]) -> float:
    """Interquartile range over median; 0 for fewer than two values or a median of 0."""
    if len(values) < 2:
        return 0.0
    median = statistics.median(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / abs(median) if median else 0.0


def measured(
    case: str,
    samples: Sequence[float],
    *,
    unit: str,
    better: Literal["higher", "lower"],
    limit: str | None = None,
    limit_samples: Sequence[float] = (),
    goal: float | None = None,
    peers: Mapping[str, Sequence[float]] | None = None,
) -> Row:
    """The row of one case from the samples of its rounds: medians everywhere, the spread of the case's own samples."""
    value = statistics.median(samples)
    limit_value = statistics.median(limit_samples) if limit is not None else None
    return Row(
        case=case,
        value=value,
        unit=unit,
        better=better,
        spread=spread_of(samples),
        limit=limit,
        limit_value=limit_value,
        ratio=value / limit_value if limit_value else None,
        goal=goal,
        peers={name: statistics.median(values) for name, values in (peers or {}).items()},
    )


def meets_goal(row: Row) -> bool | None:
    """Whether the ratio keeps the goal; None where the row has no goal."""
    if row.goal is None or row.ratio is None:
        return None
    return row.ratio >= row.goal if row.better == "higher" else row.ratio <= row.goal


def is_ahead(row: Row, peer: str) -> bool:
    """Whether the row is not behind the peer by more than its spread."""
    allowed = row.spread * abs(row.value)
    if row.better == "higher":
        return row.value + allowed >= row.peers[peer]
    return row.value - allowed <= row.peers[peer]


def write_report(path: Path, bench: str, host: Mapping[str, object], rows: Sequence[Row]) -> None:
    """Writes the report as one JSON document; the file appears whole or not at all."""
    document = msgspec.json.encode({"bench": bench, "host": dict(host), "rows": list(rows)})
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_bytes(msgspec.json.format(document, indent=2) + b"\n")
    unfinished.replace(path)


def read_report(path: Path) -> Report:
    """Reads a report back and checks it. Raises msgspec.ValidationError naming the field at fault."""
    document = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    rows = document.get("rows")
    if not isinstance(rows, list):
        raise msgspec.ValidationError("a report has a list `rows`")
    kinds = [ServingRow if isinstance(row, dict) and "source" in row else Row for row in rows]
    parsed = [msgspec.convert(row, kind) for row, kind in zip(rows, kinds, strict=True)]
    envelope = msgspec.convert({**document, "rows": []}, Report)
    return Report(bench=envelope.bench, host=envelope.host, rows=[*parsed])


def _same(left: float | None, right: float | None) -> bool:
    if left is None or right is None:
        return left is right
    return math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-12)
