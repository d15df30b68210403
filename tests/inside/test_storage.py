"""The storage backend on a real store and real host pools: every interface, every refusal, no exception."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
)
from test_host_pools import LAYOUTS, fill, mha_pair, mla_pair

from sglang_tpusync import runtime
from sglang_tpusync.config import Options
from sglang_tpusync.errors import ConfigError, StorageError, UnsupportedError
from sglang_tpusync.hicache import TpuSyncStorage
from sglang_tpusync.hicache.pages import PageAddresses, key_bytes
from sglang_tpusync.observe import read_statuses
from sglang_tpusync.store import read_store

PAGE = 16


def keys(number: int, seed: str = "") -> list[str]:
    return [hashlib.sha256(f"{seed}{i}".encode()).hexdigest() for i in range(number)]


def slots(*pages: int) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()


def storage_config(path: Path, /, **extra: Any) -> HiCacheStorageConfig:
    options = {"path": str(path), "fingerprint": "m", "capacity": "100MB", "floor": 0, **extra}
    return HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=True, model_name="m", extra_config=options,
    )  # fmt: skip


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    made: list[TpuSyncStorage] = []

    def make(pool: Any, mla: bool = False, **extra: Any) -> TpuSyncStorage:
        config = storage_config(tmp_path / "store", **extra)
        config.is_mla_model = mla
        made.append(TpuSyncStorage(config, {}))
        made[-1].register_mem_pool_host(pool)
        made[-1].register_mem_host_pool_v2(pool, PoolName.KV)
        made[-1].on_host_pools_registered()
        return made[-1]

    yield make
    for storage in made:
        storage.close()


def make_pool(layout: str = "page_first") -> Any:
    _, pool = mha_pair(layout, torch.bfloat16, 3, 24, PAGE, 3)
    fill([pool.kv_buffer.view(torch.uint8)], 5)
    return pool


def flat(pool: Any, page: int) -> torch.Tensor:
    return pool.get_data_page(page * PAGE).contiguous().view(torch.uint8).clone()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_as_they_were_into_other_slots(layout: str, opened: Any) -> None:
    pool = make_pool(layout)
    storage = opened(pool)
    wanted = [flat(pool, page) for page in (3, 0, 7)]
    names = keys(3)
    assert storage.batch_exists(names) == 0
    assert storage.batch_set_v1(names, slots(3, 0, 7)) == [True] * 3
    assert storage.batch_exists([*names, *keys(1, "x")]) == 3
    pool.kv_buffer.view(torch.uint8).zero_()
    assert storage.batch_get_v1(names, slots(1, 9, 4)) == [True] * 3
    for page, bytes_wanted in zip((1, 9, 4), wanted, strict=True):
        assert torch.equal(flat(pool, page), bytes_wanted)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pages_of_mla_come_back(layout: str, opened: Any) -> None:
    _, pool = mla_pair(layout, torch.bfloat16, 24, 8, PAGE, 3)
    fill([pool.kv_buffer.view(torch.uint8)], 6)
    storage = opened(pool, mla=True)
    wanted = pool.kv_buffer.clone()
    every = slots(*range(pool.page_num))
    names = keys(pool.page_num)
    storage.batch_set_v1(names, every)
    pool.kv_buffer.view(torch.uint8).zero_()
    assert all(storage.batch_get_v1(names, every))
    assert torch.equal(pool.kv_buffer.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flat_pages_and_slots_hold_the_same_bytes(layout: str, opened: Any) -> None:
    """A page that was written through one interface may be read through the other."""
    pool = make_pool(layout)
    storage = opened(pool)
    storage.batch_set_v1(keys(1), slots(2))
    target = torch.zeros(pool.get_size_per_token() * PAGE // 2, dtype=torch.bfloat16)
    assert storage.get(keys(1)[0], target) is target
    assert torch.equal(target.view(torch.uint8), flat(pool, 2))
    assert storage.set(keys(1, "flat")[0], target)
    assert storage.exists(keys(1, "flat")[0])
    assert storage.batch_get_v1(keys(1, "flat"), slots(6)) == [True]
    assert torch.equal(flat(pool, 6), flat(pool, 2))
    assert storage.get(keys(1, "none")[0], target) is None


def test_the_first_page_that_is_missing_ends_a_read(opened: Any) -> None:
    pool = make_pool()
    storage = opened(pool)
    names = keys(4)
    storage.batch_set_v1([names[0], names[1], names[3]], slots(0, 1, 3))
    assert storage.batch_exists(names) == 2
    assert storage.batch_get_v1(names, slots(4, 5, 6, 7)) == [True, True, False, False]
    assert storage.stats()["pages_missed"] == 2


def test_another_namespace_of_the_same_directory_misses(opened: Any) -> None:
    pool = make_pool()
    first = opened(pool)
    first.batch_set_v1(keys(2), slots(0, 1))
    other = opened(pool, fingerprint="another")
    assert other.batch_exists(keys(2)) == 0
    first.close()
    assert opened(pool).batch_exists(keys(2)) == 2


def test_prefix_keys_are_handed_on(opened: Any) -> None:
    pool = make_pool()
    storage = opened(pool)
    names = keys(4)
    storage.batch_set_v1(names[:2], slots(0, 1), HiCacheStorageExtraInfo(prefix_keys=[]))
    storage.batch_set_v1(names[2:], slots(2, 3), HiCacheStorageExtraInfo(prefix_keys=names[:2]))
    assert storage.batch_exists(names[2:], HiCacheStorageExtraInfo(prefix_keys=names[:2])) == 2


def test_v2_is_v1_for_the_only_pool(opened: Any) -> None:
    pool = make_pool()
    storage = opened(pool)
    transfer = PoolTransfer(name=PoolName.KV, host_indices=slots(0, 1), keys=keys(2))
    assert storage.batch_set_v2([transfer]) == {"kv": [True, True]}
    assert storage.batch_exists_v2(keys(2)).kv_hit_pages == 2
    assert storage.batch_get_v2([transfer]) == {"kv": [True, True]}
    side = PoolTransfer(name=PoolName.INDEXER, host_indices=slots(0), keys=keys(1))
    assert storage.batch_exists_v2(keys(2), [side]).kv_hit_pages == 0
    assert storage.batch_get_v2([side]) == {"indexer": [False]}


@pytest.mark.parametrize(
    "bad",
    [
        lambda s: (keys(2), slots(0)),  # too few slots
        lambda s: (keys(1), slots(0) + 1),  # not aligned
        lambda s: (keys(1), slots(0).flip(0)),  # not in order
        lambda s: (keys(1), slots(10**6)),  # outside the pool
        lambda s: (keys(1), slots(-1)),
        lambda s: (["short"], slots(0)),
        lambda s: (["g" * 64], slots(0)),
        lambda s: ([7], slots(0)),
        lambda s: (keys(1), None),
    ],
)
def test_nonsense_is_a_miss_and_a_refusal_and_never_an_exception(bad: Any, opened: Any) -> None:
    pool = make_pool()
    storage = opened(pool)
    before = pool.kv_buffer.clone()
    names, indices = bad(storage)
    assert storage.batch_get_v1(names, indices) == [False] * len(names)
    assert storage.batch_set_v1(names, indices) == [True] * len(names)
    assert storage.stats()["faults"] == 2
    assert torch.equal(pool.kv_buffer.view(torch.uint8), before.view(torch.uint8))


def test_a_store_that_raises_is_a_miss_and_a_refusal(opened: Any) -> None:
    pool = make_pool()
    storage = opened(pool)
    real = storage._store

    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("broken")

    storage._store = Broken()
    assert storage.batch_exists(keys(1)) == 0
    assert storage.batch_get_v1(keys(1), slots(0)) == [False]
    assert storage.batch_set_v1(keys(1), slots(0)) == [True]
    assert storage.get(keys(1)[0], torch.zeros(1)) is None
    assert storage.set(keys(1)[0], torch.zeros(1))
    storage.clear()
    assert storage.traffic.counters()["faults"] == 6
    storage._store = real


def test_refused_writes_answer_true_and_are_counted(opened: Any) -> None:
    pool = make_pool()
    storage = opened(pool, write_budget_per_day=1)
    assert storage.batch_set_v1(keys(2), slots(0, 1)) == [True, True]
    assert storage.stats()["pages_refused"] == 2
    assert storage.batch_exists(keys(2)) == 0


def test_weights_that_change_during_a_read_make_it_a_miss(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    storage = opened(pool)
    storage.batch_set_v1(keys(1), slots(0))
    wait = storage._wait

    def change_and_wait(*arguments: Any) -> None:
        wait(*arguments)
        runtime.weights.change("a test")

    monkeypatch.setattr(storage, "_wait", change_and_wait)
    assert storage.batch_get_v1(keys(1), slots(1)) == [False]
    assert storage.batch_exists(keys(1)) == 0


def renewed(storage: TpuSyncStorage) -> TpuSyncStorage:
    for _ in range(500):
        if not storage._refuses():
            return storage
        time.sleep(0.02)
    raise AssertionError("no store was opened for the new weights")


def test_pages_of_other_weights_are_apart(opened: Any, tmp_path: Path) -> None:
    pool = make_pool()
    storage = opened(pool)
    base = storage.namespace
    storage.batch_set_v1(keys(1), slots(0))
    for number in range(2):
        runtime.weights.change("a test")
        assert storage.batch_exists(keys(1)) == 0
        storage.batch_set_v1(keys(1, "lost"), slots(1))
        runtime.weights.flushed()
        renewed(storage)
        assert storage.namespace.digest != base.digest
        assert storage.batch_exists(keys(1)) == storage.batch_exists(keys(1, "lost")) == 0
        storage.batch_set_v1(keys(1, f"new {number}"), slots(2))
        assert storage.batch_exists(keys(1, f"new {number}")) == 1
        assert storage.batch_get_v1(keys(1, f"new {number}"), slots(3)) == [True]
        assert torch.equal(flat(pool, 3), flat(pool, 2))
    assert storage.batch_exists(keys(1, "new 0")) == 0
    storage.close()
    view = read_store(tmp_path / "store", Options())
    assert [namespace.digest for namespace in view.namespaces] == [base.digest], "nobody can ask for the others again"
    runtime.weights = runtime.Weights()
    assert opened(pool).batch_exists(keys(1)) == 1


def test_a_trusted_version_is_found_again(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    for number in range(2):
        runtime.weights = runtime.Weights()
        storage = opened(pool, trust_weight_version=True)
        runtime.weights.change("a test")
        runtime.weights.flushed("step 7")
        renewed(storage)
        assert storage.batch_exists(keys(1)) == number
        storage.batch_set_v1(keys(1), slots(0))
        storage.close()


def test_an_epoch_that_ends_during_a_read_makes_it_a_miss(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    storage = opened(pool)
    storage.batch_set_v1(keys(1), slots(0))
    wait = storage._wait

    def renew_and_wait(*arguments: Any) -> None:
        wait(*arguments)
        runtime.weights.change("a test")
        runtime.weights.flushed()
        renewed(storage)

    monkeypatch.setattr(storage, "_wait", renew_and_wait)
    assert storage.batch_get_v1(keys(1), slots(1)) == [False]


def test_a_late_batch_is_waited_for_until_no_byte_can_move(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of a read that is under way must not go back to SGLang, whatever the deadline says."""
    storage = opened(make_pool(), get_timeout_s=0.001)
    events: list[str] = []

    class Late:
        def wait(self, timeout_s: float) -> bool:
            events.append("wait")
            return events.count("wait") == 3

        def cancel(self) -> None:
            events.append("cancel")

        def outcomes(self) -> Any:
            return np.array([6], dtype=np.uint8)

    monkeypatch.setattr("sglang_tpusync.hicache.storage._LATE_LOG_INTERVAL_S", 0.0)
    real, storage._store = storage._store, SimpleNamespace(submit_get=lambda *a, **k: Late(), stats=dict)
    assert storage.batch_get_v1(keys(1), slots(0)) == [False]
    assert events == ["wait", "cancel", "wait", "wait"]
    storage._store = real


def test_a_pool_without_memory_is_refused(tmp_path: Path) -> None:
    storage = TpuSyncStorage(storage_config(tmp_path / "s"), {})
    with pytest.raises(UnsupportedError, match="no memory of its own"):
        storage.register_mem_pool_host(SimpleNamespace(kv_buffer=None))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"capcity": 1}, ConfigError),
        ({"path": "/proc/nowhere"}, (ConfigError, StorageError)),
        ({"num_threads": -1}, ConfigError),
    ],
)
def test_wrong_options_fail_the_attach(options: dict[str, Any], error: Any, tmp_path: Path) -> None:
    with pytest.raises(error):
        TpuSyncStorage(storage_config(tmp_path / "s", **options), {}).register_mem_pool_host(make_pool())


def test_statistics_of_batches_are_drained(opened: Any) -> None:
    pool = make_pool()
    storage = opened(pool)
    storage.batch_set_v1(keys(2), slots(0, 1))
    storage.batch_get_v1(keys(2), slots(2, 3))
    metrics = storage.get_stats()
    assert (metrics.backup_pgs, metrics.prefetch_pgs) == ([2], [2])
    assert metrics.backup_bandwidth[0] > 0
    assert storage.get_stats().backup_pgs == []


def test_the_summary_is_one_line(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    pool = make_pool()
    storage = opened(pool)
    storage.batch_set_v1(keys(2), slots(0, 1))
    storage.batch_exists(keys(3))
    with caplog.at_level("INFO", logger="sglang_tpusync"):
        storage.close()
        storage.close()
    lines = [r.getMessage() for r in caplog.records if "store of KV pages" in r.getMessage()]
    assert len(lines) == 1
    assert "queried 3, hit 2, read 0 pages" in lines[0]
    assert storage.batch_exists(keys(1)) == 0
    assert storage.batch_set_v1(keys(1), slots(0)) == [True]


def test_clear_drops_every_page(opened: Any) -> None:
    storage = opened(make_pool())
    storage.batch_set_v1(keys(2), slots(0, 1))
    storage.clear()
    assert storage.batch_exists(keys(2)) == 0


def test_addresses_that_the_pool_does_not_confirm_are_refused() -> None:
    pool = make_pool()
    real = pool.get_page_buffer_meta

    def uneven(indices: torch.Tensor) -> Any:
        addresses, lengths = real(indices)
        return ([a + 64 for a in addresses] if int(indices[0]) > 2 * PAGE else addresses), lengths

    pool.get_page_buffer_meta = uneven
    with pytest.raises(UnsupportedError, match="evenly"):
        PageAddresses(pool)


def test_keys_as_bytes() -> None:
    names = keys(3)
    assert key_bytes(names) == b"".join(bytes.fromhex(name) for name in names)
    assert key_bytes(None) == key_bytes([]) == b""


def test_every_rank_of_a_replicated_latent_writes(tmp_path: Path) -> None:
    config = storage_config(tmp_path / "s")
    config.is_mla_model, config.tp_rank, config.tp_size = True, 3, 8
    assert not config.is_storage_writer
    _, pool = mla_pair("page_first", torch.bfloat16, 24, 8, PAGE, 3)
    storage = TpuSyncStorage(config, pool)
    storage.register_mem_pool_host(pool)
    assert config.is_storage_writer, "SGLang asks this object, the one it gave us"
    assert storage.namespace is not None
    assert storage.namespace.fields["heads"] == {"latent_bytes": 64}
    storage.close()


def test_the_core_speaks_through_the_logger(
    opened: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    from sglang_tpusync.testing.tamper import flip_payload_byte

    pool = make_pool()
    storage = opened(pool)
    storage.batch_set_v1(keys(1), slots(0))
    storage.close()
    flip_payload_byte(tmp_path / "store", bytes.fromhex(keys(1)[0]), 100)
    with caplog.at_level("INFO", logger="sglang_tpusync"):
        assert opened(pool).batch_get_v1(keys(1), slots(1)) == [False]
    lines = [record for record in caplog.records if "does not hold what was written to it" in record.message]
    assert [record.levelname for record in lines] == ["WARNING"]
    assert "does not hold" not in capfd.readouterr().err


def test_what_it_counts_is_published_while_it_is_open(opened: Any, tmp_path: Path) -> None:
    pool = make_pool()
    storage = opened(pool, status_path=str(tmp_path / "status"))
    storage.batch_set_v1(keys(2), slots(0, 1))
    assert storage.batch_exists(keys(3)) == 2
    until = time.monotonic() + 30
    while not (found := read_statuses(tmp_path / "status").found) or found[0].stats["pages_hit"] != 2:
        assert time.monotonic() < until, found
        time.sleep(0.05)
    assert (found[0].namespace, found[0].store) == (storage.namespace.digest.hex(), str(tmp_path / "store"))
    assert found[0].stats["entries"] == 2
    storage.close()
    assert read_statuses(tmp_path / "status").found == []
