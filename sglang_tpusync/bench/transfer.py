"""`bench transfer`: bytes from the memory of one process into that of another, beside what the machine can do.

Two processes. The writer holds a working set of 4 times the last-level cache and writes its pieces to permuted places
of an equal one in the reader, so that no two pieces join. Ways: TCP (several streams, checksums on) and the memory of
one host. A batched sample keeps two batches of 16 MiB under way; a single one waits for each piece. Limits, in the
same rounds: raw TCP with the same number of streams and 1 MiB per call, or one piece and one byte back; memcpy of
1 MiB pieces by one thread. Before it counts, every case is checked byte for byte.
"""

from __future__ import annotations

import functools
import itertools
import json
import socket
import subprocess
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sglang_tpusync._core import Endpoint, Ticket
from sglang_tpusync.bench.host import last_level_cache_bytes
from sglang_tpusync.bench.report import Row, measured
from sglang_tpusync.bench.rounds import measure_interleaved

__all__ = ["GOALS", "PIECES", "TransferBench", "Way"]

Way = Literal["tcp", "same-host"]
WAYS: tuple[Way, ...] = ("tcp", "same-host")

# Addresses here, and regions, offsets and lengths there.
Batch = tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint64]]

PIECES = {"4 KiB": 4096, "64 KiB": 65536, "1 MiB": 1 << 20}
# Batched: the least ratio to raw TCP or to memcpy.
GOALS: Mapping[tuple[Way, str], float] = {
    ("tcp", "4 KiB"): 0.4,
    ("tcp", "64 KiB"): 0.7,
    ("tcp", "1 MiB"): 0.85,
    ("same-host", "4 KiB"): 0.6,
    ("same-host", "64 KiB"): 0.6,
    ("same-host", "1 MiB"): 0.6,
}
BATCH_BYTES = 16 << 20
CHUNK_BYTES = 1 << 20
TIMEOUT_S = 120.0


class Reader:
    """The other process. Its memory is the target of everything."""

    def __init__(self, set_bytes: int, num_streams: int) -> None:
        command = [sys.executable, "-m", "sglang_tpusync.bench.transfer_reader", str(set_bytes), str(num_streams)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.hello = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return self._answer()["value"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the reading process ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class TransferBench:
    """One run. Use as a context manager: leaving it ends the other process."""

    def __init__(self, *, num_streams: int = 4, set_bytes: int | None = None, seed: int = 0) -> None:
        wanted = max(4 * last_level_cache_bytes(), 64 << 20) if set_bytes is None else set_bytes
        self.set_bytes = -(-wanted // BATCH_BYTES) * BATCH_BYTES
        self.num_streams = num_streams
        self._rng = np.random.default_rng(seed)
        self._source = self._rng.integers(0, 256, self.set_bytes, np.uint8)
        self._copy = np.zeros_like(self._source)
        self._reader = Reader(self.set_bytes, num_streams)
        self._endpoints: dict[Way, Endpoint] = {}
        self._peers: dict[Way, int] = {}
        try:
            for way in WAYS:
                self._connect(way)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TransferBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self, way: Way) -> None:
        endpoint = self._endpoints[way] = Endpoint(bind=(), num_streams=self.num_streams, same_host=way == "same-host")
        endpoint.register_region(self._source.ctypes.data, self.set_bytes)
        self._peers[way] = endpoint.connect(self._reader.hello[way]["addresses"], TIMEOUT_S)

    def close(self) -> None:
        for endpoint in self._endpoints.values():
            endpoint.close()
        self._reader.close()

    def rows(self, *, num_rounds: int, sample_bytes: int, pieces: Sequence[str] = tuple(PIECES)) -> list[Row]:
        """Measures all cases, interleaved; GB/s, and CPU seconds of both processes per GB."""
        arms: dict[str, Callable[[], float]] = {}
        cpu: dict[str, list[float]] = {}
        for way, piece in itertools.product(WAYS, pieces):
            self._check(way, PIECES[piece])
            for mode in ("batched", "single"):
                name = f"{way}, {piece}, {mode}"
                cpu[name] = []
                total = sample_bytes if mode == "batched" else max(PIECES[piece], sample_bytes // 16)
                arms[name] = self._arm(way, PIECES[piece], mode == "batched", total, cpu[name])
        arms["raw"] = lambda: self._raw_stream(sample_bytes)
        arms["memcpy"] = lambda: self._memcpy(sample_bytes)
        for piece in pieces:
            total = max(PIECES[piece], sample_bytes // 16)
            arms[f"raw single {piece}"] = functools.partial(self._raw_single, PIECES[piece], total)
        samples = measure_interleaved(arms, num_rounds)
        out = []
        for way, piece, mode in itertools.product(WAYS, pieces, ("batched", "single")):
            name = f"{way}, {piece}, {mode}"
            out.append(self._row(name, way, piece, mode, samples))
            out.append(measured(f"{name}, CPU", cpu[name], unit="CPU s/GB", better="lower"))
        return out

    def _row(self, name: str, way: Way, piece: str, mode: str, samples: Mapping[str, list[float]]) -> Row:
        limit, limit_samples = f"raw TCP, {self.num_streams} streams, 1 MiB a call", samples["raw"]
        if mode == "single":
            limit, limit_samples = "raw TCP, one piece and one byte back", samples[f"raw single {piece}"]
        elif way == "same-host":
            limit, limit_samples = "memcpy, one thread, 1 MiB pieces", samples["memcpy"]
        goal = GOALS.get((way, piece)) if mode == "batched" else None
        return measured(
            name, samples[name], unit="GB/s", better="higher", limit=limit, limit_samples=limit_samples, goal=goal
        )

    def _arm(self, way: Way, piece: int, batched: bool, total: int, cpu: list[float]) -> Callable[[], float]:
        batches = self._batches(way, piece, BATCH_BYTES if batched else piece, total)

        def run() -> float:
            before = time.process_time() + self._reader.ask("cpu")
            seconds = self._timed_writes(way, batches, depth=2 if batched else 1)
            after = time.process_time() + self._reader.ask("cpu")
            cpu.append((after - before) / (total / 1e9))
            return total / 1e9 / seconds

        return run

    def _batches(self, way: Way, piece: int, batch: int, total: int) -> list[Batch]:
        """Arguments of submit_write: pieces in order here, permuted there, `total` bytes in all."""
        count = self.set_bytes // piece
        places = np.random.default_rng(piece).permutation(count).astype(np.uint64) * np.uint64(piece)
        sources = np.arange(count, dtype=np.uint64) * np.uint64(piece)
        step = batch // piece
        region = np.full(step, self._reader.hello[way]["region"], np.uint32)
        length = np.full(step, piece, np.uint64)
        base = np.uint64(self._source.ctypes.data)
        out: list[Batch] = []
        for at in range(0, total // piece, step):
            pick = np.arange(at, at + step) % count
            out.append((sources[pick] + base, region, places[pick], length))
        return out

    def _timed_writes(self, way: Way, batches: list[Batch], depth: int) -> float:
        endpoint, peer, grant = self._endpoints[way], self._peers[way], self._reader.hello[way]["grant"]
        under_way: deque[Ticket] = deque()
        begin = time.perf_counter()
        for batch in batches:
            if len(under_way) == depth:
                _finish(under_way.popleft())
            under_way.append(endpoint.submit_write(peer, grant, *batch, timeout_s=TIMEOUT_S))
        while under_way:
            _finish(under_way.popleft())
        return time.perf_counter() - begin

    def _check(self, way: Way, piece: int) -> None:
        """Writes the whole set and compares the other side's memory. RuntimeError names the case."""
        self._reader.ask("clear")
        self._timed_writes(way, self._batches(way, piece, BATCH_BYTES, self.set_bytes), depth=2)
        places = np.random.default_rng(piece).permutation(self.set_bytes // piece)
        expected = np.empty_like(self._source).reshape(-1, piece)
        expected[places] = self._source.reshape(-1, piece)
        if self._reader.ask("crc") != zlib.crc32(expected.data):
            raise RuntimeError(f"{way}, pieces of {piece} bytes: the bytes that arrived are not those that were sent")

    def _raw_stream(self, total: int) -> float:
        each = total // self.num_streams
        connections = [self._dial(each, each) for _ in range(self.num_streams)]

        def send(index: int) -> None:
            memory = self._source.data.cast("B")
            start = self.set_bytes // self.num_streams * index
            for at in range(0, each, CHUNK_BYTES):
                place = (start + at) % (self.set_bytes - CHUNK_BYTES + 1)
                connections[index].sendall(memory[place : place + min(CHUNK_BYTES, each - at)])
            connections[index].recv(1)

        with ThreadPoolExecutor(self.num_streams) as pool:
            begin = time.perf_counter()
            list(pool.map(send, range(self.num_streams)))  # a failure of one is raised here
            seconds = time.perf_counter() - begin
        for connection in connections:
            connection.close()
        return each * self.num_streams / 1e9 / seconds

    def _raw_single(self, piece: int, total: int) -> float:
        connection = self._dial(piece, total)
        memory = self._source.data.cast("B")
        begin = time.perf_counter()
        for at in range(0, total, piece):
            place = at % (self.set_bytes - piece + 1)
            connection.sendall(memory[place : place + piece])
            connection.recv(1)
        seconds = time.perf_counter() - begin
        connection.close()
        return total / 1e9 / seconds

    def _dial(self, answer_every: int, total: int) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self._reader.hello["raw_port"]))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(answer_every.to_bytes(8, "little") + total.to_bytes(8, "little"))
        return connection

    def _memcpy(self, total: int) -> float:
        begin = time.perf_counter()
        for at in range(0, total, CHUNK_BYTES):
            place = at % self.set_bytes
            self._copy[place : place + CHUNK_BYTES] = self._source[place : place + CHUNK_BYTES]
        return total / 1e9 / (time.perf_counter() - begin)


def _finish(ticket: Ticket) -> None:
    if not ticket.wait(TIMEOUT_S):
        raise RuntimeError(f"a write was not done after {TIMEOUT_S} s")
    if (error := ticket.error()) is not None:
        raise RuntimeError(f"a write failed: {error}")
