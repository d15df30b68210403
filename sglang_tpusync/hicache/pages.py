"""Where the pages of an SGLang host pool lie in memory, and which keys name them: arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_tpusync.errors import ConfigError, UnsupportedError

__all__ = ["FlatPages", "PageAddresses", "buffers_of", "key_bytes", "leading"]

_KEY_HEX = 64  # a SHA-256 in hexadecimal


def key_bytes(keys: Sequence[str] | None) -> bytes:
    """The keys of SGLang (64 hexadecimal digits each) as raw bytes, one after the other. Raises ValueError for any
    other.
    """
    if not keys:
        return b""
    if any(len(key) != _KEY_HEX for key in keys):
        raise ValueError(f"a key is not of {_KEY_HEX} hexadecimal digits")
    return bytes.fromhex("".join(keys))


def buffers_of(pool: Any) -> list[tuple[int, int]]:
    """(address, bytes) of the memory of a host pool, as far as it shows it."""
    shown = getattr(pool, "kv_buffer", None)
    shown = pool.get_hybrid_pool_buffer() if shown is None else shown
    buffers = shown if isinstance(shown, list | tuple) else [shown]
    return [(buffer.data_ptr(), buffer.numel() * buffer.element_size()) for buffer in buffers]


def leading(outcomes: NDArray[np.uint8]) -> int:
    """How many pages were read before the first that was not."""
    bad = np.flatnonzero(outcomes)
    return int(bad[0]) if len(bad) else len(outcomes)


class _Pages:
    """Which pages of a pool its token slots are."""

    def __init__(self, pool: Any) -> None:
        self.page_size = int(pool.page_size)
        self.num_pages = int(pool.page_num)

    def pages_of(self, host_indices: torch.Tensor, num_pages: int) -> NDArray[np.int64]:
        """[num_pages], the numbers of the pages that `num_pages * page_size` token slots make up. Raises ValueError
        for slots that are no whole pages.
        """
        slots = host_indices.detach().cpu().numpy().astype(np.int64, copy=False)
        if slots.shape != (num_pages * self.page_size,):
            raise ValueError(f"{slots.shape} slots for {num_pages} pages of {self.page_size}")
        grid = slots.reshape(num_pages, self.page_size)
        pages, rest = np.divmod(grid[:, 0], self.page_size)
        if rest.any() or (grid != grid[:, :1] + np.arange(self.page_size)).any():
            raise ValueError("slots of a page are not aligned and contiguous")
        if num_pages and (pages.min() < 0 or pages.max() >= self.num_pages):
            raise ValueError(f"a slot is outside the {self.num_pages} pages of the pool")
        return np.ascontiguousarray(pages)


class FlatPages(_Pages):
    """Pages of a pool without addresses: the pool copies them itself, one flat tensor each."""

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        self._pool = pool
        page = self.read(0)
        self.page_bytes = page.numel()
        self.lengths: NDArray[np.uint64] = np.array([self.page_bytes], dtype=np.uint64)
        expected_bytes = int(pool.get_size_per_token()) * self.page_size
        if self.page_bytes != expected_bytes:
            raise UnsupportedError(
                f"a page of {type(pool).__name__}: {self.page_bytes} bytes as a flat page, {expected_bytes} by size"
            )
        self._dtype = pool.get_data_page(0, flat=True).dtype

    def read(self, page: int) -> torch.Tensor:
        """A page as bytes; they may be the pool's own."""
        flat = self._pool.get_data_page(page * self.page_size, flat=True)
        return flat.contiguous().view(torch.uint8).reshape(-1)

    def write(self, page: int, data: torch.Tensor) -> None:
        self._pool.set_from_flat_data_page(page * self.page_size, data.view(self._dtype))


class PageAddresses(_Pages):
    """The addresses of the pieces of each page of a host pool. Immutable.

    Pieces come in the order K of all layers, then V of all layers, so that the bytes of a page are those of the
    pool's flat data page. Asked once of the pool for two pages, from which all others follow, and verified on more
    of them.
    """

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        self._order = _canonical_order(pool)
        first, lengths = self._ask(pool, 0)
        second, _ = self._ask(pool, min(1, self.num_pages - 1))
        self._offsets = first
        self._strides = second - first  # unsigned wrap-around is exact
        self.lengths: NDArray[np.uint64] = lengths
        self.offsets_in_page = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.uint64)  # of the flat page
        self.page_bytes = int(lengths.sum())
        self._verify(pool)

    def of(self, host_indices: torch.Tensor, num_pages: int) -> NDArray[np.uint64]:
        """[num_pages, pieces] for `num_pages * page_size` token slots. Raises as `pages_of`."""
        return self.of_pages(self.pages_of(host_indices, num_pages).astype(np.uint64))

    def of_pages(self, pages: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """[len(pages), pieces], for pages by number, unchecked."""
        return np.ascontiguousarray(self._offsets + pages[:, None] * self._strides)

    def _ask(self, pool: Any, page: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        slots = torch.arange(page * self.page_size, (page + 1) * self.page_size, dtype=torch.int64)
        meta = pool.get_page_buffer_meta(slots)
        if not meta or len(meta[0]) != len(meta[1]) or not meta[0]:
            raise UnsupportedError(f"host pool {type(pool).__name__} with layout {pool.layout!r} has no page addresses")
        order = self._order if self._order is not None else slice(None)
        return np.array(meta[0], dtype=np.uint64)[order], np.array(meta[1], dtype=np.uint64)[order]

    def _verify(self, pool: Any) -> None:
        expected_bytes = int(pool.get_size_per_token()) * self.page_size
        if self.page_bytes != expected_bytes:
            raise UnsupportedError(
                f"a page of {type(pool).__name__}: {self.page_bytes} bytes by address, {expected_bytes} by size"
            )
        last = self.num_pages - 1
        for page in sorted({last, last // 2, last // 3, min(2, last)}):
            asked, lengths = self._ask(pool, page)
            computed = self.of_pages(np.array([page], dtype=np.uint64))[0]
            if (asked != computed).any() or (lengths != self.lengths).any():
                raise UnsupportedError(
                    f"pages of {type(pool).__name__} with layout {pool.layout!r} do not lie evenly spaced"
                )
        _check_inside(pool, self.of_pages(np.array([0, last], dtype=np.uint64)), self.lengths)


def _canonical_order(pool: Any) -> NDArray[np.int64] | None:
    """SGLang lists the pieces of layer_first as k0, v0, k1, v1, ...: K first, then V. None: as listed."""
    if pool.layout != "layer_first" or not hasattr(pool, "v_buffer"):
        return None
    pieces = 2 * int(pool.layer_num)
    return np.concatenate([np.arange(0, pieces, 2), np.arange(1, pieces, 2)])


def _check_inside(pool: Any, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> None:
    """Every piece must lie in a buffer of the pool, where the pool shows its buffers."""
    spans = [(address, address + num_bytes) for address, num_bytes in buffers_of(pool)]
    for row in addresses.tolist():
        for address, length in zip(row, lengths.tolist(), strict=True):
            if not any(begin <= address and address + length <= end for begin, end in spans):
                raise ConfigError(f"a page of {type(pool).__name__} at {address:#x} lies outside its buffers")
