"""A host pool of SGLang whose memory is a DRAM region of the core: its pages outlive the process and are readable
by the node.

The pool keeps SGLang's shapes and layouts; what changes is where the bytes lie and which slots an allocation gets:
those whose pages are worth least.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.pool_host.base import HostKVCache, host_memory_budget_bytes
from sglang.srt.mem_cache.pool_host.common import HostTensorAllocator
from sglang.srt.runtime_context import get_memory

from sglang_tpusync import _core
from sglang_tpusync.config import Options, dram_path, read_options, size_in_bytes
from sglang_tpusync.errors import UnsupportedError
from sglang_tpusync.hicache.identity import Namespace, namespace_of, shard_of_process
from sglang_tpusync.hicache.pages import PageAddresses
from sglang_tpusync.hicache.selection import options_source

__all__ = ["SharedHostPool", "region_of"]

logger = logging.getLogger("sglang_tpusync")

_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


class SharedHostPool(HostKVCache):  # type: ignore[misc]
    """To be mixed in before a pool class of SGLang. `region` is None where the options leave the pool private."""

    num_parts: int  # K and V: 2; a latent: 1
    page_size: int
    region: Any = None
    region_namespace: Namespace | None = None

    def _allocate_host_buffer(self) -> None:
        options = self._wanted()
        if options is None:
            super()._allocate_host_buffer()
            return
        self._check_fits()
        host_memory_budget_bytes(self.size * self.size_per_token)  # books it; whether it fits, the region decides
        mla = self.num_parts == 1
        self.region_namespace = namespace_of(self, shard_of_process(mla), options.fingerprint)
        self.region = _open_region(options, self.region_namespace, self._piece_bytes(), self.page_num)
        self.allocator = _RegionAllocator(self.region)
        self.kv_buffer = self.init_kv_buffer()
        self.fd = None

    def _wanted(self) -> Options | None:
        """The options if they ask for a shared pool and this is the pool of KV pages."""
        memory = get_memory()
        source = options_source(memory.hicache_storage_backend, memory.hicache_storage_backend_extra_config)
        options = read_options(source.text) if source is not None else Options()
        return options if options.host_pool == "shared" and self.pool_label == "kv" else None

    def _check_fits(self) -> None:
        if self.layout not in _LAYOUTS:
            raise UnsupportedError(
                f"option 'host_pool' = 'shared' with layout {self.layout!r}: allowed is one of {', '.join(_LAYOUTS)}"
            )
        if getattr(self, "v_head_dim", None) != getattr(self, "head_dim", None):
            raise UnsupportedError("option 'host_pool' = 'shared': heads of K and V are of different sizes")

    def _piece_bytes(self) -> list[int]:
        """Of each piece of a page, in the order of PageAddresses."""
        num_pieces = self.num_parts * (self.layer_num if self.layout == "layer_first" else 1)
        return [self.size_per_token * self.page_size // num_pieces] * num_pieces

    def clear(self) -> None:
        """Frees every slot. What is sealed stays readable, as it does in the store."""
        super().clear()
        if self.region is not None:
            self.region.free_all()

    def available_size(self) -> int:
        if self.region is None:
            return super().available_size()  # type: ignore[no-any-return]
        return int(self.region.available) * self.page_size

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Token slots of the pages that are worth least; None if fewer are free."""
        if self.region is None:
            return super().alloc(need_size)
        assert need_size % self.page_size == 0, "The requested size should be a multiple of the page size."
        with self.lock:
            pages = self.region.alloc(need_size // self.page_size)
            if pages is None:
                return None
            slots = torch.from_numpy((pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1))
            assert not self.slot_used[slots].any(), "Double-alloc detected"
            self.slot_used[slots] = True
            return slots

    def free(self, indices: torch.Tensor) -> int:
        """Frees token slots; a page is free when all its tokens are. Earlier pages of `indices` are evicted last."""
        if self.region is None:
            return super().free(indices)  # type: ignore[no-any-return]
        slots = indices.cpu()
        if slots.numel() == 0:
            return 0
        with self.lock:
            assert self.slot_used[slots].all(), (
                f"Double-free detected: slots not currently allocated: {slots[~self.slot_used[slots]].tolist()}."
            )
            self.slot_used[slots] = False
            pages = _distinct(slots.numpy() // self.page_size)
            in_use = self.slot_used.view(self.page_num, self.page_size)[torch.from_numpy(pages)].any(dim=1).numpy()
            self.region.free(np.ascontiguousarray(pages[~in_use]))
        return len(indices)


def region_of(pool: Any, pages: PageAddresses, namespace: Namespace) -> Any:
    """The region under `pool` if it holds pages of `namespace`, else None."""
    region = getattr(pool, "region", None)
    if region is None:
        return None
    if pool.region_namespace.digest != namespace.digest:
        logger.warning(
            "the host pool was made for namespace %s, and pages are stored under %s: its DRAM is not shared",
            pool.region_namespace.digest.hex()[:16],
            namespace.digest.hex()[:16],
        )
        return None
    lengths = pages.lengths.astype(np.uint64)
    base = np.uint64(region.memory().ctypes.data)
    for page in {0, pages.num_pages // 2, pages.num_pages - 1}:
        expected = base + pages.offsets_in_page * np.uint64(region.num_slots) + np.uint64(page) * lengths
        if (pages.of_pages(np.array([page], dtype=np.uint64))[0] != expected).any():
            raise UnsupportedError(f"page {page} of {type(pool).__name__} does not lie where its region says")
    return region


class _RegionAllocator(HostTensorAllocator):  # type: ignore[misc]
    """Gives SGLang the memory of a region, once, whole."""

    def __init__(self, region: Any) -> None:
        super().__init__()
        self._memory: NDArray[np.uint8] = region.memory()  # keeps the region open as long as a tensor lives

    def allocate(self, dims: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        num_bytes = math.prod(dims) * dtype.itemsize
        if num_bytes != self._memory.size:
            raise UnsupportedError(f"host pool asks for {num_bytes} bytes, its region has {self._memory.size}")
        self.dims, self.dtype = dims, dtype
        return torch.from_numpy(self._memory).view(dtype).view(dims)


def _open_region(options: Options, namespace: Namespace, piece_bytes: Sequence[int], num_pages: int) -> Any:
    from sglang_tpusync.hicache.storage import forward_log

    whole = _memory_bytes()
    try:
        return _core.HostRegion(
            root=str(dram_path(options)),
            namespace=namespace.digest,
            piece_bytes=list(piece_bytes),
            num_slots=num_pages,
            cap_bytes=size_in_bytes("host_pool_capacity", options.host_pool_capacity, whole),
            reserve_bytes=size_in_bytes("host_pool_reserve", options.host_pool_reserve, whole) or 0,
        )
    finally:
        forward_log()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _distinct(pages: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each page once, in the order of its first appearance."""
    _, first = np.unique(pages, return_index=True)
    return np.asarray(pages[np.sort(first)], dtype=np.int64)
