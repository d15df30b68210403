"""Seal, get and match of DRAM regions, beside memcpy of the same pages in the same run.

One thread does the work in every arm. Pages lie in regions in shared memory; the working set is at least four times the
last-level cache, and pages are visited in an order that no prefetcher follows.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sglang_tpusync import _core
from sglang_tpusync.bench.host import last_level_cache_bytes
from sglang_tpusync.bench.report import Row, measured
from sglang_tpusync.bench.rounds import measure_interleaved

__all__ = ["adopt_row", "copy_rows", "match_rows"]

_NAMESPACE = bytes(range(32))
_GOAL_OF_MEMCPY = 0.8
_RESERVE_BYTES = 1 << 28
_ADOPTION_S_MAX = 1.0
_ADOPTED_PAGE_BYTES = 1 << 16


def random_keys(num_keys: int, seed: int) -> NDArray[np.uint8]:
    """Keys as rows of a [num_keys, 32] array."""
    return np.random.default_rng(seed).integers(0, 256, (num_keys, _core.KEY_BYTES), dtype=np.uint8)


class _Pages:
    """A region half full of sealed pages, half of slots to copy into; a second region reads the first as its peer."""

    def __init__(self, root: str, page_bytes: int, working_set_bytes: int) -> None:
        self.num_pages = max(working_set_bytes // page_bytes, 8)
        self.page_bytes = page_bytes
        pieces = [page_bytes // 2, page_bytes // 2]
        self.region = self._open(root, pieces, 2 * self.num_pages)
        self.memory = self.region.memory()
        self.slots = self._alloc()
        self.targets = self._alloc()
        self.memory[:] = np.random.default_rng(1).integers(0, 256, self.memory.size, dtype=np.uint8)
        self.keys = random_keys(self.num_pages, 2)
        self.order = np.random.default_rng(3).permutation(self.num_pages)
        self.stack = _core.TierStack(region=self.region, store=None, num_copy_threads=1)
        self.peer_region = self._open(root, pieces, 1)
        self.peer = _core.TierStack(region=self.peer_region, store=None, num_copy_threads=1)
        base = self.memory.ctypes.data
        offsets = np.array([0, 2 * self.num_pages * pieces[0]], dtype=np.int64)
        self.sources = self._addresses(base, offsets, self.slots[self.order], pieces[0])
        self.addresses = self._addresses(base, offsets, self.targets[self.order], pieces[0])
        self.ordered_keys = self.keys[self.order].tobytes()

    @staticmethod
    def _open(root: str, pieces: Sequence[int], num_slots: int) -> _core.HostRegion:
        return _core.HostRegion(
            root=root, namespace=_NAMESPACE, piece_bytes=pieces, num_slots=num_slots, reserve_bytes=_RESERVE_BYTES
        )

    def _alloc(self) -> NDArray[np.int64]:
        slots = self.region.alloc(self.num_pages)
        assert slots is not None
        return slots

    @staticmethod
    def _addresses(base: int, offsets: NDArray[np.int64], slots: NDArray[np.int64], piece: int) -> NDArray[np.uint64]:
        return np.ascontiguousarray(base + offsets[None, :] + slots[:, None] * piece).astype(np.uint64)

    def memcpy(self) -> float:
        piece = self.page_bytes // 2
        pairs = [
            (to, source)
            for to_row, source_row in zip(self.addresses.tolist(), self.sources.tolist(), strict=True)
            for to, source in zip(to_row, source_row, strict=True)
        ]
        copy = ctypes.memmove
        started = time.perf_counter()
        for to, source in pairs:
            copy(to, source, piece)
        return self._gb_per_s(started)

    def seal(self) -> float:
        self.region.clear()
        started = time.perf_counter()
        outcomes = self.region.seal(self.ordered_keys, b"", self.slots[self.order])
        rate = self._gb_per_s(started)
        assert not outcomes.any()
        return rate

    def get(self, stack: _core.TierStack) -> float:
        started = time.perf_counter()
        ticket = stack.submit_get(self.ordered_keys, b"", self.addresses)
        ticket.wait()
        rate = self._gb_per_s(started)
        assert not ticket.outcomes().any()
        return rate

    def _gb_per_s(self, started: float) -> float:
        return self.num_pages * self.page_bytes / 1e9 / (time.perf_counter() - started)


def copy_rows(root: Path, page_bytes: Sequence[int], num_rounds: int) -> list[Row]:
    """GB/s of seal, of get from the own region, and of get from a peer's with each byte verified."""
    rows: list[Row] = []
    for size in page_bytes:
        with tempfile.TemporaryDirectory(dir=root) as directory:
            pages = _Pages(directory, size, 4 * max(last_level_cache_bytes(), 1 << 25))
            pages.seal()
            arms: dict[str, Callable[[], float]] = {
                "memcpy": pages.memcpy,
                "seal": pages.seal,
                "get own": lambda pages=pages: pages.get(pages.stack),  # type: ignore[misc]
                "get peer": lambda pages=pages: pages.get(pages.peer),  # type: ignore[misc]
            }
            samples = measure_interleaved(arms, num_rounds)
            # The last get has left the pages where it put them: they are the right ones.
            np.testing.assert_array_equal(_page_of(pages, pages.sources, 0), _page_of(pages, pages.addresses, 0))
            for arm in ("seal", "get own", "get peer"):
                rows.append(
                    measured(
                        f"{arm}, pages of {size >> 10} KiB",
                        samples[arm],
                        unit="GB/s",
                        better="higher",
                        limit="memcpy of the same pages",
                        limit_samples=samples["memcpy"],
                        goal=_GOAL_OF_MEMCPY,
                    )
                )
            del arms, pages
    return rows


def _page_of(pages: _Pages, where: NDArray[np.uint64], i: int) -> NDArray[np.uint8]:
    piece = pages.page_bytes // 2
    return np.frombuffer(b"".join(ctypes.string_at(int(at), piece) for at in where[i]), dtype=np.uint8)


def match_rows(root: Path, num_pages: Sequence[int], prefix_pages: int, num_queries: int) -> list[Row]:
    """Microseconds of a lookup of a whole prefix among so many pages, its touches and pins included: p50 and p99."""
    rows: list[Row] = []
    for count in num_pages:
        with tempfile.TemporaryDirectory(dir=root) as directory:
            region = _core.HostRegion(
                root=directory, namespace=_NAMESPACE, piece_bytes=[64], num_slots=count, reserve_bytes=_RESERVE_BYTES
            )
            keys = random_keys(count, 5)
            for begin in range(0, count, prefix_pages):
                chain = keys[begin : begin + prefix_pages]
                slots = region.alloc(len(chain))
                assert slots is not None
                region.seal(chain.tobytes(), b"", slots)
            region.free_all()
            stack = _core.TierStack(region=region, store=None)
            times_us = _query(stack, keys, prefix_pages, num_queries)
            for name, percent in (("p50", 50), ("p99", 99)):
                parts = [float(np.percentile(part, percent)) for part in np.array_split(times_us, 9)]
                rows.append(
                    measured(f"match {name}, {prefix_pages} pages among {count:,}", parts, unit="us", better="lower")
                )
            del stack, region
    return rows


def _query(stack: _core.TierStack, keys: NDArray[np.uint8], prefix_pages: int, num_queries: int) -> NDArray[np.float64]:
    heads = np.random.default_rng(7).integers(0, len(keys) // prefix_pages, num_queries) * prefix_pages
    times_us = np.empty(num_queries)
    for i, head in enumerate(heads.tolist()):
        asked = keys[head : head + prefix_pages].tobytes()
        started = time.perf_counter_ns()
        num_found = stack.match(asked, b"")[0]
        times_us[i] = (time.perf_counter_ns() - started) / 1e3
        assert num_found == prefix_pages
    return times_us


def adopt_row(root: Path, num_bytes: int, num_rounds: int) -> Row:
    """Seconds until the next process has a region of so many bytes, full of pages of 64 KiB."""
    num_pages = max(num_bytes // _ADOPTED_PAGE_BYTES, 1)
    with tempfile.TemporaryDirectory(dir=root) as directory:

        def opened() -> _core.HostRegion:
            return _core.HostRegion(
                root=directory,
                namespace=_NAMESPACE,
                piece_bytes=[_ADOPTED_PAGE_BYTES // 2] * 2,
                num_slots=num_pages,
                reserve_bytes=_RESERVE_BYTES,
            )

        region = opened()
        slots = region.alloc(num_pages)
        assert slots is not None
        assert not region.seal(random_keys(num_pages, 9).tobytes(), b"", slots).any()
        del region
        seconds = []
        for _ in range(num_rounds):
            started = time.perf_counter()
            region = opened()
            seconds.append(time.perf_counter() - started)
            assert region.stats()["host_pages_adopted_total"] == num_pages
            del region
    return measured(
        f"adopt {num_bytes / 2**30:.2g} GiB, {num_pages:,} pages",
        seconds,
        unit="s",
        better="lower",
        limit="a second",
        limit_samples=[_ADOPTION_S_MAX] * num_rounds,
        goal=1.0,
    )
