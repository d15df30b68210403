"""The decode side's grants: what a prefill server may write for one request, and since when it no longer can."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_tpusync._core import Endpoint, Ticket
from sglang_tpusync.disagg.messages import Buffer
from sglang_tpusync.disagg.pairing import runs

__all__ = ["Grants"]

Items = Sequence[tuple[Sequence[Buffer], NDArray[np.int64]]]  # of each buffer, these items


class _Grant:
    def __init__(self, number: int) -> None:
        self.number = number
        self.revoked: Ticket | None = None


class Grants:
    """One grant per room, shared by the prefill ranks that serve it. Thread-safe; nothing here blocks."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._rooms: dict[int, _Grant] = {}

    def open(self, room: int, items: Items) -> int:
        """The number of the room's grant, over `items` if it has none yet. Raises TransferError at a limit."""
        with self._lock:
            grant = self._rooms.get(room)
            if grant is None:
                grant = self._rooms[room] = _Grant(self._endpoint.open_grant(*_ranges(items)))
            return grant.number

    def revoke(self, room: int) -> None:
        """From now on nothing new lands for the room. Idempotent."""
        with self._lock:
            grant = self._rooms.get(room)
            if grant is not None and grant.revoked is None:
                grant.revoked = self._endpoint.revoke_grant(grant.number)

    def is_quiet(self, room: int) -> bool:
        """Whether no byte can land for the room any more. Whoever asks has revoked it."""
        with self._lock:
            grant = self._rooms.get(room)
            if grant is None:
                return True
            if grant.revoked is None or not grant.revoked.done:
                return False
            del self._rooms[room]
            return True

    def __len__(self) -> int:
        with self._lock:
            return len(self._rooms)


def _ranges(items: Items) -> tuple[NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint64]]:
    regions, offsets, lengths = [], [], []
    for buffers, numbers in items:
        first, count = runs(numbers)
        for buffer in buffers:
            size = np.uint64(buffer.item_bytes)
            regions.append(np.full(len(first), buffer.region, np.uint32))
            offsets.append(first * size)
            lengths.append(count * size)
    return (
        np.concatenate(regions or [np.empty(0, np.uint32)]),
        np.concatenate(offsets or [np.empty(0, np.uint64)]),
        np.concatenate(lengths or [np.empty(0, np.uint64)]),
    )
