"""Prefill and decode ranks without a model: their memory, real endpoints between them, couriers and grants."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_tpusync._core import Endpoint
from sglang_tpusync.disagg.courier import Chunk, Courier, Link, Sending
from sglang_tpusync.disagg.grants import Grants
from sglang_tpusync.disagg.messages import Buffer, Hello, Registration, Request, State
from sglang_tpusync.disagg.pairing import ROWS, Source, SourceBuffer, pair

__all__ = ["HEAD_BYTES", "LAYERS", "PAGE", "PAGES", "READY", "Node", "Rank", "chunk"]

PAGE, HEAD_BYTES, LAYERS, PAGES = 4, 64, 3, 10
ROW_BYTES = (64, 128, 64)
READY = 2


class Rank:
    """Memory of a rank with the KV heads that it holds, as SGLang lays it out, and its metadata rows."""

    def __init__(self, tp_rank: int, tp_size: int, heads: int, state_items: int = 5) -> None:
        self.tp_rank, self.tp_size, self.heads = tp_rank, tp_size, heads
        self.first = tp_rank * heads // tp_size
        self.held = max(1, heads // tp_size)
        shape = (2 * LAYERS, PAGES, PAGE, self.held, HEAD_BYTES)
        self.kv: NDArray[np.uint8] = np.zeros(shape, np.uint8)
        self.rows = [np.zeros((6, size), np.uint8) for size in ROW_BYTES]
        self.state = np.zeros((state_items, 48), np.uint8)

    @property
    def page_bytes(self) -> int:
        return PAGE * self.held * HEAD_BYTES

    def arrays(self) -> list[NDArray[np.uint8]]:
        return [*self.kv, *self.rows, self.state]

    def source(self, **changes: Any) -> Source:
        fields: dict[str, Any] = {
            "tp_size": self.tp_size,
            "tp_rank": self.tp_rank,
            "num_kv_heads": self.heads,
            "page_size": PAGE,
            "kv_dtype": "bfloat16",
            "layout": ROWS,
            "namespace": "",
            "start_layer": 0,
            "kv": tuple(SourceBuffer(a.ctypes.data, a.nbytes, self.page_bytes, -1) for a in self.kv),
            "rows": tuple(SourceBuffer(a.ctypes.data, a.nbytes, a.shape[1], -1) for a in self.rows),
            "states": (("dsa", (SourceBuffer(self.state.ctypes.data, self.state.nbytes, 48, -1),)),),
        }
        return Source(**{**fields, **changes})

    def registration(self, endpoint: Endpoint | None = None, **changes: Any) -> Registration:
        regions = [
            endpoint.register_region(a.ctypes.data, a.nbytes) if endpoint else i for i, a in enumerate(self.arrays())
        ]
        count = len(self.kv)
        fields: dict[str, Any] = {
            "endpoint": endpoint.id if endpoint else bytes(16),
            "addresses": endpoint.addresses if endpoint else ("127.0.0.1:1",),
            "host": "127.0.0.1",
            "port": 1,
            "tp_size": self.tp_size,
            "tp_rank": self.tp_rank,
            "page_size": PAGE,
            "kv_dtype": "bfloat16",
            "layout": ROWS,
            "namespace": "",
            "kv": tuple(Buffer(regions[i], a.nbytes, self.page_bytes, -1) for i, a in enumerate(self.kv)),
            "rows": tuple(Buffer(regions[count + i], a.nbytes, a.shape[1], -1) for i, a in enumerate(self.rows)),
            "ready_row": READY,
            "states": (State("dsa", (Buffer(regions[-1], self.state.nbytes, 48, -1),)),),
        }
        return Registration(**{**fields, **changes})


def serves(rank: Rank, other: Rank) -> bool:
    """Whether a prefill rank serves a decode rank: as SGLang maps them."""
    ratio = max(rank.tp_size, other.tp_size) // min(rank.tp_size, other.tp_size)
    if rank.tp_size >= other.tp_size:
        return rank.tp_rank // ratio == other.tp_rank
    return other.tp_rank // ratio == rank.tp_rank


class Node:
    """Prefill ranks of one width and decode ranks of another, and the KV of a model of so many heads."""

    def __init__(self, prefill: int, decode: int, heads: int, **options: Any) -> None:
        generator = np.random.default_rng(prefill * 16 + decode)
        self.whole = generator.integers(0, 256, (2 * LAYERS, PAGES, PAGE, heads, HEAD_BYTES), np.uint8)
        self.prefill = [Rank(i, prefill, heads) for i in range(prefill)]
        self.decode = [Rank(i, decode, heads) for i in range(decode)]
        for rank in self.prefill:
            rank.kv[:] = self.whole[:, :, :, rank.first : rank.first + rank.held]
            for array in (*rank.rows, rank.state):
                array[:] = np.random.default_rng(9).integers(0, 256, array.shape, np.uint8)
        self.over: dict[int, list[str | None]] = {}
        self.changed = threading.Condition()
        self.readers = [Endpoint() for _ in self.decode]
        self.registrations = [rank.registration(end) for rank, end in zip(self.decode, self.readers, strict=True)]
        self.grants = [Grants(end) for end in self.readers]
        self.writers: list[Endpoint] = []
        self.couriers: list[Courier] = []
        self.links: list[dict[int, Link]] = []
        for rank in self.prefill:
            writer = Endpoint(bind=(), **options)
            for array in rank.arrays():
                writer.register_region(array.ctypes.data, array.nbytes)
            self.writers.append(writer)
            self.couriers.append(
                Courier(writer, Hello(host="h", port=2), on_sent=self.sent, on_failed=self.failed, timeout_s=60)
            )
            served = [number for number, other in enumerate(self.decode) if serves(rank, other)]
            found = {number: self.registrations[number] for number in served}
            self.links.append({number: Link(r, pair(rank.source(), r)) for number, r in found.items()})

    def sent(self, sending: Sending) -> None:
        self._note(sending.room, None)

    def failed(self, sending: Sending, reason: str) -> None:
        self._note(sending.room, reason)

    def _note(self, room: int, reason: str | None) -> None:
        with self.changed:
            self.over.setdefault(room, []).append(reason)
            self.changed.notify_all()

    def wait(self, room: int, count: int = 1) -> list[str | None]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.over.get(room, [])) >= count, 30), "not over in time"
            return self.over[room]

    def request(self, number: int, room: int, where: list[int], row: int = 3, **changes: Any) -> Request:
        """Of decode rank `number`."""
        registration, wanted = self.registrations[number], np.array(where, np.int64)
        items = [
            (registration.kv, wanted),
            (registration.rows, np.array([row])),
            (registration.states[0].buffers, np.array([4])),
        ]
        fields: dict[str, Any] = {
            "room": room,
            "endpoint": registration.endpoint,
            "host": "127.0.0.1",
            "port": 1,
            "num_targets": 1,
            "grant": self.grants[number].open(room, items),
            "row": row,
            "pages": wanted.astype("<i4").tobytes(),
            "states": (np.array([4], "<i4").tobytes(),),
        }
        return Request(**{**fields, **changes})

    def close(self) -> None:
        for end in (*self.writers, *self.readers):
            end.close()
        for courier in self.couriers:
            courier.close()


def chunk(pages: list[int], first: int, last: bool, row: int = 1) -> Chunk:
    states = (np.array([2], np.int64),) if last else ()
    return Chunk(pages=np.array(pages, np.int64), first=first, last=last, row=row, states=states)
