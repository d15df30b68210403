"""Host pools beside KV: the state of sliding windows, Mamba layers, DSA indexers, draft models.

Each pool is a namespace of the store of its own, under the same directory and its limits. A page of a side pool has
the key of the KV page that it belongs to, and every page is whole or absent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mha_mxfp8 import MHATokenToKVPoolMXFP8Host
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from sglang_tpusync import _core
from sglang_tpusync.errors import ConfigError, UnsupportedError
from sglang_tpusync.hicache.identity import Namespace, draft_fields, layout_of
from sglang_tpusync.hicache.pages import FlatPages, PageAddresses, key_bytes, leading
from sglang_tpusync.hicache.traffic import Traffic

__all__ = ["SidePool", "pages_of_side_pool", "restorable_lengths"]

_NAMES = ("draft", "draft_indexer", "draft_swa", "indexer", "mamba", "swa")
_CLASSES = (
    MHATokenToKVPoolHost, MHATokenToKOnlyPoolHost, MLATokenToKVPoolHost, MambaPoolHost, DSAIndexerPoolHost,
)  # fmt: skip
_STAGING_BYTES = 64 << 20  # of flat pages on their way to or from a pool without addresses

Wait = Callable[[Any, float, str], None]


class SidePool:
    """One pool and its store. Thread-safe as the store is. Raises UnsupportedError from the constructor for a pool
    that is not known here.
    """

    def __init__(self, name: str, pool: Any) -> None:
        self.name = name
        self.pool = pool
        self.pages = pages_of_side_pool(name, pool)
        self.traffic = Traffic(0, f"pages of pool {name!r}")
        self.store: Any = None  # None: closed
        self.namespace: Namespace | None = None

    def identify(self, base: Namespace, storage_config: Any, fingerprint: str | None) -> Namespace:
        """The namespace of this pool beside that of the KV pages, whose fields it has, too."""
        pool = self.pool
        replicated = isinstance(pool, DSAIndexerPoolHost | MLATokenToKVPoolHost)
        num_drafts = _num_packed_drafts(pool)
        if self.name.startswith("draft"):
            num_drafts += int(pool.layer_num)
        stage = [int(storage_config.pp_rank), int(storage_config.pp_size)]
        fields = {
            "name": self.name,
            "layout": layout_of(pool),
            "page": [int(pool.page_size), self.pages.page_bytes],
            "geometry": _geometry(pool),
            "shard": None if replicated else [int(storage_config.tp_rank), int(storage_config.tp_size)],
            "stage": stage if stage[1] > 1 else None,
            "draft": draft_fields(num_drafts, fingerprint),
        }
        return Namespace({**base.fields, "pool": fields})

    def close(self, when: str) -> None:
        """Idempotent; writes the last summary line."""
        store, self.store = self.store, None
        if store is not None:
            self.traffic.log_summary(store.stats(), when)
            store.close()

    def clear(self) -> int:
        """Drops all pages; answers how many there were: 0 while the store is opened anew for other weights."""
        store = self.store
        return int(store.clear()) if store is not None else 0

    def contains(self, keys: bytes) -> NDArray[np.bool_]:
        return np.asarray(self.store.contains(keys), dtype=np.bool_)

    def touch(self, keys: bytes, prefix: bytes) -> int:
        """How many of these keys in a row can be read now; they are used from here on."""
        return int(self.store.match(keys, prefix))

    def read(
        self, keys: Sequence[str], prefix: bytes, indices: torch.Tensor, timeout_s: float, wait: Wait
    ) -> list[bool]:
        """Reads pages into slots of the pool; True up to the first page that could not be read."""
        slots = self.pages.pages_of(indices, len(keys))
        num_read, begin, reason = 0, time.monotonic(), "ok"
        for part in self._parts(len(keys)):
            raw, staging = key_bytes(keys[part]), self._staging(slots[part])
            ticket = self.store.submit_get(raw, prefix, staging.addresses, staging.lengths, timeout_s=timeout_s)
            wait(ticket, timeout_s, "read")
            outcomes = ticket.outcomes()
            good = leading(outcomes)
            staging.deliver(good)
            num_read, prefix = num_read + good, prefix + raw
            if good < len(outcomes):
                reason = _core.OUTCOME_NAMES[int(outcomes[good])]
                break
        self.traffic.read(num_read, self.pages.page_bytes, time.monotonic() - begin)
        if num_read < len(keys):
            self.traffic.missed(len(keys) - num_read, reason)
        return [page < num_read for page in range(len(keys))]

    def write(
        self, keys: Sequence[str], prefix: bytes, indices: torch.Tensor, timeout_s: float, wait: Wait
    ) -> list[bool]:
        """Stores pages out of slots of the pool; True for each that is stored."""
        slots = self.pages.pages_of(indices, len(keys))
        begin, parts = time.monotonic(), []
        for part in self._parts(len(keys)):
            raw, staging = key_bytes(keys[part]), self._staging(slots[part])
            staging.collect()
            ticket = self.store.submit_put(raw, prefix, staging.addresses, staging.lengths, timeout_s=timeout_s)
            wait(ticket, timeout_s, "write")
            parts.append(ticket.outcomes())
            prefix += raw
        outcomes = np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint8)
        refused = outcomes[outcomes != 0]
        self.traffic.stored(len(outcomes) - len(refused), self.pages.page_bytes, time.monotonic() - begin)
        if len(refused):
            self.traffic.refused(len(refused), _core.OUTCOME_NAMES[int(refused[0])])
        return [int(outcome) == 0 for outcome in outcomes]

    def stats(self) -> dict[str, int | float | str]:
        """Counters of this pool and of its store, by names that begin with the pool's."""
        store = self.store
        counters = {**self.traffic.counters(), **(store.stats() if store is not None else {})}
        return {f"pool_{self.name}_{name}": value for name, value in counters.items()}

    def _parts(self, num_pages: int) -> list[slice]:
        """All pages at once where they need no staging."""
        step = max(1, _STAGING_BYTES // self.pages.page_bytes) if isinstance(self.pages, FlatPages) else num_pages
        return [slice(first, min(num_pages, first + step)) for first in range(0, num_pages, max(1, step))]

    def _staging(self, slots: NDArray[np.int64]) -> _InPlace | _Staged:
        return _Staged(self.pages, slots) if isinstance(self.pages, FlatPages) else _InPlace(self.pages, slots)


class _InPlace:
    """Pages that lie where the store can reach them."""

    def __init__(self, pages: PageAddresses, slots: NDArray[np.int64]) -> None:
        self.addresses = pages.of_pages(slots.astype(np.uint64))
        self.lengths = pages.lengths

    def collect(self) -> None:
        """They are where they are."""

    def deliver(self, num_pages: int) -> None:
        """They are where they should be."""


class _Staged:
    """Pages that the pool itself copies, as flat ones. `addresses` is of memory that lives as long as this."""

    def __init__(self, pages: FlatPages, slots: NDArray[np.int64]) -> None:
        self._pages, self._slots = pages, slots
        self._bytes = torch.empty((len(slots), pages.page_bytes), dtype=torch.uint8)
        first = np.uint64(self._bytes.data_ptr())
        self.addresses = (first + np.arange(len(slots), dtype=np.uint64) * np.uint64(pages.page_bytes)).reshape(-1, 1)
        self.lengths = pages.lengths

    def collect(self) -> None:
        for row, slot in zip(self._bytes, self._slots.tolist(), strict=True):
            row.copy_(self._pages.read(slot))

    def deliver(self, num_pages: int) -> None:
        for row, slot in zip(self._bytes[:num_pages], self._slots.tolist(), strict=False):
            self._pages.write(slot, row)


def pages_of_side_pool(name: str, pool: Any) -> PageAddresses | FlatPages:
    """How pages of this pool are reached. Raises UnsupportedError, with the pool's name, if it is not known here."""
    kind = type(pool).__name__
    if name not in _NAMES:
        raise UnsupportedError(
            f"host pool {name!r} ({kind}) of this model cannot be stored: known are kv, {', '.join(_NAMES)}"
        )
    if not isinstance(pool, _CLASSES) or isinstance(pool, MHATokenToKVPoolMXFP8Host):
        known = ", ".join(cls.__name__ for cls in _CLASSES)
        raise UnsupportedError(f"host pool {name!r} of this model is a {kind}: known are {known}")
    if pool.shared_allocation_domain is not None:
        raise UnsupportedError(f"host pool {name!r} of this model shares its memory with others, which move its pages")
    try:
        try:
            return PageAddresses(pool)
        except (NotImplementedError, ValueError):  # SGLang's word for layouts and states without addresses
            return FlatPages(pool)
    except (ConfigError, UnsupportedError, NotImplementedError) as error:
        raise UnsupportedError(f"host pool {name!r} of this model cannot be stored: {error}") from error


def restorable_lengths(present: NDArray[np.bool_], policy: PoolHitPolicy, num_tail: int) -> NDArray[np.bool_]:
    """[len(present) + 1], by length of a prefix: whether this pool has what the policy asks for to restore it."""
    missing = np.concatenate([[0], np.cumsum(~present)])
    lengths = np.arange(len(missing))
    begins = np.zeros_like(lengths) if policy == PoolHitPolicy.ALL_PAGES else np.maximum(0, lengths - num_tail)
    return np.asarray(missing[lengths] == missing[begins], dtype=np.bool_)


def _num_packed_drafts(pool: Any) -> int:
    if isinstance(pool, MambaPoolHost):
        return len(pool.mtp_draft_buffer_infos)
    return int(pool.layer_num) - int(getattr(pool, "target_layer_num", pool.layer_num))


def _geometry(pool: Any) -> dict[str, Any]:
    """What the bytes of a page mean, without the number of pages."""
    if isinstance(pool, MambaPoolHost):
        return {
            "num_layers": int(pool.num_mamba_layers),
            "temporal": [str(pool.temporal_dtype), list(pool.temporal_state_shape)],
            "conv": [[str(pool.conv_dtype), list(shape)] for shape in pool.conv_state_shapes],
            "extra": [[str(state.dtype), list(state.shape[1:])] for state in pool.slot_state_device_tensors],
        }
    if isinstance(pool, DSAIndexerPoolHost):
        device = pool.device_pool
        return {
            "layers": [int(layer) for layer in pool._live_target_layers],
            "num_layers": int(pool.layer_num),
            "index": [int(device.index_head_dim), int(device.quant_block_size)],
            "dtype": str(pool.indexer_dtype),
        }
    fields = {
        "layers": [int(pool.start_layer), int(pool.end_layer), int(pool.layer_num)],
        "dtype": str(pool.dtype),
    }
    if isinstance(pool, MLATokenToKVPoolHost):
        return {**fields, "latent": int(pool.kv_cache_dim)}
    return {**fields, "heads": [int(pool.head_num), int(pool.head_dim), int(getattr(pool, "v_head_dim", 0))]}
