"""SGLang's own radix tree and controller over our host pool and store, without a model."""

from __future__ import annotations

import json
import time
import unittest
from array import array
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, EvictParams
from sglang.srt.runtime_context import get_parallel
from sglang.test.kits.unified_radix_cache import mixins
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix, write_backup
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

from sglang_tpusync import runtime
from sglang_tpusync.errors import UnsupportedError
from sglang_tpusync.hicache import TpuSyncStorage
from sglang_tpusync.hicache.host_pools import NativeMHAHostPool
from sglang_tpusync.hicache.streams import Event, Stream

PAGE = 16


class Tree(UnifiedRadixCacheStorageFixtures, unittest.TestCase):
    """One tree with HiCache and a store in `path`."""

    __test__ = False
    cfg = CacheConfig(page_size=PAGE, kv_size=512)

    def open(self, path: Path, backend: str = "tpusync", **extra: Any) -> None:
        options = {"path": str(path), "fingerprint": "a model", "capacity": "200MB", "floor": 0, **extra}
        if backend == "dynamic":
            options.update(
                backend_name="tpusync",
                module_path="sglang_tpusync.hicache",
                class_name="TpuSyncStorage",
                interface_v1=1,
            )
        parallel = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1)
        parallel.__enter__()
        self.addCleanup(parallel.__exit__, None, None, None)
        self.cache, self.allocator, self.requests = build_fixture(self.cfg)
        self._attach(backend, options)

    def _attach(self, backend: str, options: dict[str, Any]) -> None:
        """The kit's own fixture, with our options: it passes extra options for the backend `file` only."""
        real = mixins.ServerArgs
        extra = json.dumps({"prefetch_threshold": 1, **options})
        with mock.patch.object(
            mixins, "ServerArgs", lambda **given: real(**{**given, "hicache_storage_backend_extra_config": extra})
        ):
            self._init_hicache(self.cache, storage_backend=backend)

    @property
    def controller(self) -> Any:
        return self.cache.cache_controller

    @property
    def storage(self) -> TpuSyncStorage:
        return self.controller.storage_backend

    def fill(self, tokens: list[int], marker: float) -> tuple[torch.Tensor, torch.Tensor]:
        self._insert(self.cache, self.allocator, self.requests, tokens)
        slots = self.slots(tokens)
        self._fill_full_kv(self.allocator, slots, marker)
        return self._snapshot_full_kv(self.allocator, slots)

    def slots(self, tokens: list[int]) -> torch.Tensor:
        return self.cache.path_device_indices(match_prefix(self.cache, tokens).last_device_node)

    def back_up(self, tokens: list[int]) -> None:
        write_backup(self.cache, match_prefix(self.cache, tokens).last_device_node)
        self.cache.flush_pending_backups()

    def tick_until(self, condition: Any, seconds: float = 20) -> int:
        """Runs the scheduler's round of events until `condition`; answers how many rounds that took."""
        ticks, end = 0, time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "never came true"
            self.cache.check_hicache_events()
            ticks += 1
        return ticks

    def close(self) -> None:
        self.controller.detach_storage_backend()
        self.doCleanups()


@pytest.fixture
def trees() -> Any:
    opened: list[Tree] = []

    def make() -> Tree:
        opened.append(Tree())
        return opened[-1]

    yield make
    for tree in opened:
        tree.doCleanups()


def store_a_prefix(tree: Tree, tokens: list[int], marker: float) -> tuple[torch.Tensor, torch.Tensor]:
    expected = tree.fill(tokens, marker)
    tree.back_up(tokens)
    tree.tick_until(lambda: not tree.controller.has_inflight_device_transfers() and not tree.cache.ongoing_backup)
    return expected


def fetch_a_prefix(tree: Tree, tokens: list[int], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """From the store into the host pool, and from there back to the device."""
    request = CacheRequestHandle(name, 0)
    tree.cache.prefetch_from_storage(request, tree.cache.root_node_handle(), array("q", tokens), None, None)
    tree._run_prefetch_to_completion(tree.cache, request)
    match = match_prefix(tree.cache, tokens)
    assert match.host_hit_length == len(tokens)
    tree._load_back_through_admission(tree.cache, tree.requests, tokens)
    tree.cache.ready_to_load_host_cache()
    tree.tick_until(lambda: not tree.controller.has_inflight_device_transfers())
    return tree._snapshot_full_kv(tree.allocator, tree.slots(tokens))


@pytest.mark.parametrize("backend", ["tpusync", "dynamic"])
def test_a_prefix_survives_the_tree(trees: Any, tmp_path: Path, backend: str) -> None:
    first = trees()
    first.open(tmp_path / "store", backend)
    assert isinstance(first.controller.mem_pool_host.anchor_entry.host_pool, NativeMHAHostPool)
    assert first.controller.page_set_func == first.controller._page_set_zero_copy
    assert first.cache.hicache_storage_pass_prefix_keys
    tokens = first._make_seq(1, 6)
    keys, values = store_a_prefix(first, tokens, 3.0)
    assert first.storage.stats()["pages_stored"] == 6
    first.close()

    second = trees()
    second.open(tmp_path / "store", backend)
    found_keys, found_values = fetch_a_prefix(second, tokens, "second")
    assert torch.equal(keys, found_keys)
    assert torch.equal(values, found_values)
    assert second.storage.stats()["pages_read"] == 6
    assert runtime.copies.num_redone == 0


def test_a_prefix_survives_the_tree_in_dram(trees: Any, tmp_path: Path) -> None:
    tree = trees()
    tree.open(
        tmp_path / "store",
        host_pool="shared",
        host_pool_path=str(tmp_path / "dram"),
        host_pool_reserve=0,
        spill="never",
    )
    pool = tree.controller.mem_pool_host.anchor_entry.host_pool
    assert pool.region is not None
    assert tree.storage._stack is not None, "the pool worked out another namespace than the store"
    tokens = tree._make_seq(1, 6)
    expected = store_a_prefix(tree, tokens, 3.0)
    assert tree.storage.stats()["pages_stored"] == 6
    tree.cache.reset()
    found = fetch_a_prefix(tree, tokens, "again")
    assert torch.equal(expected[0], found[0])
    assert torch.equal(expected[1], found[1])
    stats = tree.storage.stats()
    assert stats["tier_get_own_pages_total"] == 6
    assert stats["faults"] == 0


def test_the_scheduler_ticks_while_a_copy_is_late(trees: Any, tmp_path: Path) -> None:
    """A backup that lasts: other prefixes come and go meanwhile, and its pages reach the store afterwards."""
    tree = trees()
    tree.open(tmp_path / "store")
    engine = tree.controller.l2_transfer_engine
    assert isinstance(engine.device_to_host_stream, Stream)
    tokens, other = tree._make_seq(1, 4), tree._make_seq(5000, 3)
    expected = tree.fill(tokens, 5.0)
    engine.device_to_host_stream.native.pause(3600)
    tree.back_up(tokens)
    begin = time.monotonic()
    for _ in range(200):
        tree.cache.check_hicache_events()
        assert tree.controller.has_inflight_device_transfers()
    tree.fill(other, 7.0)
    assert match_prefix(tree.cache, other).device_prefix_len == len(other)
    assert time.monotonic() - begin < 60, "the scheduler waited for the copy"
    assert tree.storage.stats()["pages_stored"] == 0, "a page was offered before its copy was done"
    engine.device_to_host_stream.native.pause(0)
    tree.tick_until(lambda: tree.storage.stats()["pages_stored"] == 4)
    tree.close()

    reader = trees()
    reader.open(tmp_path / "store")
    found = fetch_a_prefix(reader, tokens, "reader")
    assert torch.equal(expected[0], found[0])
    assert torch.equal(expected[1], found[1])


def test_the_forward_of_a_layer_waits_for_that_layer_only(trees: Any, tmp_path: Path) -> None:
    tree = trees()
    tree.open(tmp_path / "store")
    tokens = tree._make_seq(1, 4)
    tree.fill(tokens, 2.0)
    tree.back_up(tokens)
    tree.tick_until(lambda: not tree.controller.has_inflight_device_transfers())
    tree.cache.evict(EvictParams(num_tokens=len(tokens)))
    assert match_prefix(tree.cache, tokens).host_hit_length == len(tokens)
    stream = tree.controller.l2_transfer_engine.host_to_device_stream
    stream.native.pause(0.3)
    tree._load_back_through_admission(tree.cache, tree.requests, tokens)
    producer = tree.cache.ready_to_load_host_cache()
    counter = tree.controller.layer_done_counter
    events = counter.events[producer].load_events
    assert all(isinstance(event, Event) for event in events)
    assert not events[0].query()
    counter.set_consumer(producer)
    pool = tree._get_full_kv_pool(tree.allocator)
    begin = time.monotonic()
    keys = pool.get_key_buffer(0)  # what an attention backend does
    assert time.monotonic() - begin > 0.1, "the layer was read before it had arrived"
    assert (keys[tree.slots(tokens)] == 2.0).all()
    counter.set_consumer(-1)
    tree.tick_until(lambda: not tree.controller.has_inflight_device_transfers())


def test_changed_weights_stop_the_store_both_ways(trees: Any, tmp_path: Path) -> None:
    tree = trees()
    tree.open(tmp_path / "store")
    tokens = tree._make_seq(1, 4)
    store_a_prefix(tree, tokens, 4.0)
    runtime.weights.change("a test")
    more = tree._make_seq(9000, 2)
    tree.fill(more, 6.0)
    tree.back_up(more)
    tree.tick_until(lambda: not tree.controller.has_inflight_device_transfers() and not tree.cache.ongoing_backup)
    stats = tree.storage.stats()
    assert stats["pages_stored"] == 4
    assert stats["pages_refused"] == 2
    request = CacheRequestHandle("late", 0)
    tree.cache.reset()
    tree.cache.prefetch_from_storage(request, tree.cache.root_node_handle(), array("q", tokens), None, None)
    tree._run_prefetch_to_completion(tree.cache, request)
    assert match_prefix(tree.cache, tokens).host_hit_length == 0


def test_a_model_with_an_unknown_pool_is_refused_before_anything_is_attached(trees: Any, tmp_path: Path) -> None:
    tree = trees()
    tree.open(tmp_path / "store")
    tree.controller.detach_storage_backend()
    entry = mock.Mock()
    entry.name = "mamba"
    with (
        mock.patch.object(tree.controller.mem_pool_host, "entries", [*tree.controller.mem_pool_host.entries, entry]),
        pytest.raises(UnsupportedError, match="'mamba'"),
    ):
        tree.controller.attach_storage_backend(
            "tpusync", storage_backend_extra_config={"path": str(tmp_path / "store")}
        )
    assert not tree.controller.enable_storage
