"""Host pools in DRAM regions: SGLang's allocator semantics, pages that outlive slots, pools and processes, and the
same bytes from every tier.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from test_host_pools import LAYOUTS, mha_pair, mla_pair, round_trip
from test_storage import keys, storage_config

from sglang_tpusync import runtime
from sglang_tpusync.config import Options, read_options
from sglang_tpusync.errors import ConfigError, StorageError, UnsupportedError
from sglang_tpusync.hicache import TpuSyncStorage, shared_pool
from sglang_tpusync.hicache.identity import Shard

PAGE = 16


class Node:
    """A directory of regions and a store, as the processes of one node share them."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self._patch = monkeypatch
        self._storages: list[TpuSyncStorage] = []
        monkeypatch.setattr(shared_pool, "shard_of_process", shard)

    def options(self, **extra: Any) -> dict[str, Any]:
        return {
            "path": str(self.root / "store"), "host_pool_path": str(self.root / "dram"), "host_pool": "shared",
            "fingerprint": "m", "capacity": "100MB", "floor": 0, "host_pool_reserve": 0, **extra,
        }  # fmt: skip

    def pool(self, layout: str = "page_first", mla: bool = False, **extra: Any) -> Any:
        options = read_options(self.options(**extra))
        self._patch.setattr(shared_pool.SharedHostPool, "_wanted", lambda pool: options)
        if mla:
            return mla_pair(layout, torch.bfloat16, 24, 8, PAGE, 3)[1]
        return mha_pair(layout, torch.bfloat16, 3, 24, PAGE, 3)[1]

    def storage(self, pool: Any, mla: bool = False, **extra: Any) -> TpuSyncStorage:
        config: HiCacheStorageConfig = storage_config(self.root / "store", **self.options(**extra))
        config.is_mla_model = mla
        storage = TpuSyncStorage(config, {})
        self._storages.append(storage)
        storage.register_mem_pool_host(pool)
        storage.register_mem_host_pool_v2(pool, PoolName.KV)
        return storage

    def close(self) -> None:
        for storage in self._storages:
            storage.close()


def shard(mla: bool) -> Shard:
    return Shard(is_mla_model=mla, tp_rank=0, tp_size=1, attn_cp_rank=0, attn_cp_size=1, dcp_rank=0, dcp_size=1)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node(tmp_path, monkeypatch)
    yield made
    made.close()


def written(pool: Any, num_pages: int, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Slots of `num_pages` new pages with random bytes, and the bytes."""
    indices = pool.alloc(num_pages * PAGE)
    assert indices is not None
    generator = torch.Generator().manual_seed(seed)
    values = []
    for page in indices[::PAGE].tolist():
        like = pool.get_data_page(page)
        value = torch.randint(0, 256, (like.numel() * like.element_size(),), dtype=torch.uint8, generator=generator)
        pool.set_from_flat_data_page(page, value.view(like.dtype))
        values.append(flat(pool, page))
        assert torch.equal(values[-1], value)
    return indices, values


def flat(pool: Any, slot: int) -> torch.Tensor:
    return pool.get_data_page(slot).contiguous().view(torch.uint8).flatten().clone()


def read_back(storage: TpuSyncStorage, pool: Any, names: list[str]) -> list[torch.Tensor] | None:
    """The pages through new slots, which are freed again; None if one was missed."""
    indices = pool.alloc(len(names) * PAGE)
    assert indices is not None
    read = storage.batch_get_v1(names, indices)
    found = [flat(pool, slot) for slot in indices[::PAGE].tolist()]
    pool.free(indices)
    return found if all(read) else None


def equal(left: list[torch.Tensor] | None, right: list[torch.Tensor]) -> bool:
    return left is not None and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# The allocator


def test_slots_go_out_whole_and_once(node: Node) -> None:
    pool = node.pool()
    assert pool.available_size() == pool.size
    assert pool.alloc(pool.size + PAGE) is None
    randomness, held = random.Random(5), []
    for _ in range(400):
        if held and randomness.random() < 0.5:
            pool.free(held.pop(randomness.randrange(len(held))))
        else:
            want = randomness.randrange(0, 4) * PAGE
            free = pool.available_size()
            indices = pool.alloc(want)
            assert (indices is None) == (want > free)
            if indices is not None:
                assert len(indices) == want
                assert indices.dtype == torch.int64
                grid = indices.view(-1, PAGE)
                assert (grid % PAGE == torch.arange(PAGE)).all()
                held.append(indices)
        every = torch.cat([torch.empty(0, dtype=torch.int64), *held])
        assert len(every.unique()) == len(every)
        assert pool.available_size() == pool.size - len(every)
    pool.clear()
    assert pool.available_size() == pool.size
    assert len(pool.alloc(pool.size).unique()) == pool.size


def test_a_slot_is_not_freed_twice_and_a_page_only_when_all_its_tokens_are(node: Node) -> None:
    pool = node.pool()
    indices = pool.alloc(2 * PAGE)
    assert pool.free(indices[: PAGE + 3]) == PAGE + 3
    assert pool.available_size() == pool.size - PAGE
    with pytest.raises(AssertionError, match="Double-free"):
        pool.free(indices[:1])
    pool.free(indices[PAGE + 3 :])
    assert pool.available_size() == pool.size
    assert pool.free(indices[:0]) == 0
    with pytest.raises(AssertionError, match="multiple of the page size"):
        pool.alloc(PAGE + 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_to_and_from_the_device_are_those_of_a_private_pool(layout: str, node: Node) -> None:
    options = read_options(node.options())
    node._patch.setattr(shared_pool.SharedHostPool, "_wanted", lambda pool: options)
    device, host = mha_pair(layout, torch.bfloat16, 3, 24, PAGE, 3)
    assert host.region is not None
    round_trip(device, host, 3, 4)


# Tiers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_is_read_from_dram_after_its_slot_was_freed(layout: str, node: Node) -> None:
    pool = node.pool(layout, spill="never")
    storage = node.storage(pool, spill="never")
    indices, values = written(pool, 3, 1)
    assert storage.batch_set_v1(keys(3), indices) == [True] * 3
    pool.free(indices)
    assert storage.batch_exists([*keys(3), *keys(1, "x")]) == 3
    assert equal(read_back(storage, pool, keys(3)), values)
    stats = storage.stats()
    assert stats["tier_get_own_pages_total"] == 3
    assert stats["pages_refused"] == stats["pages_missed"] == 0


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pages_of_mla_are_read_from_dram(layout: str, node: Node) -> None:
    pool = node.pool(layout, mla=True, spill="never")
    storage = node.storage(pool, mla=True, spill="never")
    indices, values = written(pool, 3, 2)
    storage.batch_set_v1(keys(3), indices)
    pool.free(indices)
    assert equal(read_back(storage, pool, keys(3)), values)


def test_what_is_evicted_from_dram_comes_from_disk(node: Node) -> None:
    pool = node.pool()
    storage = node.storage(pool)
    pages, values = pool.page_num, {}
    for batch in range(4):
        indices, found = written(pool, pages // 2, batch)
        names = keys(pages // 2, str(batch))
        storage.batch_set_v1(names, indices)
        assert storage._stack.flush(30)
        pool.free(indices)
        values.update(dict(zip(names, found, strict=True)))
    for batch in range(4):
        names = keys(pages // 2, str(batch))
        assert storage.batch_exists(names) == len(names)
        assert equal(read_back(storage, pool, names), [values[name] for name in names])
    stats = storage.stats()
    assert stats["tier_get_flash_pages_total"] > 0
    assert stats["pages_missed"] == 0


def test_flat_pages_come_from_dram_too(node: Node) -> None:
    pool = node.pool("layer_first", spill="never")
    storage = node.storage(pool, spill="never")
    indices, values = written(pool, 1, 3)
    storage.batch_set_v1(keys(1), indices)
    target = torch.zeros(pool.get_size_per_token() * PAGE // 2, dtype=torch.bfloat16)
    assert storage.get(keys(1)[0], target) is target
    assert torch.equal(target.view(torch.uint8), values[0])
    assert storage.set(keys(1, "flat")[0], target)
    assert storage.exists(keys(1, "flat")[0])
    assert equal(read_back(storage, pool, keys(1, "flat")), values)


def test_the_next_process_of_a_rank_adopts_the_pages(node: Node) -> None:
    pool = node.pool(spill="never")
    storage = node.storage(pool, spill="never")
    path = pool.region.path
    indices, values = written(pool, 4, 4)
    storage.batch_set_v1(keys(4), indices)
    storage.close()
    del pool, storage
    node._storages.clear()
    gc.collect()
    pool = node.pool(spill="never")
    assert pool.region.path == path
    assert pool.available_size() == pool.size
    storage = node.storage(pool, spill="never")
    assert storage.batch_exists(keys(4)) == 4
    assert equal(read_back(storage, pool, keys(4)), values)
    assert storage.stats()["tier_get_own_pages_total"] == 4


def test_two_processes_read_each_other(node: Node) -> None:
    first, second = node.pool(spill="never"), node.pool(spill="never")
    assert first.region.path != second.region.path
    writer, reader = node.storage(first, spill="never"), node.storage(second, spill="never")
    indices, values = written(first, 3, 5)
    writer.batch_set_v1(keys(3), indices)
    for _ in range(2):  # from the peer, then from where they landed
        assert reader.batch_exists(keys(3)) == 3
        assert equal(read_back(reader, second, keys(3)), values)
    stats = reader.stats()
    assert (stats["tier_get_peer_pages_total"], stats["tier_get_own_pages_total"]) == (3, 3)


KILLED = """
import json, os, signal, sys
sys.path[:0] = json.loads(sys.argv[2])
import conftest, pytest, torch
from pathlib import Path
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
from test_shared_pool import Node, keys, written
node = Node(Path(sys.argv[1]), pytest.MonkeyPatch())
pool = node.pool(spill="never")
storage = node.storage(pool, spill="never")
indices, values = written(pool, 5, 77)
storage.batch_set_v1(keys(5), indices)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_pages_of_a_killed_process_are_there(node: Node) -> None:
    here = [str(Path(__file__).parent), *sys.path]
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(node.root), json.dumps(here)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == -9, done.stderr[-3000:]
    pool = node.pool(spill="never")
    storage = node.storage(pool, spill="never")
    assert storage.stats()["host_pages_adopted_total"] == 5
    assert storage.batch_exists(keys(5)) == 5
    _, values = written(node.pool(fingerprint="other"), 5, 77)
    assert equal(read_back(storage, pool, keys(5)), values)


def test_a_damaged_page_of_another_process_is_a_miss(node: Node) -> None:
    first, second = node.pool(spill="never"), node.pool(spill="never")
    writer, reader = node.storage(first, spill="never"), node.storage(second, spill="never")
    indices, values = written(first, 2, 6)
    writer.batch_set_v1(keys(2), indices)
    slot = int(indices[PAGE])
    damaged = flat(first, slot)
    damaged[5] ^= 1
    first.set_from_flat_data_page(slot, damaged.view(first.dtype))
    found = second.alloc(2 * PAGE)
    assert reader.batch_get_v1(keys(2), found) == [True, False]
    assert torch.equal(flat(second, int(found[0])), values[0])
    assert reader.stats()["tier_get_corrupt_pages_total"] == 1


def test_every_namespace_has_its_own(node: Node) -> None:
    pool = node.pool(spill="never")
    storage = node.storage(pool, spill="never")
    indices, _ = written(pool, 2, 7)
    storage.batch_set_v1(keys(2), indices)
    other = node.storage(node.pool(spill="never", fingerprint="other"), spill="never", fingerprint="other")
    assert other.batch_exists(keys(2)) == 0


def test_a_store_of_another_namespace_copies(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """A store attached later with a fingerprint of its own must not find, nor leave, pages in the pool's region."""
    pool = node.pool()
    storage = node.storage(pool, fingerprint="other")
    assert "its DRAM is not shared" in caplog.text
    indices, values = written(pool, 2, 8)
    storage.batch_set_v1(keys(2), indices)
    pool.free(indices)
    assert equal(read_back(storage, pool, keys(2)), values)
    assert pool.region.stats()["host_seals_total"] == 0
    storage.close()
    assert node.storage(pool).batch_exists(keys(2)) == 0


def test_changed_weights_seal_nothing_and_find_nothing(node: Node) -> None:
    pool = node.pool()
    storage = node.storage(pool)
    indices, _ = written(pool, 2, 9)
    storage.batch_set_v1(keys(1), indices[:PAGE])
    runtime.weights.change("a test")
    storage.batch_set_v1(keys(1, "new"), indices[PAGE:])
    assert storage.batch_exists(keys(1)) == storage.batch_exists(keys(1, "new")) == 0
    assert storage.stats()["pages_refused"] == 1


def test_clear_drops_the_pages_of_every_tier(node: Node) -> None:
    pool = node.pool()
    storage = node.storage(pool)
    indices, _ = written(pool, 2, 10)
    storage.batch_set_v1(keys(2), indices)
    assert storage._stack.flush(30)
    storage.clear()
    assert storage.batch_exists(keys(2)) == 0


def test_slots_that_are_not_in_use_are_refused(node: Node) -> None:
    pool = node.pool()
    storage = node.storage(pool)
    indices, _ = written(pool, 1, 11)
    pool.free(indices)
    assert storage.batch_set_v1(keys(1), indices) == [True]
    assert storage.stats()["pages_refused"] == 1
    assert storage.batch_exists(keys(1)) == 0


# What is refused


def test_no_room_is_an_error_with_the_arithmetic(node: Node) -> None:
    with pytest.raises(StorageError, match="no room for a DRAM region"):
        node.pool(host_pool_capacity="4KiB")


def test_a_directory_that_others_may_read_is_an_error(node: Node) -> None:
    (node.root / "dram").mkdir(mode=0o755)
    (node.root / "dram").chmod(0o755)
    with pytest.raises((ConfigError, StorageError), match="dram"):
        node.pool()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "page_unified"}, "'page_unified'"),
        ({"v_head_dim": 3}, "different sizes"),
    ],
)
def test_a_pool_whose_bytes_a_region_cannot_hold_is_refused(change: dict[str, Any], message: str) -> None:
    pool = SimpleNamespace(**{"layout": "page_first", "head_dim": 4, "v_head_dim": 4, **change})
    with pytest.raises(UnsupportedError, match=message):
        shared_pool.SharedHostPool._check_fits(pool)


def test_a_pool_is_private_unless_asked(tmp_path: Path) -> None:
    pool = mha_pair("page_first", torch.bfloat16, 3, 24, PAGE, 3)[1]
    assert pool.region is None
    assert Options().host_pool == "private"
    assert len(pool.alloc(PAGE)) == PAGE
