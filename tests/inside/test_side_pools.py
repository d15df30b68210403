"""Pools beside KV, with SGLang's own host pool classes on a real store: what every pool has is a hit, nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from test_host_pools import fill, mha_pair, mla_pair
from test_storage import PAGE, keys, renewed, slots, storage_config

from sglang_tpusync import runtime
from sglang_tpusync.config import Options
from sglang_tpusync.errors import UnsupportedError
from sglang_tpusync.hicache import TpuSyncStorage
from sglang_tpusync.hicache.pages import FlatPages, PageAddresses
from sglang_tpusync.hicache.side_pools import pages_of_side_pool, restorable_lengths
from sglang_tpusync.store import read_store
from sglang_tpusync.testing.tamper import flip_payload_byte

DSA_PAGE = 64  # SGLang has no other for the indexer


@pytest.fixture(autouse=True, scope="module")
def published() -> None:
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))


def swa_pool(layout: str = "page_first", layers: int = 2) -> Any:
    return mha_pair(layout, torch.bfloat16, 2, 16, PAGE, layers)[1]


def mamba_pool(layout: str = "page_first", extra: bool = False, heads: int = 2) -> Any:
    info = MambaStateBufferInfo(
        temporal=torch.zeros(3, 9, heads, 5, 7, dtype=torch.float32),
        conv=(torch.zeros(3, 9, 11, 3, dtype=torch.bfloat16), torch.zeros(3, 9, 6, 3, dtype=torch.bfloat16)),
        extra_checkpoint_buffers=(torch.zeros(9, 13, dtype=torch.uint8),) if extra else (),
    )
    return MambaPoolHost(info, 2.0, 0, device_capacity=8, pin_memory=False, layout=layout)


def indexer_pool(layout: str = "page_first") -> Any:
    device = DSATokenToKVPool(
        size=5 * DSA_PAGE, page_size=DSA_PAGE, kv_lora_rank=24, dtype=torch.bfloat16, qk_rope_head_dim=8, layer_num=3,
        device="cpu", index_head_dim=128, enable_memory_saver=False, kv_cache_dim=32,
    )  # fmt: skip
    _, anchor = mla_pair(layout, torch.bfloat16, 24, 8, DSA_PAGE, 3)
    return DSAIndexerPoolHost(make_dsa_indexer_pool_decl(device), anchor, pin_memory=False)


KINDS: dict[str, tuple[str, Any]] = {
    "swa": ("swa", swa_pool),
    "swa, layer first": ("swa", lambda: swa_pool("layer_first")),
    "swa, by head": ("swa", lambda: swa_pool("page_head")),
    "mamba": ("mamba", mamba_pool),
    "mamba, direct": ("mamba", lambda: mamba_pool("page_first_direct")),
    "mamba with more state": ("mamba", lambda: mamba_pool(extra=True)),
    "indexer": ("indexer", indexer_pool),
    "indexer, layer first": ("indexer", lambda: indexer_pool("layer_first")),
    "draft": ("draft", lambda: swa_pool(layers=1)),
    "draft of a latent": ("draft", lambda: mla_pair("page_first", torch.bfloat16, 24, 8, PAGE, 1)[1]),
    "draft indexer": ("draft_indexer", indexer_pool),
    "draft, window": ("draft_swa", lambda: swa_pool("page_first_direct", layers=1)),
}
FLAT = ("mamba with more state", "indexer, layer first")


def buffers(pool: Any) -> list[torch.Tensor]:
    shown = getattr(pool, "kv_buffer", None)
    shown = pool.get_hybrid_pool_buffer() if shown is None else shown
    return [part.view(torch.uint8) for part in (shown if isinstance(shown, list | tuple) else [shown])]


def side_slots(pool: Any, *pages: int) -> torch.Tensor:
    size = pool.page_size
    return (torch.tensor(pages)[:, None] * size + torch.arange(size)).flatten()


def flat(pool: Any, page: int) -> torch.Tensor:
    return pool.get_data_page(page * pool.page_size, flat=True).contiguous().view(torch.uint8).clone()


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    made: list[TpuSyncStorage] = []

    def make(sides: dict[str, Any], changes: dict[str, Any] | None = None, **extra: Any) -> TpuSyncStorage:
        _, kv = mha_pair("page_first", torch.bfloat16, 3, 24, PAGE, 3)
        fill([kv.kv_buffer.view(torch.uint8)], 5)
        config = storage_config(tmp_path / "store", **extra)
        for name, value in (changes or {}).items():
            setattr(config, name, value)
        made.append(TpuSyncStorage(config, {}))
        made[-1].register_mem_pool_host(kv)
        made[-1].register_mem_host_pool_v2(kv, PoolName.KV)
        for name, pool in sides.items():
            made[-1].register_mem_host_pool_v2(pool, PoolName(name))
        made[-1].on_host_pools_registered()
        return made[-1]

    yield make
    for storage in made:
        storage.close()


def ask(name: str, num_tail: int = 0) -> PoolTransfer:
    """What SGLang asks with a look-up: all pages, or the last `num_tail`."""
    policy = PoolHitPolicy.TRAILING_PAGES if num_tail else PoolHitPolicy.ALL_PAGES
    return PoolTransfer(name=PoolName(name), keys=["?"] * num_tail, hit_policy=policy)


def move(pool: Any, name: str, names: list[str], *pages: int) -> PoolTransfer:
    return PoolTransfer(name=PoolName(name), keys=names, host_indices=side_slots(pool, *pages))


@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_each_kind_come_back_into_other_slots_and_another_process(kind: str, opened: Any) -> None:
    name, make = KINDS[kind]
    pool = make()
    fill(buffers(pool), 7)
    storage = opened({name: pool})
    assert isinstance(storage._sides[name].pages, FlatPages if kind in FLAT else PageAddresses)
    wanted = [flat(pool, page) for page in (3, 0, 2)]
    names = keys(3)
    assert storage.batch_set_v2([move(pool, name, names, 3, 0, 2)]) == {name: [True] * 3}
    storage.batch_set_v1(names, slots(0, 1, 2))
    storage.close()

    target = make()
    again = opened({name: target})
    found = again.batch_exists_v2([*names, *keys(1, "x")], [ask(name)])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [1, 2, 3])
    assert found.extra_pool_hit_pages == {"kv": 3, name: 3}
    untouched = flat(target, 0)
    assert again.batch_get_v2([move(target, name, names, 1, 4, 3)]) == {name: [True] * 3}
    for page, expected in zip((1, 4, 3), wanted, strict=True):
        assert torch.equal(flat(target, page), expected)
    assert torch.equal(flat(target, 0), untouched)
    stats = again.stats()
    assert (stats[f"pool_{name}_pages_read"], stats["pages_read"], stats["faults"]) == (3, 0, 0)


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 5))
def test_what_a_pool_can_restore(present: list[bool], tail: int) -> None:
    mask = np.array(present, dtype=np.bool_)
    every = restorable_lengths(mask, PoolHitPolicy.ALL_PAGES, tail)
    ends = restorable_lengths(mask, PoolHitPolicy.TRAILING_PAGES, tail)
    for length in range(len(present) + 1):
        assert every[length] == all(present[:length])
        assert ends[length] == all(present[max(0, length - tail) : length])


def test_a_prefix_is_a_hit_where_every_pool_has_it(opened: Any) -> None:
    swa, mamba = swa_pool(), mamba_pool()
    storage = opened({"swa": swa, "mamba": mamba})
    names = keys(6)
    storage.batch_set_v1(names, slots(*range(6)))
    asked = [ask("swa", 2), ask("mamba", 1)]
    assert storage.batch_exists_v2(names).kv_hit_pages == 6
    found = storage.batch_exists_v2(names, asked)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
    storage.batch_set_v2([move(swa, "swa", names[1:5], 0, 1, 2, 3)])  # lengths 3, 4, 5
    assert storage.batch_exists_v2(names, asked[:1]).restorable_prefix_pages == [3, 4, 5]
    storage.batch_set_v2([move(mamba, "mamba", [names[0], names[3]], 0, 1)])  # lengths 1 and 4
    found = storage.batch_exists_v2(names, asked)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [4])
    assert found.extra_pool_hit_pages == {"kv": 6, "swa": 5, "mamba": 4}
    storage.batch_set_v2([move(mamba, "mamba", [names[2]], 2)])
    assert storage.batch_exists_v2(names, asked).restorable_prefix_pages == [3, 4]
    assert storage.batch_exists_v2(names[:3], asked).kv_hit_pages == 3
    assert storage.batch_exists_v2(names, [*asked, ask("indexer")]).kv_hit_pages == 0, "a pool that nobody registered"


def test_a_pool_that_needs_every_page_ends_the_hit_at_its_first_gap(opened: Any) -> None:
    draft = swa_pool(layers=1)
    storage = opened({"draft": draft})
    names = keys(5)
    storage.batch_set_v1(names, slots(*range(5)))
    storage.batch_set_v2([move(draft, "draft", [*names[:2], *names[3:]], 0, 1, 2, 3)])
    found = storage.batch_exists_v2(names, [ask("draft")])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [1, 2])
    assert storage.batch_get_v2([move(draft, "draft", names, *range(5))]) == {
        "draft": [True, True, False, False, False]
    }
    assert storage.stats()["pool_draft_pages_missed"] == 3


@pytest.mark.parametrize("kind", ["swa", "mamba with more state"])
def test_a_damaged_side_page_ends_the_hit_there(kind: str, opened: Any, tmp_path: Path) -> None:
    name, make = KINDS[kind]
    pool = make()
    fill(buffers(pool), 3)
    storage = opened({name: pool})
    names = keys(3)
    storage.batch_set_v2([move(pool, name, names, 0, 1, 2)])
    storage.close()  # and no page of KV: the key is in one namespace only
    flip_payload_byte(tmp_path / "store", bytes.fromhex(names[1]), 60)
    again = opened({name: pool})
    again.batch_set_v1(names, slots(0, 1, 2))
    assert again.batch_get_v2([move(pool, name, names, 3, 4, 5)]) == {name: [True, False, False]}
    assert torch.equal(flat(pool, 3), flat(pool, 0))
    assert again.batch_exists_v2(names, [ask(name)]).kv_hit_pages == 1
    assert again.batch_exists_v2(names, [ask(name, 1)]).restorable_prefix_pages == [1, 3]


def test_refused_side_pages_are_false_and_no_hit(opened: Any) -> None:
    pool = swa_pool()
    storage = opened({"swa": pool}, write_budget_per_day=1)
    assert storage.batch_set_v2([move(pool, "swa", keys(2), 0, 1)]) == {"swa": [False, False]}
    assert storage.stats()["pool_swa_pages_refused"] == 2
    assert storage.batch_exists_v2(keys(2), [ask("swa", 1)]).kv_hit_pages == 0


def test_pools_are_namespaces_of_one_directory(opened: Any, tmp_path: Path) -> None:
    """The same key is another page in each pool, of another shape, rank or state another, and clear takes them all."""
    swa, mamba = swa_pool(), mamba_pool()
    storage = opened({"swa": swa, "mamba": mamba})
    storage.batch_set_v1(keys(1), slots(0))
    storage.batch_set_v2([move(swa, "swa", keys(1), 0), move(mamba, "mamba", keys(1), 0)])
    storage.close()
    view = read_store(tmp_path / "store", Options())
    pools = [(namespace.identity or {}).get("pool", {"name": "kv"})["name"] for namespace in view.namespaces]
    assert sorted(pools) == ["kv", "mamba", "swa"]

    def hit(sides: dict[str, Any], changes: dict[str, Any] | None = None, **extra: Any) -> int:
        other = opened(sides, changes, **extra)
        try:
            return int(other.batch_exists_v2(keys(1), [ask(name, 1) for name in sides]).kv_hit_pages)
        finally:
            other.close()

    assert hit({"swa": swa, "mamba": mamba}) == 1
    assert hit({"swa": swa_pool(layers=3)}) == hit({"swa": swa_pool("page_head")}) == 0
    assert hit({"mamba": mamba_pool(heads=3)}) == hit({"mamba": mamba_pool(extra=True)}) == 0
    assert hit({"mamba": mamba}, {"pp_size": 2}) == 0
    assert hit({"mamba": mamba}, fingerprint="another") == 0
    again = opened({"swa": swa, "mamba": mamba})
    again.clear()
    again.batch_set_v1(keys(1), slots(0))
    found = again.batch_exists_v2(keys(1), [ask("swa", 1)])
    assert found.extra_pool_hit_pages == {"kv": 1}


def test_side_pages_of_other_weights_are_apart(opened: Any, tmp_path: Path) -> None:
    pool = mamba_pool()
    storage = opened({"mamba": pool})
    both = [move(pool, "mamba", keys(1), 0)]
    storage.batch_set_v1(keys(1), slots(0))
    storage.batch_set_v2(both)
    runtime.weights.change("a test")
    assert storage.batch_get_v2(both) == storage.batch_set_v2(both) == {"mamba": [False]}
    assert storage.stats()["pool_mamba_pages_refused"] == 1
    runtime.weights.flushed()
    renewed(storage)
    assert storage.batch_get_v2(both) == {"mamba": [False]}
    storage.batch_set_v1(keys(1), slots(0))
    assert storage.batch_exists_v2(keys(1), [ask("mamba", 1)]).kv_hit_pages == 0, "state of the weights before"
    assert storage.batch_set_v2(both) == storage.batch_get_v2(both) == {"mamba": [True]}
    storage.close()
    assert len(read_store(tmp_path / "store", Options()).namespaces) == 2, "nobody can ask for the others again"


def test_weights_that_change_during_a_read_make_it_a_miss(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = mamba_pool()
    storage = opened({"mamba": pool})
    storage.batch_set_v2([move(pool, "mamba", keys(1), 0)])
    wait = storage._wait

    def change_and_wait(*arguments: Any) -> None:
        wait(*arguments)
        runtime.weights.change("a test")

    monkeypatch.setattr(storage, "_wait", change_and_wait)
    assert storage.batch_get_v2([move(pool, "mamba", keys(1), 1)]) == {"mamba": [False]}


@pytest.mark.parametrize("kind", KINDS)
def test_nonsense_is_a_miss_and_never_an_exception(kind: str, opened: Any) -> None:
    name, make = KINDS[kind]
    pool = make()
    storage = opened({name: pool})
    bad = [
        PoolTransfer(name=PoolName(name), keys=keys(2), host_indices=side_slots(pool, 0)),
        PoolTransfer(name=PoolName(name), keys=keys(1), host_indices=side_slots(pool, 10**6)),
        PoolTransfer(name=PoolName(name), keys=["short"], host_indices=side_slots(pool, 0)),
        PoolTransfer(name=PoolName(name), keys=keys(1)),
    ]
    for transfer in bad:
        missed = {name: [False] * len(transfer.keys)}
        assert storage.batch_get_v2([transfer]) == storage.batch_set_v2([transfer]) == missed
    assert storage.stats()["faults"] == 8
    nothing = PoolTransfer(name=PoolName(name))
    assert storage.batch_set_v2([nothing])[name] == []
    assert storage.batch_exists_v2(["short"], [ask(name)]).kv_hit_pages == 0
    blocks = PoolTransfer(name=PoolName(name), hit_policy=PoolHitPolicy.BLOCK_GROUPS, keys=keys(1))
    storage.batch_set_v1(keys(1), slots(0))
    found = storage.batch_exists_v2(keys(1), [blocks])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (1, {"kv": 1}), "such a pool never ends a hit"


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("deepseek_v4_c4", swa_pool),  # a name that is not known
        ("mamba", lambda: SimpleNamespace()),  # a class that is not
    ],
)
def test_an_unknown_pool_is_refused_by_name(name: str, make: Any, opened: Any) -> None:
    storage = opened({})
    with pytest.raises(UnsupportedError, match=f"'{name}'"):
        storage.register_mem_host_pool_v2(make(), PoolName(name))
    assert storage.batch_exists(keys(1)) == 0, "closed"


def test_a_pool_whose_memory_moves_is_refused() -> None:
    pool = swa_pool()
    pool.shared_allocation_domain = object()
    with pytest.raises(UnsupportedError, match="'swa'"):
        pages_of_side_pool("swa", pool)


def test_a_flat_read_goes_in_parts(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = mamba_pool(extra=True)
    fill(buffers(pool), 1)
    storage = opened({"mamba": pool})
    monkeypatch.setattr(
        "sglang_tpusync.hicache.side_pools._STAGING_BYTES", 2 * storage._sides["mamba"].pages.page_bytes
    )
    names = keys(5)
    assert storage.batch_set_v2([move(pool, "mamba", [*names[:3], names[4]], 0, 1, 2, 3)]) == {"mamba": [True] * 4}
    wanted = [flat(pool, page) for page in range(3)]
    assert storage.batch_get_v2([move(pool, "mamba", names, 10, 11, 12, 13, 14)]) == {"mamba": [True] * 3 + [False] * 2}
    assert all(torch.equal(flat(pool, 10 + page), wanted[page]) for page in range(3))
