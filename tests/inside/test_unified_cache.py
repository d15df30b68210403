"""SGLang's unified radix cache, with the fixtures of its own test kit, over this store: models of every kind that the
kit builds, one cache that stores and another that restores.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import threading
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageFailureInjector
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache.config import CONFIGS, supports_hicache
from sglang.test.kits.unified_radix_cache.fixtures import (
    build_fixture,
    drop_hicache_atexit_pin,
    match_prefix,
    node_host_value,
    node_parent,
)
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

from sglang_tpusync.testing.tamper import ClosedRegion, regions_of


class OverTpuSync(UnifiedRadixCacheStorageFixtures, unittest.TestCase):
    """The kit asks for the backend `file`; it gets this one, in the directory that it names."""

    cfg: Any
    store: Any = None  # of the cache that was made last
    backend: Any = None  # of the cache that restored

    def _init_hicache(
        self, cache: Any, *, write_policy: str = "write_through", storage_backend: str | None = None,
        storage_dir: str | None = None, prefetch_threshold: int | None = None, prefetch_policy: str = "wait_complete",
        host_memory_mode: str = "cache", storage_extra: dict[str, Any] | None = None, context_length: int | None = None,
    ) -> None:  # fmt: skip
        assert storage_backend == "file"
        self.close_store()  # the kit keeps the cache that stored; its pages are for the process after it
        ranks = get_parallel().override(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, attn_dcp_rank=0, attn_dcp_size=1
        )
        ranks.__enter__()
        self.addCleanup(ranks.__exit__, None, None, None)
        options = {
            "path": storage_dir, "fingerprint": "kit", "capacity": "100MB", "floor": 0, "allow_tmpfs": True,
            "prefetch_threshold": prefetch_threshold, **(storage_extra or {}),
        }  # fmt: skip
        arguments = ServerArgs(
            model_path="dummy", page_size=self.cfg.page_size, hicache_io_backend="kernel",
            hicache_write_policy=write_policy, hicache_storage_backend="tpusync",
            hicache_storage_backend_extra_config=json.dumps(options), hicache_storage_prefetch_policy=prefetch_policy,
            hicache_host_memory_mode=host_memory_mode, context_length=context_length,
        )  # fmt: skip
        arguments._mamba_cache_chunk_size = max(CHUNK_SIZE, self.cfg.page_size)
        set_global_server_args_for_scheduler(arguments)
        cache.init_hicache(arguments, cache.cache_init_params)
        self.addCleanup(drop_hicache_atexit_pin, cache)
        self.addCleanup(cache.release_host_resources)
        cache.write_through_threshold = 1 << 30
        cache.load_back_threshold = 0
        controller = cache.cache_controller
        controller.prefetch_capacity_limit = max(controller.prefetch_capacity_limit, controller.mem_pool_host.size)
        self.addCleanup(controller._stop_storage_threads)
        self.store = controller.storage_backend

    def close_store(self) -> None:
        if self.store is not None:
            self.store.close()

    def end(self) -> None:
        self.close_store()
        self.doCleanups()
        self.store = self.backend = None
        if next(_ends) % 6 == 5:
            gc.collect()  # caches are cycles, and streams of copies are limited

    def runTest(self) -> None:
        """The fixtures are a test case; the tests below are functions."""

    def fill_device(self, fixture: Any, seed: int) -> None:
        """Every byte of every device pool from a seed: each page is unlike all others."""
        generator = torch.Generator().manual_seed(seed)
        _, allocator, requests = fixture
        pool = allocator.get_kvcache()
        tensors = [
            buffer
            for part in (getattr(pool, "full_kv_pool", pool), getattr(pool, "swa_kv_pool", None))
            if part is not None
            for buffer in [*part.k_buffer, *part.v_buffer]
        ]
        if self.cfg.has_mamba:
            state = requests.mamba_pool.mamba_cache
            tensors += [state.temporal, *state.conv]
        for tensor in tensors:
            flat = tensor.view(torch.uint8)
            flat.copy_(torch.randint(0, 120, flat.shape, dtype=torch.uint8, generator=generator))

    def produce(self, directory: str, seed: int = 5) -> tuple[list[int], dict[tuple[str, str], bytes]]:
        """A sequence that is in the store, and its pages by pool and key."""
        fixture = build_fixture(self.cfg)
        cache, allocator, requests = fixture
        self._init_hicache(cache, storage_backend="file", storage_dir=directory, prefetch_threshold=1)
        self.fill_device(fixture, seed)
        tokens = self._buffer_swa_seq()
        self._insert(cache, allocator, requests, tokens)
        leaf = match_prefix(cache, tokens).last_device_node
        self._backup_node(cache, leaf)
        self._write_path_to_l3(cache, leaf)
        self._flush_l3_backups(cache)
        pages = self.pages_of(cache, tokens)
        self.close_store()
        return tokens, pages

    def consume(self, directory: str, tokens: list[int]) -> dict[tuple[str, str], bytes]:
        """What another cache, without anything of its own, has on the host after it asked the store."""
        cache, _, _ = self._l3_consumer(directory)
        self.backend = cache.cache_controller.storage_backend
        self._consume_prefetch(cache, tokens, CacheRequestHandle("r", 0))
        return self.pages_of(cache, tokens)

    def pages_of(self, cache: Any, tokens: list[int]) -> dict[tuple[str, str], bytes]:
        """Pages on the host by pool and key."""
        group = cache.cache_controller.mem_pool_host
        entries = {str(entry.name): entry.host_pool for entry in getattr(group, "entries", ())} or {"kv": group}
        found = {}
        node = match_prefix(cache, tokens).last_host_node
        while node != cache.root_node_handle():
            hashes = cache.tree_core.get_hash_values(node)
            for name, component in POOLS.items():
                value = node_host_value(cache, node, component) if component in self.cfg.components else None
                if value is None:
                    continue
                pool = entries[name]
                starts = value[:: pool.page_size].tolist()
                for key, start in zip(hashes[len(hashes) - len(starts) :], starts, strict=True):
                    page = pool.get_data_page(start, flat=True).contiguous()
                    found[name, key] = page.view(torch.uint8).numpy().tobytes()
            node = node_parent(cache, node)
        return found


_ends = itertools.count()
POOLS = {"kv": ComponentType.FULL, "swa": ComponentType.SWA, "mamba": ComponentType.MAMBA}
KINDS = [cfg for cfg in CONFIGS if supports_hicache(cfg) and not cfg.is_eagle and cfg.page_size != 128]
HYBRIDS = [cfg for cfg in KINDS if len(cfg.components) > 1]


class TorchMambaPoolHost(MambaPoolHost):
    """SGLang copies states with a kernel of an accelerator; here assignments do, into memory that is not pinned."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, pin_memory=False)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        state = self.buffer_info
        return list(zip([self.temporal_buffer, *self.conv_buffer], [state.temporal, *state.conv], strict=True))

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str = "kernel"
    ) -> None:
        for host, device in self._pairs():
            host[host_indices.long(), :, 0] = device[:, device_indices.long()].transpose(0, 1)


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Iterator[OverTpuSync]:
    monkeypatch.setattr(hybrid_pool_assembler, "MambaPoolHost", TorchMambaPoolHost)
    made = OverTpuSync()
    yield made
    made.end()


@pytest.mark.parametrize("cfg", KINDS, ids=lambda cfg: cfg.label)
def test_what_one_cache_stored_another_restores(cfg: Any, case: OverTpuSync) -> None:
    case.cfg = cfg
    directory = case._make_storage_dir()
    tokens, stored = case.produce(directory)
    restored = case.consume(directory, tokens)
    assert {name for name, _ in restored} == {name for name, component in POOLS.items() if component in cfg.components}
    assert len([key for name, key in restored if name == "kv"]) == len(tokens) // cfg.page_size
    assert all(stored[page] == content for page, content in restored.items())
    assert case.backend.stats()["faults"] == 0


@pytest.mark.parametrize("cfg", HYBRIDS, ids=lambda cfg: cfg.label)
def test_a_prefix_without_its_other_state_is_no_hit(cfg: Any, case: OverTpuSync) -> None:
    case.cfg = cfg
    directory = case._make_storage_dir()
    tokens, _ = case.produce(directory)
    sides = [region for region in regions_of(Path(directory)) if is_of_side_pool(region)]
    assert len(sides) == 1
    for file in (sides[0].table, sides[0].table.with_suffix(".slots")):
        file.unlink()
    assert case.consume(directory, tokens) == {}


@pytest.mark.parametrize("cfg", HYBRIDS, ids=lambda cfg: cfg.label)
def test_damaged_state_is_not_restored(cfg: Any, case: OverTpuSync) -> None:
    case.cfg = cfg
    directory = case._make_storage_dir()
    tokens, stored = case.produce(directory)
    for region in regions_of(Path(directory)):
        if is_of_side_pool(region):
            for record in region.records().values():
                region.flip_payload_byte(record, 0)
    restored = case.consume(directory, tokens)
    assert not [name for name, _ in restored if name != "kv"]
    assert all(stored[page] == content for page, content in restored.items())
    name = "mamba" if cfg.has_mamba else "swa"
    assert case.backend.stats()[f"pool_{name}_pages_missed_corrupt"] > 0


@pytest.mark.parametrize("cfg", [HYBRIDS[0], HYBRIDS[-1]], ids=lambda cfg: cfg.label)
def test_injected_failures_restore_less_and_never_something_else(
    cfg: Any, case: OverTpuSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.2")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.02")
    case.cfg = cfg
    outcomes = set()
    for seed in range(5):
        dice = random.Random(seed)  # SGLang's own have no seed
        monkeypatch.setattr(HiCacheStorageFailureInjector, "_thread_local_random", lambda _, dice=dice: dice)
        directory = case._make_storage_dir()
        tokens, stored = case.produce(directory, seed)
        restored = case.consume(directory, tokens)
        assert isinstance(case.backend, HiCacheStorageFailureInjector)
        assert all(stored[page] == content for page, content in restored.items())
        outcomes.add("nothing" if not restored else "with state" if {name for name, _ in restored} > {"kv"} else "kv")
        assert case.backend._backend.stats()["faults"] == 0
        case.end()
    assert outcomes >= {"nothing", "with state"}


@pytest.mark.parametrize("cfg", [HYBRIDS[0], HYBRIDS[-1]], ids=lambda cfg: cfg.label)
def test_a_hybrid_store_is_attached_and_detached_again_and_again(cfg: Any, case: OverTpuSync) -> None:
    case.cfg = cfg
    directory = case._make_storage_dir()
    tokens, stored = case.produce(directory)
    cache, _, _ = case._l3_consumer(directory)
    controller = cache.cache_controller
    before = None
    for cycle in range(12):
        controller.detach_storage_backend()
        assert not controller.enable_storage
        now = (len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task")))
        if cycle == 2:
            before = now  # what is made once is there
        assert before is None or all(have <= had for have, had in zip(now, before, strict=True)), (
            f"{before}, then {now}"
        )
        controller.attach_storage_backend(
            "tpusync",
            prefetch_threshold=1,
            storage_backend_extra_config={"path": directory, "fingerprint": "kit", "capacity": "100MB", "floor": 0},
            host_pools=controller.mem_pool_host.entries,
        )
    controller.prefetch_capacity_limit = controller.mem_pool_host.size
    case.store = controller.storage_backend
    case._consume_prefetch(cache, tokens, CacheRequestHandle("r", 0))
    restored = case.pages_of(cache, tokens)
    assert {name for name, _ in restored} > {"kv"}
    assert all(stored[page] == content for page, content in restored.items())


def is_of_side_pool(region: ClosedRegion) -> bool:
    return "pool" in json.loads(region.table.with_name("namespace.json").read_text())


WINDOWS = [cfg for cfg in HYBRIDS if cfg.has_swa]


@pytest.mark.parametrize("cfg", [cfg for cfg in KINDS if not cfg.has_mamba], ids=lambda cfg: cfg.label)
def test_a_prefix_beside_one_that_the_device_has_is_spliced(cfg: Any, case: OverTpuSync) -> None:
    """SGLang's own scenario for a host pool that is a buffer only: KV back on the device, no host slot leaked."""
    case.cfg = cfg
    case._assert_sibling_head_is_trimmed(case._make_storage_dir(), case._buffer_swa_seq(), window_sized=False)


@pytest.mark.parametrize("cfg", WINDOWS, ids=lambda cfg: cfg.label)
def test_a_window_alone_is_restored_where_the_device_has_the_rest(cfg: Any, case: OverTpuSync) -> None:
    case.cfg = cfg
    directory, tokens = case._make_storage_dir(), case._buffer_swa_seq()
    case._produce_buffer_l3(directory, tokens)
    case._assert_masked_full_is_reused(directory, tokens, live_tail=0)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("cfg", WINDOWS, ids=lambda cfg: cfg.label)
def test_a_window_that_another_rank_lacks_is_dropped_by_all(cfg: Any, lost: bool, case: OverTpuSync) -> None:
    case.cfg = cfg
    setup = case._setup_swa_tp_prefetch()
    assert setup is not None
    directory, tokens = setup
    cache, _, _ = case._l3_consumer(directory)
    case._patch_tp_prefetch_sync(cache, drop_swa=lost)
    case._consume_prefetch(cache, tokens, CacheRequestHandle("r", 0))
    assert case._swa_host_on_path(cache, tokens) != lost
