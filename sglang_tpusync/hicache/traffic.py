"""What went through a storage backend: counters, SGLang's metrics of single batches, the summary line in the log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["Traffic"]

logger = logging.getLogger("sglang_tpusync")

_FAULT_LOG_INTERVAL_S = 60.0
_BATCHES_MAX = 4096  # kept between two polls of SGLang's metrics


class Traffic:
    """Counters of one backend, pages that were missed and refused also by reason. Thread-safe."""

    def __init__(self, summary_interval_s: float, what: str = "KV pages") -> None:
        self._what = what
        self._interval_s = summary_interval_s
        self._lock = threading.Lock()
        self._counters = dict.fromkeys(
            (
                "pages_queried",
                "pages_hit",
                "pages_read",
                "pages_missed",
                "pages_stored",
                "pages_refused",
                "bytes_read",
                "bytes_stored",
                "faults",
            ),
            0,
        )
        self._batches: dict[str, list[tuple[int, float]]] = {"read": [], "stored": []}
        self._logged_at: dict[str, float] = {}
        self._summary_at = time.monotonic()

    def queried(self, num_pages: int, num_hit: int) -> None:
        self._add(pages_queried=num_pages, pages_hit=num_hit)

    def read(self, num_pages: int, page_bytes: int, seconds: float) -> None:
        self._add(pages_read=num_pages, bytes_read=num_pages * page_bytes)
        self._batch("read", num_pages, num_pages * page_bytes, seconds)

    def stored(self, num_pages: int, page_bytes: int, seconds: float) -> None:
        self._add(pages_stored=num_pages, bytes_stored=num_pages * page_bytes)
        self._batch("stored", num_pages, num_pages * page_bytes, seconds)

    def missed(self, num_pages: int, reason: str) -> None:
        """Pages that a look-up promised and a read did not deliver."""
        self._add(pages_missed=num_pages, **{f"pages_missed_{_slug(reason)}": num_pages})
        self._log_rarely(f"a read of {self._what} ended early: {reason}")

    def refused(self, num_pages: int, reason: str) -> None:
        self._add(pages_refused=num_pages, **{f"pages_refused_{_slug(reason)}": num_pages})
        self._log_rarely(f"writes of {self._what} are refused: {reason}")

    def fault(self, what: str) -> None:
        """To be called while an exception is handled."""
        self._add(faults=1)
        self._log_rarely(what, with_traceback=True)

    def counters(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counters)

    def drain(self, metrics: Any) -> Any:
        """Moves the batches since the last call into SGLang's StorageMetrics: pages, and GB/s."""
        with self._lock:
            read, stored = self._batches["read"], self._batches["stored"]
            self._batches = {"read": [], "stored": []}
        metrics.prefetch_pgs.extend(pages for pages, _ in read)
        metrics.prefetch_bandwidth.extend(rate for _, rate in read)
        metrics.backup_pgs.extend(pages for pages, _ in stored)
        metrics.backup_bandwidth.extend(rate for _, rate in stored)
        return metrics

    def summary_is_due(self) -> bool:
        """True once per interval, for one of the threads that ask."""
        if self._interval_s == 0:
            return False
        with self._lock:
            now = time.monotonic()
            due = now - self._summary_at >= self._interval_s
            if due:
                self._summary_at = now
            return due

    def log_summary(self, store: Mapping[str, int | float | str], when: str) -> None:
        c = self.counters()
        used = store.get("bytes_on_disk", 0)
        logger.info(
            "store of %s %s: queried %d, hit %d, read %d pages (%.3f GB), stored %d (%.3f GB), "
            "refused %d, missed %d, faults %d, on disk %.3f GB",
            self._what,
            when,
            c["pages_queried"],
            c["pages_hit"],
            c["pages_read"],
            c["bytes_read"] / 1e9,
            c["pages_stored"],
            c["bytes_stored"] / 1e9,
            c["pages_refused"],
            c["pages_missed"],
            c["faults"],
            used / 1e9 if isinstance(used, int | float) else 0.0,
        )

    def _add(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counters[name] = self._counters.get(name, 0) + amount

    def _batch(self, kind: str, num_pages: int, num_bytes: int, seconds: float) -> None:
        with self._lock:
            batches = self._batches[kind]
            if num_pages and len(batches) < _BATCHES_MAX:
                batches.append((num_pages, num_bytes / 1e9 / max(seconds, 1e-9)))

    def _log_rarely(self, what: str, with_traceback: bool = False) -> None:
        with self._lock:
            now = time.monotonic()
            quiet = now - self._logged_at.get(what, float("-inf")) < _FAULT_LOG_INTERVAL_S
            if not quiet:
                self._logged_at[what] = now
        if not quiet:
            logger.warning("%s (said at most once in %d s)", what, _FAULT_LOG_INTERVAL_S, exc_info=with_traceback)


def _slug(reason: str) -> str:
    """What is in parentheses names a case, not a reason."""
    return reason.partition(" (")[0].replace(" ", "_")
