"""The HiCache storage backend (L3) of one rank: a FlashStore, and before it, where the host pool is a DRAM region, the
node's DRAM.

Nothing here raises into SGLang's threads: what goes wrong is a miss or a refused write, counted and logged. A
refused write answers True, because SGLang takes a False for the end of the whole operation, and is told apart by
its count.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from sglang_tpusync import _core, runtime
from sglang_tpusync.config import Options, read_options, seconds, size_in_bytes, status_path_of, store_path
from sglang_tpusync.errors import UnsupportedError
from sglang_tpusync.hicache.identity import Namespace, namespace_of
from sglang_tpusync.hicache.pages import PageAddresses, buffers_of, key_bytes, leading
from sglang_tpusync.hicache.shared_pool import region_of
from sglang_tpusync.hicache.side_pools import SidePool, restorable_lengths
from sglang_tpusync.hicache.traffic import Traffic
from sglang_tpusync.observe import StatusWriter

__all__ = ["TpuSyncStorage"]

logger = logging.getLogger("sglang_tpusync")

_LATE_LOG_INTERVAL_S = 10.0
_LAST_SPILL_S = 5.0  # what a server that ends gives pages that are in DRAM only
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _guarded(
    answer: Callable[[Sequence[Any]], _R],
) -> Callable[[Callable[Concatenate[Any, Sequence[Any], _P], _R]], Callable[Concatenate[Any, Sequence[Any], _P], _R]]:
    """Catches what a data method raises and answers `answer(first argument)` instead."""

    def decorate(method: Callable[..., _R]) -> Callable[..., _R]:
        @functools.wraps(method)
        def guarded(self: TpuSyncStorage, first: Sequence[Any], *args: Any, **kwargs: Any) -> _R:
            try:
                return method(self, first, *args, **kwargs)
            except Exception:
                self.traffic.fault(f"{method.__name__} failed")
                return answer(first)

        return guarded

    return decorate


def _all_missed(keys: Sequence[Any]) -> list[bool]:
    return [False] * len(keys)


def _all_refused(keys: Sequence[Any]) -> list[bool]:
    return [True] * len(keys)


class TpuSyncStorage(HiCacheStorage):  # type: ignore[misc]
    """KV pages of one rank on a local SSD. Thread-safe once SGLang has registered the host pool.

    `storage_config` is SGLang's HiCacheStorageConfig; its extra_config holds the options (config.Options). The
    second argument is the host pool, or the empty mapping that SGLang passes when it loads the class through
    `dynamic`; the pool that counts is the one registered afterwards. Raises ConfigError, UnsupportedError,
    StorageError or HookError from the constructor and from the registration of pools, and nothing from any other
    method.
    """

    wants_prefix_keys = True

    def __init__(self, storage_config: Any, mem_pool_host: Any = None) -> None:
        from sglang_tpusync.hooks import hooks
        from sglang_tpusync.plugin import warn_if_untested

        extra = storage_config.extra_config or {}
        hooks.require("weights", *(() if "module_path" in extra else ("name",)))
        warn_if_untested()
        if storage_config.should_split_heads:
            raise UnsupportedError(
                "tp_lcm_size with layout page_head: heads of a page cannot be split yet; leave it out"
            )
        self.options: Options = read_options(extra)
        self.traffic = Traffic(self.options.summary_interval_s)
        self._config = dataclasses.replace(storage_config)
        # SGLang lets one rank write what all ranks hold alike (MLA). A region is read by its writer only, and
        # a hit is what every rank has: so each rank keeps its pages.
        storage_config.is_mla_model = False
        self._store: Any = None
        self._region: Any = None  # of the host pool, where it has one
        self._stack: Any = None  # over both; None without a region
        self._pages: PageAddresses | None = None
        self._sides: dict[str, SidePool] = {}
        self.namespace: Namespace | None = None
        self._epoch: runtime.Epoch | None = None  # of the weights that the store is open for
        self._renewal = threading.Lock()  # over opening and closing
        self._closed = False
        self._status: StatusWriter | None = None

    # Set-up, in SGLang's order.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Opens the store for the pages of this pool."""
        super().register_mem_pool_host(mem_pool_host)
        if getattr(mem_pool_host, "kv_buffer", None) is None:
            raise UnsupportedError(
                f"host pool {type(mem_pool_host).__name__} has no memory of its own: this model is not supported"
            )
        self._pages = PageAddresses(mem_pool_host)
        base = namespace_of(mem_pool_host, self._config, self.options.fingerprint)
        self._epoch = runtime.weights.epoch
        self.namespace = base.of_epoch(self._epoch_name())
        forward_log()  # from here on they come to us
        memory = self._memory_to_register(mem_pool_host)
        self._store = _open_store(self.options, self.namespace, self._pages.page_bytes, memory)
        self._region = region_of(mem_pool_host, self._pages, self.namespace)
        if self._region is not None:
            self._stack = _core.TierStack(region=self._region, store=self._store, spill=self.options.spill)
        elif self.options.host_pool == "shared" and getattr(mem_pool_host, "region", None) is None:
            logger.warning("option 'host_pool' = 'shared': the host pool of this process is private, pages are copied")
        if self.options.trust_weight_version:
            runtime.weights.trust_versions(_weight_version())
        runtime.weights.listen(self._renew_soon)
        self._status = StatusWriter(status_path_of(self.options), self._describe)
        forward_log()
        logger.info(
            "store of KV pages: namespace %s, %d bytes a page, in %s%s",
            self.namespace.digest.hex()[:16],
            self._pages.page_bytes,
            store_path(self.options),
            f", and in DRAM in {self._region.path}" if self._region is not None else "",
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Opens a store for the pages of a pool beside KV. One that is not known here is refused, and with it the
        model: a prefix without its other state must not be served.
        """
        name = str(host_pool_name)
        if name != str(PoolName.KV):
            try:
                self._open_side(SidePool(name, host_pool))
            except Exception:
                self.close()
                raise
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def _open_side(self, side: SidePool) -> None:
        with self._renewal:
            if self._closed or self.namespace is None:
                raise UnsupportedError(f"host pool {side.name!r} comes before the pool of KV pages, or after the end")
            base = self.namespace.of_epoch(None)
            side.namespace = side.identify(base, self._config, self.options.fingerprint).of_epoch(self._epoch_name())
            before = self._sides.get(side.name)
            if before is not None:
                before.close("replaced")
            side.store = _open_store(
                self.options, side.namespace, side.pages.page_bytes, self._memory_to_register(side.pool)
            )
            self._sides[side.name] = side
        forward_log()
        logger.info(
            "store of pages of pool %r: namespace %s, %d bytes a page%s",
            side.name,
            side.namespace.digest.hex()[:16],
            side.pages.page_bytes,
            "" if self.options.host_pool == "private" else "; this pool is private to its process, pages are copied",
        )

    # Interface v1: pages between the store and the host pool, without a copy.

    @_guarded(lambda keys: 0)
    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """The number of leading keys that are stored."""
        if self._refuses():
            return 0
        wanted, prefix = key_bytes(keys), _prefix(extra_info)
        stack = self._stack
        found = int(self._store.match(wanted, prefix) if stack is None else stack.match(wanted, prefix)[0])
        self.traffic.queried(len(keys), found)
        return found

    @_guarded(_all_missed)
    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Reads pages into host slots, [len(keys) * page_size] of them. True up to the first page that could not be
        read.
        """
        assert self._pages is not None
        if self._refuses():
            return _all_missed(keys)
        pages = self._pages.pages_of(host_indices, len(keys))
        return self._get(key_bytes(keys), _prefix(extra_info), self._pages.of_pages(pages.astype(np.uint64)), pages)

    @_guarded(_all_refused)
    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Stores pages out of host slots. Always True; what was refused is counted."""
        assert self._pages is not None
        if self._refuses():
            self.traffic.refused(len(keys), self._reason())
            return _all_refused(keys)
        pages = self._pages.pages_of(host_indices, len(keys))
        self._put(key_bytes(keys), _prefix(extra_info), self._pages.of_pages(pages.astype(np.uint64)), pages)
        return _all_refused(keys)

    # Interface v0: pages in flat tensors, as the pool's get_data_page gives them.

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    @_guarded(lambda keys: [None] * len(keys))
    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Reads pages into the given flat tensors; None from the first page on that could not be read."""
        if self._refuses():
            return [None] * len(keys)
        read = self._get(key_bytes(keys), b"", self._flat(target_locations, len(keys)), None)
        return [target if ok else None for target, ok in zip(target_locations, read, strict=True)]

    @_guarded(lambda keys: True)
    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Stores flat tensors. Always True; what was refused is counted."""
        if self._refuses():
            self.traffic.refused(len(keys), self._reason())
            return True
        self._put(key_bytes(keys), b"", self._flat(values, len(keys)), None)
        return True

    # Interface v2: several pools at once. A prefix is a hit where every pool has what it needs for it.

    @_guarded(lambda keys: PoolTransferResult.empty())
    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """The longest prefix that every pool can restore, and all lengths that they can. By pool: the longest that
        it could by itself.
        """
        num_kv = self.batch_exists(keys, extra_info)
        raw, prefix = key_bytes(keys[:num_kv]), _prefix(extra_info)
        hits = {PoolName.KV: num_kv} if num_kv else {}
        restorable = np.ones(num_kv + 1, dtype=np.bool_)
        restorable[0] = False
        needed: list[tuple[SidePool, int]] = []  # pools, and how many pages at the end they need
        for transfer in pool_transfers or ():
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # no pool that is known here has it; it would never end the hit
            side = self._sides.get(str(transfer.name))
            if side is None or not restorable.any():
                restorable[:] = False
                break
            tail = num_kv if transfer.hit_policy == PoolHitPolicy.ALL_PAGES else max(1, len(transfer.keys or ()))
            own = restorable_lengths(side.contains(raw), transfer.hit_policy, tail)
            boundary = int(np.flatnonzero(own)[-1])
            side.traffic.queried(len(keys), boundary)
            if boundary:
                hits[transfer.name] = boundary
            restorable &= own
            needed.append((side, tail))
        lengths = [int(length) for length in np.flatnonzero(restorable)]
        final = lengths[-1] if lengths else 0
        for side, tail in needed:
            begin = max(0, final - tail)
            begin_byte, end_byte = begin * _core.KEY_BYTES, final * _core.KEY_BYTES
            found = side.touch(raw[begin_byte:end_byte], prefix + raw[:begin_byte])
            if found < final - begin:  # gone meanwhile, or its disk is too slow just now
                return PoolTransferResult(0, hits, [])
        return PoolTransferResult(final, hits, lengths)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """By pool: True up to the first page that could not be read into its slot."""
        return {
            transfer.name: self.batch_get_v1(transfer.keys or [], transfer.host_indices, extra_info)
            if str(transfer.name) == str(PoolName.KV)
            else self._get_side(transfer.keys or [], str(transfer.name), transfer.host_indices, extra_info)
            for transfer in transfers
        }

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """By pool: True for each page that is stored; in a pool beside KV a refused one is False."""
        return {
            transfer.name: self.batch_set_v1(transfer.keys or [], transfer.host_indices, extra_info)
            if str(transfer.name) == str(PoolName.KV)
            else self._set_side(transfer.keys or [], str(transfer.name), transfer.host_indices, extra_info)
            for transfer in transfers
        }

    @_guarded(_all_missed)
    def _get_side(self, keys: Sequence[str], name: str, indices: torch.Tensor, extra_info: Any) -> list[bool]:
        side, epoch = self._sides.get(name), runtime.weights.epoch
        if side is None or self._refuses():
            return _all_missed(keys)
        read = side.read(keys, _prefix(extra_info), indices, self.options.get_timeout_s, self._wait)
        if self._refuses() or runtime.weights.epoch != epoch:  # what was read is of the weights before
            return _all_missed(keys)
        return read

    @_guarded(_all_missed)
    def _set_side(self, keys: Sequence[str], name: str, indices: torch.Tensor, extra_info: Any) -> list[bool]:
        side = self._sides.get(name)
        if side is None:
            return _all_missed(keys)
        if self._refuses():
            side.traffic.refused(len(keys), self._reason())
            return _all_missed(keys)
        return side.write(keys, _prefix(extra_info), indices, self.options.put_timeout_s, self._wait)

    # Control.

    def clear(self) -> None:
        """Drops every page of this namespace, and of those of the pools beside KV."""
        try:
            for side in list(self._sides.values()):
                logger.info("store of pages of pool %r cleared: %d pages dropped", side.name, side.clear())
            if self._store is not None:
                num_dram, num_disk = self._stack.clear() if self._stack is not None else (0, self._store.clear())
                logger.info("store of KV pages cleared: %d pages dropped, %d of DRAM", num_disk, num_dram)
        except Exception:
            self.traffic.fault("clear failed")

    def close(self) -> None:
        """Idempotent. Writes the last summary line."""
        runtime.weights.unlisten(self._renew_soon)
        if self._status is not None:
            self._status.close()
        with self._renewal:
            self._closed = True
            self._close_store("at close")

    def _close_store(self, when: str) -> None:
        store, self._store = self._store, None
        stack, self._stack = self._stack, None
        for side in list(self._sides.values()):
            side.close(when)
        if stack is not None:
            if not stack.flush(_LAST_SPILL_S):
                logger.info("some pages stay in DRAM only: the disk did not take them in %.0f s", _LAST_SPILL_S)
            stack.close()
        if store is not None:
            self.traffic.log_summary(store.stats(), when)
            store.close()
            if self._epoch is not None and not self._epoch.lasting:
                self._remove_region()
            forward_log()

    def _remove_region(self) -> None:
        """Nobody will ever ask for these pages again: the room is for others."""
        from sglang_tpusync.store import clear_regions, read_store

        view = read_store(store_path(self.options), self.options, tables=False)
        for namespace in (self.namespace, *(side.namespace for side in list(self._sides.values()))):
            assert namespace is not None
            clear_regions(view, namespace=namespace.digest.hex()[:32])

    def _renew_soon(self) -> None:
        """Not on the caller's thread, which is the scheduler's: opening a store waits for the disk."""
        threading.Thread(target=self._renew, name="tpusync-epoch", daemon=True).start()

    def _renew(self) -> None:
        """Opens the store of the present weights; until it is open nothing is served nor accepted."""
        try:
            with self._renewal:
                epoch = runtime.weights.epoch
                if self._closed or epoch is None or epoch == self._epoch:
                    return
                assert self.namespace is not None
                assert self._pages is not None
                self._close_store("of the weights before")
                if self._region is not None:
                    logger.warning("the DRAM of the host pool is not shared from here on: it belongs to other weights")
                    self._region = None
                self._epoch = None  # of none, should the rest fail
                self.namespace = self.namespace.of_epoch(epoch.name)
                self._store = _open_store(self.options, self.namespace, self._pages.page_bytes, ())
                for side in list(self._sides.values()):
                    assert side.namespace is not None
                    side.namespace = side.namespace.of_epoch(epoch.name)
                    side.store = _open_store(self.options, side.namespace, side.pages.page_bytes, ())
                self._epoch = epoch
                logger.info("store of KV pages: namespace %s, %s", self.namespace.digest.hex()[:16], epoch.name)
        except Exception:
            self.traffic.fault("the store could not be opened for the new weights")
        finally:
            forward_log()

    def get_stats(self) -> Any:
        """SGLang's StorageMetrics of the batches since the last call."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        return self.traffic.drain(StorageMetrics())

    def stats(self) -> dict[str, int | float | str]:
        """Counters of this backend and of its store, by name."""
        own: dict[str, int | float | str] = {**self.traffic.counters(), "copies_redone": runtime.copies.num_redone}
        parts = [part for part in (self._store, self._region, self._stack) if part is not None]
        for side in list(self._sides.values()):
            own.update(side.stats())
        return {**own, **{name: value for part in parts for name, value in part.stats().items()}}

    def _describe(self) -> tuple[str, str, str | None, dict[str, int | float | str]]:
        assert self.namespace is not None
        region = self._region.path if self._region is not None else None
        return self.namespace.digest.hex(), str(store_path(self.options)), region, self.stats()

    def _get(
        self, keys: bytes, prefix: bytes, addresses: NDArray[np.uint64], pages: NDArray[np.int64] | None
    ) -> list[bool]:
        """`pages`: which of the host pool the addresses are of; None: of none."""
        assert self._pages is not None
        begin, epoch = time.monotonic(), runtime.weights.epoch
        lengths, timeout_s, stack = self._pages.lengths, self.options.get_timeout_s, self._stack
        if stack is not None:
            ticket = stack.submit_get(keys, prefix, addresses, pages, timeout_s=timeout_s)
        else:
            ticket = self._store.submit_get(keys, prefix, addresses, lengths, timeout_s=timeout_s)
        self._wait(ticket, self.options.get_timeout_s, "read")
        outcomes = ticket.outcomes()
        num_read = leading(outcomes)
        if self._refuses() or runtime.weights.epoch != epoch:  # what was read is of the weights before
            num_read = 0
        self.traffic.read(num_read, int(lengths.sum()), time.monotonic() - begin)
        if num_read < len(outcomes):
            self.traffic.missed(len(outcomes) - num_read, _core.OUTCOME_NAMES[int(outcomes[num_read])])
        self._summarize()
        return [page < num_read for page in range(len(outcomes))]

    def _put(self, keys: bytes, prefix: bytes, addresses: NDArray[np.uint64], pages: NDArray[np.int64] | None) -> None:
        """`pages`: which of the host pool the addresses are of; None: of none."""
        assert self._pages is not None
        begin = time.monotonic()
        lengths, timeout_s, stack = self._pages.lengths, self.options.put_timeout_s, self._stack
        if stack is not None and pages is not None:
            outcomes = stack.put(keys, prefix, pages)
        else:
            ticket = self._store.submit_put(keys, prefix, addresses, lengths, timeout_s=timeout_s)
            self._wait(ticket, timeout_s, "write")
            outcomes = ticket.outcomes()
        refused = outcomes[outcomes != 0]
        self.traffic.stored(len(outcomes) - len(refused), int(lengths.sum()), time.monotonic() - begin)
        if len(refused):
            self.traffic.refused(len(refused), _core.OUTCOME_NAMES[int(refused[0])])
        self._summarize()

    def _wait(self, ticket: Any, timeout_s: float, what: str) -> None:
        """Returns when no byte of the batch can move any more: until then its host slots must not go to anybody
        else.
        """
        if ticket.wait(timeout_s):
            return
        ticket.cancel()
        while not ticket.wait(_LATE_LOG_INTERVAL_S):
            logger.warning("a batch of pages to %s is late: the disk does not answer", what)

    def _flat(self, tensors: Sequence[torch.Tensor], num_pages: int) -> NDArray[np.uint64]:
        """[num_pages, pieces] addresses in flat pages."""
        assert self._pages is not None
        page_bytes = self._pages.page_bytes
        for tensor in tensors:
            if not tensor.is_contiguous() or tensor.numel() * tensor.element_size() != page_bytes:
                raise ValueError(f"a flat page is not contiguous or not of {page_bytes} bytes")
        begins = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64).reshape(num_pages, 1)
        return begins + self._pages.offsets_in_page

    def _memory_to_register(self, pool: Any) -> list[tuple[int, int]]:
        wish, pinned = self.options.register_memory, bool(getattr(pool, "pin_memory", False))
        return buffers_of(pool) if {"always": True, "never": False, "auto": pinned}[wish] else []

    def _epoch_name(self) -> str | None:
        return self._epoch.name if self._epoch is not None else None

    def _refuses(self) -> bool:
        weights = runtime.weights
        return self._store is None or weights.changed_by is not None or weights.epoch != self._epoch

    def _reason(self) -> str:
        return f"weights changed ({runtime.weights.changed_by})" if runtime.weights.changed_by else "not open"

    def _summarize(self) -> None:
        forward_log()
        if self.traffic.summary_is_due():
            self.traffic.log_summary(self._store.stats(), "so far")


def _weight_version() -> str:
    from sglang.srt.runtime_context import get_serving

    return str(get_serving().weight_version)


def forward_log() -> None:
    """Lines of the core to the logger of this package."""
    for level, message in _core.take_log_lines():
        logger.log(logging.getLevelNamesMapping()[level.upper()], "%s", message)


def _open_store(options: Options, namespace: Namespace, page_bytes: int, memory: Sequence[tuple[int, int]]) -> Any:
    path = store_path(options)
    whole = _file_system_bytes(path)
    return _core.FlashStore(
        path=str(path),
        namespace=namespace.digest,
        namespace_json=namespace.json,
        page_bytes=page_bytes,
        capacity_bytes=size_in_bytes("capacity", options.capacity, whole),
        floor_bytes=size_in_bytes("floor", options.floor, whole),
        write_budget_bytes_per_day=size_in_bytes("write_budget_per_day", options.write_budget_per_day, whole),
        fsync=options.fsync,
        io=options.io,
        num_threads=options.num_threads,
        allow_tmpfs=options.allow_tmpfs,
        ttl_s=seconds("ttl", options.ttl),
        latency_budget_s=options.latency_budget_s,
        memory=memory,
    )


def _file_system_bytes(path: Path) -> int:
    """Size of the file system that holds `path` or will hold it."""
    while not path.exists() and path != path.parent:
        path = path.parent
    status = os.statvfs(path)
    return status.f_blocks * status.f_frsize


def _prefix(extra_info: Any) -> bytes:
    return key_bytes(getattr(extra_info, "prefix_keys", None))
