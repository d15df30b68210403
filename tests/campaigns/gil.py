"""What a pure-Python thread loses beside a storm of backups and prefetches: the data path holds no GIL.

A backup is a copy from device to host memory and a put; a prefetch is a get and a copy back. One thread drives both
with one call per batch, as SGLang's threads do. The spinning thread has a core of its own, and the time that it waited
for that core nevertheless (the kernel counts it: run queue wait) is taken out: what it loses is the GIL's.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sglang_tpusync._core import KEY_BYTES, FlashStore, HostDevice, PageGeometry, Ticket
from sglang_tpusync.bench.report import Row, measured
from sglang_tpusync.bench.rounds import interleaved
from tests.campaigns.campaign import main

LAYERS, HEADS, HEAD_BYTES, PAGE_SIZE = 4, 4, 256, 64
ROW_BYTES = HEADS * HEAD_BYTES
NUM_PAGES = 64
NUM_SLOTS = NUM_PAGES * PAGE_SIZE
PAGE_BYTES = 2 * LAYERS * PAGE_SIZE * ROW_BYTES
INTERVAL_S = 0.7
LOSS_MAX = 0.05
_CORES = os.sched_getaffinity(0)


def run(seed: int, runs: int) -> list[Row]:
    """`runs` rounds, each of one interval with and one without the storm."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    moved: list[float] = []
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(dir=Path.cwd() / "build"))
        stack.enter_context(_driver_cores())
        storm, spinner = stack.enter_context(_Storm(directory, seed)), stack.enter_context(_Spinner())
        storm.pause()
        for _, stormy in interleaved([True, False], runs):
            before = storm.moved_bytes
            if stormy:
                storm.go()
            rates[stormy].append(spinner.rate(INTERVAL_S))
            if stormy:
                moved.append((storm.moved_bytes - before) / INTERVAL_S / 1e9)
                storm.pause()
    loop_rate = measured(
        "loop rate of a pure-Python thread beside the storm", rates[True], unit="loops/s", better="higher",
        limit="the same thread without the storm", limit_samples=rates[False], goal=1 - LOSS_MAX,
    )  # fmt: skip
    return [loop_rate, measured("bytes that the storm moves", moved, unit="GB/s", better="higher")]


class _Spinner:
    """A thread that counts in pure Python, on the last core."""

    def __init__(self) -> None:
        self._count = 0
        self._stop = False
        self._thread = threading.Thread(target=self._spin, name="spinner")

    def __enter__(self) -> _Spinner:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()

    def rate(self, interval_s: float) -> float:
        """Loops per second over the interval, without the time that other processes had the core."""
        begin, first, waited_s = time.perf_counter(), self._count, self._waited_s()
        time.sleep(interval_s)
        return (self._count - first) / (time.perf_counter() - begin - (self._waited_s() - waited_s))

    def _waited_s(self) -> float:
        """How long the thread was ready to run and did not, since its start."""
        status = Path(f"/proc/self/task/{self._thread.native_id}/schedstat").read_text()
        return int(status.split()[1]) / 1e9

    def _spin(self) -> None:
        os.sched_setaffinity(0, {max(_CORES)})
        while not self._stop:
            self._count += 1


class _Storm:
    """A thread that backs up and prefetches batches of fresh pages while it may."""

    def __init__(self, directory: str, seed: int) -> None:
        self.moved_bytes = 0
        self._may, self._stopped = threading.Event(), threading.Event()
        self._resting = threading.Semaphore(0)
        self._random = np.random.default_rng(seed)
        self._pools = _Pools(self._random)
        self._store = FlashStore(
            path=directory, namespace=bytes(32), namespace_json="{}", page_bytes=PAGE_BYTES, capacity_bytes=1 << 28,
            floor_bytes=0, write_budget_bytes_per_day=2**62, allow_tmpfs=True,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._work, name="storm")

    def __enter__(self) -> _Storm:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._may.set()
        self._thread.join()
        self._store.close()

    def go(self) -> None:
        self._may.set()

    def pause(self) -> None:
        """Returns when the batch that is under way is done."""
        self._may.clear()
        if not self._resting.acquire(timeout=120.0):
            raise TimeoutError("the storm hangs or has failed")

    def _work(self) -> None:
        while True:
            if not self._may.is_set():
                self._resting.release()
            self._may.wait()
            if self._stopped.is_set():
                return
            while self._may.is_set() and not self._stopped.is_set():
                self._cycle()

    def _cycle(self) -> None:
        """Device to host, host to store, store to host, host to device: a batch of pages each."""
        keys = self._random.bytes(KEY_BYTES * NUM_PAGES)
        pieces = self._pools.addresses, self._pools.lengths
        _finish(self._pools.backup())
        outcomes = _finish(self._store.submit_put(keys, b"", *pieces, 60.0)).outcomes()
        assert not outcomes.any(), outcomes
        outcomes = _finish(self._store.submit_get(keys, b"", *pieces, 60.0)).outcomes()
        assert not outcomes.any(), outcomes
        _finish(self._pools.load())
        self.moved_bytes += 4 * NUM_PAGES * PAGE_BYTES


class _Pools:
    """A device pool of one buffer per layer for K and V, a host pool of one buffer for each, page_first_direct."""

    def __init__(self, random: np.random.Generator) -> None:
        device = [random.integers(0, 256, NUM_SLOTS * ROW_BYTES, np.uint8) for _ in range(2 * LAYERS)]
        host = [np.zeros(NUM_SLOTS * LAYERS * ROW_BYTES, np.uint8) for _ in range(2)]
        self._kept = device, host
        self._device, self._host = _bases(device), _bases(host)
        self._slots = np.arange(NUM_SLOTS, dtype=np.int64)
        self._stream = HostDevice(num_threads=2).open_stream("storm")
        self._device_geometry = PageGeometry.device(
            num_layers=LAYERS, num_slots=NUM_SLOTS, row_bytes=ROW_BYTES, row_stride_bytes=ROW_BYTES, page_size=PAGE_SIZE
        )
        self._host_geometry = PageGeometry.host(
            layout="page_first_direct", num_layers=LAYERS, num_slots=NUM_SLOTS, num_heads=HEADS, head_bytes=HEAD_BYTES,
            page_size=PAGE_SIZE,
        )  # fmt: skip
        pages = np.arange(NUM_PAGES, dtype=np.uint64) * np.uint64(PAGE_BYTES // 2)
        self.addresses = np.ascontiguousarray(self._host[0] + pages[:, None])
        self.lengths = np.full(2, PAGE_BYTES // 2, np.uint64)

    def backup(self) -> Ticket:
        to, origin = self._host_geometry, self._device_geometry
        return self._stream.submit_copy(*self._host, *self._device, to, origin, self._slots, self._slots, (0, LAYERS))

    def load(self) -> Ticket:
        to, origin = self._device_geometry, self._host_geometry
        return self._stream.submit_copy(*self._device, *self._host, to, origin, self._slots, self._slots, (0, LAYERS))


def _bases(buffers: list[NDArray[np.uint8]]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    addresses = np.array([buffer.ctypes.data for buffer in buffers], np.uint64)
    return addresses, np.array([buffer.nbytes for buffer in buffers], np.uint64)


def _finish(ticket: Ticket) -> Ticket:
    if not ticket.wait(120.0):
        raise TimeoutError("the storm hangs")
    if ticket.error() is not None:
        raise RuntimeError(ticket.error())
    return ticket


@contextlib.contextmanager
def _driver_cores() -> Iterator[None]:
    """All threads made inside, those of the core included, keep off the spinner's core."""
    os.sched_setaffinity(0, _CORES - {max(_CORES)} or _CORES)
    try:
        yield
    finally:
        os.sched_setaffinity(0, _CORES)


if __name__ == "__main__":
    main("gil", run, runs=9)
