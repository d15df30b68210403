"""What one round of one case moves: pages of one size, in batches, from one buffer and into another."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["BATCH_PAGES", "Volume", "aligned"]

BATCH_PAGES = 128
_ALIGNMENT = 4096


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """[num_bytes], zeros, at an address that O_DIRECT takes."""
    raw = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes]


class Volume(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable. `num_pages` is a multiple of BATCH_PAGES."""

    page_bytes: int
    num_pages: int

    @classmethod
    def of(cls, page_bytes: int, at_least_bytes: int) -> Volume:
        """The least number of whole batches that has so many bytes."""
        num_batches = max(1, -(-at_least_bytes // (page_bytes * BATCH_PAGES)))
        return cls(page_bytes=page_bytes, num_pages=num_batches * BATCH_PAGES)

    @property
    def num_bytes(self) -> int:
        return self.page_bytes * self.num_pages

    def payload(self) -> NDArray[np.uint8]:
        """[num_bytes] random bytes, the same for every arm."""
        out = aligned(self.num_bytes)
        out.view(np.uint64)[:] = np.random.default_rng(self.page_bytes).integers(
            0, 2**64, self.num_bytes // 8, dtype=np.uint64
        )
        return out

    def keys(self, round_number: int, batch: int) -> bytes:
        """The keys of one batch, 32 bytes each; every round has new ones."""
        first = batch * BATCH_PAGES
        return b"".join(
            hashlib.sha256(b"%d/%d" % (round_number, page)).digest() for page in range(first, first + BATCH_PAGES)
        )

    @property
    def num_batches(self) -> int:
        return self.num_pages // BATCH_PAGES
