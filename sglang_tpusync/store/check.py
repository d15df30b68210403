"""Checksums of a region, at a rate that leaves the disk to others."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from sglang_tpusync.errors import TpuSyncError
from sglang_tpusync.store.view import Finding, FindingKind, NamespaceView, RegionView, is_there

__all__ = ["Pace", "RegionReport", "check_region"]

_STEP_BYTES = 8 << 20
_STEPS_PER_S_MIN = 10  # a slow rate goes in small steps, so that it is even and the progress moves


class RegionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a check of one region found."""

    base_path: str
    num_slots: int = 0
    num_intact: int = 0
    num_moved: int = 0  # changed by a writer while they were read: neither whole nor damaged
    num_bytes: int = 0  # of payload, read
    num_repaired: int = 0
    findings: tuple[Finding, ...] = ()
    skipped: str = ""  # why it was not checked; empty
    refused: str = ""  # why it was not repaired; empty


class Pace:
    """Sleeps so that no more than `bytes_per_s` go on average; None: never sleeps."""

    def __init__(self, bytes_per_s: int | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._begin_s = time.monotonic()
        self.step_bytes = _STEP_BYTES
        if bytes_per_s is not None:
            self.step_bytes = max(1, min(_STEP_BYTES, bytes_per_s // _STEPS_PER_S_MIN))

    def wait(self, num_bytes: int) -> None:
        if self._bytes_per_s is None:
            return
        ahead_s = num_bytes / self._bytes_per_s - (time.monotonic() - self._begin_s)
        if ahead_s > 0:
            time.sleep(ahead_s)


def check_region(
    path: str,
    namespace: NamespaceView,
    region: RegionView,
    *,
    bytes_per_s: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    repair: bool = False,
) -> RegionReport:
    """Compares records with payloads. `on_progress` gets records looked at, and records in all.

    `repair`: settles what was found, unless the region has a writer. Never raises for what is wrong with the region.
    """
    reason = _why_not(region)
    if reason:
        return RegionReport(base_path=region.base_path, skipped=reason)
    try:
        return _check(path, namespace, region, Pace(bytes_per_s), on_progress, repair)
    except TpuSyncError as error:
        if not is_there(region.base_path):
            return RegionReport(base_path=region.base_path, skipped="was removed meanwhile")
        finding = Finding("unreadable", 0, str(error))
        return RegionReport(base_path=region.base_path, findings=(finding,))


def _why_not(region: RegionView) -> str:
    if region.is_newer:
        return f"format version {region.format_version} is newer than this program: left alone"
    if not region.has_table or not region.has_slots:
        return f"has no {'slot file' if region.has_table else 'table'}: `tpusync repair` removes it"
    return ""


def _check(
    path: str,
    namespace: NamespaceView,
    region: RegionView,
    pace: Pace,
    on_progress: Callable[[int, int], None],
    repair: bool,
) -> RegionReport:
    from sglang_tpusync import _core

    check = _core.store.RegionCheck(region.base_path, namespace.digest)
    goes_on = True
    while goes_on:
        goes_on = check.step(pace.step_bytes)
        progress = check.progress
        on_progress(progress["num_looked_at"], progress["num_slots"])
        pace.wait(progress["num_bytes"])
    report = RegionReport(
        base_path=region.base_path,
        num_slots=progress["num_slots"],
        num_intact=progress["num_intact"],
        num_moved=progress["num_moved"],
        num_bytes=progress["num_bytes"],
        findings=tuple(_finding(region.base_path, **finding) for finding in check.findings),
    )
    return _repaired(path, check, report) if repair and report.findings else report


def _finding(base_path: str, kind: FindingKind, slot: int, text: str) -> Finding:
    return Finding(kind, slot, text.removeprefix(f"{base_path}: "))


def _repaired(path: str, check: object, report: RegionReport) -> RegionReport:
    try:
        num_repaired = check.repair(path, report.base_path)  # type: ignore[attr-defined]
    except TpuSyncError as error:
        return msgspec.structs.replace(report, refused=str(error))
    return msgspec.structs.replace(report, num_repaired=num_repaired)
