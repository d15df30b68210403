"""Pages whose bytes follow from their key, and a store of them: the model that campaigns compare with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sglang_tpusync._core import KEY_BYTES, FlashStore

PAGE_BYTES = 64 * 1024  # fills its slot, and is small enough that neighbours move in one transfer
NAMESPACE = hashlib.sha256(b"campaign").digest()
TIMEOUT_S = 60.0

# docs/formats/flash-v1.md
_REGION_SUFFIXES = {".slots", ".table"}
_OTHER_FILES = {"lock", "ledger", "want", "namespace.json"}


def open_store(path: Path, *, capacity_bytes: int) -> FlashStore:
    return FlashStore(
        path=str(path),
        namespace=NAMESPACE,
        namespace_json='{"campaign": true}',
        page_bytes=PAGE_BYTES,
        capacity_bytes=capacity_bytes,
        floor_bytes=0,
        write_budget_bytes_per_day=2**62,
        allow_tmpfs=True,
    )


def chain_keys(seed: int, chain: int, num_pages: int) -> list[bytes]:
    """Keys of one prefix, head first."""
    keys = [hashlib.sha256(f"{seed}/{chain}".encode()).digest()]
    while len(keys) < num_pages:
        keys.append(hashlib.sha256(keys[-1]).digest())
    return keys[:num_pages]


def page_of(key: bytes) -> NDArray[np.uint8]:
    """The one right content of a key."""
    generator = np.random.Generator(np.random.SFC64(int.from_bytes(key[:16], "little")))
    return np.frombuffer(generator.bytes(PAGE_BYTES), dtype=np.uint8)


def put(store: FlashStore, keys: Sequence[bytes], prefix: Sequence[bytes] = ()) -> NDArray[np.uint8]:
    """Stores the pages of the keys; answers their outcomes."""
    pages = np.stack([page_of(key) for key in keys])
    ticket = store.submit_put(b"".join(keys), b"".join(prefix), *_segments(pages), TIMEOUT_S)
    if not ticket.wait(2 * TIMEOUT_S):
        raise TimeoutError("a put hangs")
    return ticket.outcomes()


def get(store: FlashStore, keys: Sequence[bytes]) -> tuple[NDArray[np.uint8], list[bool]]:
    """Reads the pages of the keys; answers their outcomes, and whether the bytes are right."""
    pages = np.zeros((len(keys), PAGE_BYTES), dtype=np.uint8)
    ticket = store.submit_get(b"".join(keys), b"", *_segments(pages), TIMEOUT_S)
    if not ticket.wait(2 * TIMEOUT_S):
        raise TimeoutError("a get hangs")
    right = [bool(np.array_equal(page, page_of(key))) for key, page in zip(keys, pages, strict=True)]
    return ticket.outcomes(), right


def stored_keys(store: FlashStore) -> list[bytes]:
    joined = store.keys()
    return [joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)]


def disk_bytes(path: Path) -> int:
    """What the files below a directory occupy, as du counts it."""
    return sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())


def num_files(path: Path) -> tuple[int, int]:
    """How many files lie in a store directory, and how many of them are of a store."""
    files = [file for file in path.rglob("*") if file.is_file()]
    known = sum(file.suffix in _REGION_SUFFIXES or file.name in _OTHER_FILES for file in files)
    return len(files), known


def _segments(pages: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Each page in two pieces of odd length, as a host pool's page is in several."""
    first = pages.shape[1] // 3
    starts = pages.ctypes.data + np.arange(len(pages), dtype=np.uint64) * np.uint64(pages.strides[0])
    addresses = np.stack([starts, starts + np.uint64(first)], axis=1)
    return np.ascontiguousarray(addresses), np.array([first, pages.shape[1] - first], dtype=np.uint64)
