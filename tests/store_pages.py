"""Pages whose bytes follow from their number, in a store of this process: what tests of store directories share."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from sglang_tpusync import _core

IDENTITY = {
    "format": 1,
    "model": {"fingerprint": "test-model"},
    "kv_dtype": "torch.bfloat16",
    "page_size": 64,
    "layers": [0, 28, 28],
    "heads": {"head_bytes": 256, "range": [0, 4], "total": 8},
}


def key_of(number: int) -> bytes:
    return hashlib.sha256(f"page {number}".encode()).digest()


def page_of(number: int, page_bytes: int) -> bytes:
    """Few distinct bytes, so that a whole directory of them compresses to little."""
    return bytes([number % 251, number // 251 % 251, 7, number % 13]) * (page_bytes // 4) + bytes(page_bytes % 4)


class Pages:
    """One namespace of a store directory, opened for writing. Close it."""

    def __init__(
        self, path: Path, *, page_bytes: int = 8192, identity: dict[str, Any] = IDENTITY, **options: Any
    ) -> None:
        self.page_bytes = page_bytes
        text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        self.namespace = hashlib.sha256(text.encode()).digest()
        defaults = {"capacity_bytes": 64 * page_bytes, "floor_bytes": 0, "write_budget_bytes_per_day": 1 << 40}
        self.store = _core.FlashStore(
            path=str(path),
            namespace=self.namespace,
            namespace_json=text,
            page_bytes=page_bytes,
            allow_tmpfs=True,
            **(defaults | options),
        )

    def put(self, first: int, end: int, prefix: tuple[int, ...] = ()) -> int:
        """Stores pages [first, end) as one prefix behind `prefix`; answers how many are stored."""
        memory = np.frombuffer(b"".join(page_of(n, self.page_bytes) for n in range(first, end)), np.uint8)
        ticket = self.store.submit_put(
            b"".join(map(key_of, range(first, end))), b"".join(map(key_of, prefix)), *self._places(memory, end - first)
        )
        assert ticket.wait(60)
        return int((ticket.outcomes() == 0).sum())

    def get(self, first: int, end: int) -> list[int]:
        """Numbers of those pages [first, end) that are hits. Wrong bytes fail the test."""
        memory = np.zeros((end - first) * self.page_bytes, np.uint8)
        keys = b"".join(map(key_of, range(first, end)))
        ticket = self.store.submit_get(keys, b"", *self._places(memory, end - first))
        assert ticket.wait(60)
        hits = [first + i for i, code in enumerate(ticket.outcomes()) if code == 0]
        for number in hits:
            at = (number - first) * self.page_bytes
            assert memory[at : at + self.page_bytes].tobytes() == page_of(number, self.page_bytes), number
        return hits

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Pages:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _places(self, memory: np.ndarray, num_pages: int) -> tuple[np.ndarray, np.ndarray]:
        base = memory.ctypes.data
        addresses = np.arange(num_pages, dtype=np.uint64).reshape(-1, 1) * np.uint64(self.page_bytes) + np.uint64(base)
        return addresses, np.array([self.page_bytes], np.uint64)


def region_path(path: Path) -> Path:
    """The only region of a store, without suffix."""
    (table,) = path.glob("v1/*/region-000.table")
    return table.with_suffix("")


def flip(file: Path, offset: int) -> None:
    """Changes one byte."""
    with open(file, "r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte[0] ^ 0x40]))
