"""Identity: what must differ differs, what may be shared is shared. No SGLang, no model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tpusync.errors import ConfigError
from sglang_tpusync.hicache import identity
from sglang_tpusync.hicache.identity import head_range, namespace_of, weights_digest


class DType:
    itemsize = 2

    def __str__(self) -> str:
        return "torch.bfloat16"


def pool(**changes: Any) -> Any:
    fields = {
        "dtype": DType(), "page_size": 64, "start_layer": 0, "end_layer": 4, "layer_num": 4, "target_layer_num": 4,
        "head_num": 4, "head_dim": 128, "v_head_dim": 128, "layout": "page_first", "storage_format_tag": None,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


def config(**changes: Any) -> Any:
    fields = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "dcp_rank": 0,
        "dcp_size": 1, "is_mla_model": False, "dp_rank": 0,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


def digest(pool_changes: dict[str, Any] | None = None, fingerprint: str = "m", **config_changes: Any) -> bytes:
    return namespace_of(pool(**(pool_changes or {})), config(**config_changes), fingerprint).digest


@pytest.fixture
def eight_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_total_kv_heads", lambda: 8)


@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 16}, {"start_layer": 4, "end_layer": 8}, {"layer_num": 5}, {"head_num": 8}, {"head_dim": 64},
        {"v_head_dim": 64}, {"layout": "page_first_direct"}, {"layout": "layer_first"}, {"storage_format_tag": "tiled"},
        {"dtype": type("F", (), {"itemsize": 2, "__str__": lambda self: "torch.float16"})()},
    ],
)  # fmt: skip
def test_any_difference_of_the_pool_is_another_namespace(changes: dict[str, Any]) -> None:
    assert digest(changes) != digest()


def test_the_model_and_the_part_of_the_sequence_are_in_it() -> None:
    assert digest(fingerprint="n") != digest()
    assert digest(attn_cp_rank=1, attn_cp_size=2) != digest(attn_cp_rank=0, attn_cp_size=2) != digest()


def test_data_parallel_replicas_share() -> None:
    assert digest(dp_rank=3) == digest()


@pytest.mark.usefixtures("eight_heads")
def test_a_rank_is_what_it_holds() -> None:
    def held(rank: int, size: int) -> bytes:
        return digest({"head_num": max(1, 8 // size)}, tp_rank=rank, tp_size=size)

    assert held(1, 2) != held(1, 4)
    assert len({held(rank, 4) for rank in range(4)}) == 4
    assert held(0, 16) == held(1, 16)  # two ranks hold head 0
    assert held(2, 16) == held(1, 8) == held(3, 16)  # and head 1
    assert held(0, 8) != held(1, 8)


def test_unknown_heads_are_never_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_total_kv_heads", lambda: None)
    assert digest(tp_rank=0, tp_size=2) != digest(tp_rank=1, tp_size=2)
    assert digest(tp_rank=1, tp_size=2) != digest(tp_rank=1, tp_size=4)


@pytest.mark.usefixtures("eight_heads")
def test_a_pool_that_holds_other_heads_than_its_rank_should_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 1 of 2 holds 2 KV heads, expected 4 of 8"):
        digest({"head_num": 2}, tp_rank=1, tp_size=2)


def test_ranks_of_mla_share() -> None:
    latent = {"kv_cache_dim": 576}
    assert digest(latent, is_mla_model=True, tp_rank=0, tp_size=8) == digest(
        latent, is_mla_model=True, tp_rank=5, tp_size=8
    )
    assert digest(latent, is_mla_model=True) != digest({"kv_cache_dim": 512}, is_mla_model=True)


@given(total=st.integers(1, 128), doublings=st.integers(0, 8))
def test_head_ranges_cover_all_heads_evenly(total: int, doublings: int) -> None:
    size = next(s for s in range(2**doublings, 0, -1) if total % s == 0 or s % total == 0)
    ranges = [head_range(rank, size, total) for rank in range(size)]
    held = [head for first, end in ranges for head in range(first, end)]
    assert sorted(held) == held
    assert set(held) == set(range(total))
    assert len({held.count(head) for head in held}) == 1


def test_the_fields_are_readable_and_canonical() -> None:
    namespace = namespace_of(pool(), config(), "m")
    assert json.loads(namespace.json) == namespace.fields
    assert namespace.json == namespace_of(pool(), config(), "m").json
    assert namespace.fields["heads"] == {"head_bytes": 256, "range": [0, 4], "total": 4}


def write_model(root: Path) -> Path:
    root.mkdir()
    header = b'{"w":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'
    (root / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    (root / "config.json").write_text("{}")
    (root / "README.md").write_text("not a weight")
    return root


def change_header(root: Path) -> None:
    path = root / "model.safetensors"
    times = path.stat()
    path.write_bytes(path.read_bytes().replace(b"BF16", b"FP16"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # same name, size and time


def touch(root: Path) -> None:
    os.utime(root / "model.safetensors", ns=(1, 1))


def grow(root: Path) -> None:
    with open(root / "model.safetensors", "ab") as stream:
        stream.write(b"e")


def rename(root: Path) -> None:
    (root / "model.safetensors").rename(root / "other.safetensors")


def change_config(root: Path) -> None:
    (root / "config.json").write_text('{"a": 1}')


@pytest.mark.parametrize("change", [change_header, touch, grow, rename, change_config])
def test_any_change_of_the_weight_files_is_seen(change: Any, tmp_path: Path) -> None:
    root = write_model(tmp_path / "model")
    before = weights_digest(str(root))
    assert weights_digest(str(root)) == before
    change(root)
    assert weights_digest(str(root)) != before


def test_other_files_and_hidden_directories_do_not_matter(tmp_path: Path) -> None:
    root = write_model(tmp_path / "model")
    before = weights_digest(str(root))
    (root / "README.md").write_text("changed")
    (root / ".cache" / "deep").mkdir(parents=True)
    (root / ".cache" / "deep" / "x.json").write_text("{}")
    assert weights_digest(str(root)) == before


def test_a_model_that_cannot_be_found_asks_for_a_fingerprint(tmp_path: Path) -> None:
    for path in (str(tmp_path / "nowhere"), "s3://bucket/model"):
        with pytest.raises(ConfigError, match="fingerprint"):
            weights_digest(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="fingerprint"):
        weights_digest(str(tmp_path / "empty"))
