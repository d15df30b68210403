"""Resharding against numpy: codes of the global array, cut, reshaped and tiled by the slow model."""

from __future__ import annotations

import itertools
import math
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_reference import Reference

from sglang_tpusync import _core
from sglang_tpusync.errors import ConfigError, StorageError
from sglang_tpusync.layout import DTYPES, Plan, Shard, ShardSpec, TiledLayout, plan


def reference(layout: TiledLayout) -> Reference:
    return Reference(layout.dims, layout.minor_to_major, layout.tiles, layout.element_bits)


def shard_codes(shard: Shard, codes: np.ndarray) -> np.ndarray:
    """What a shard holds of the global array, in the shape of its layout; padding is zero."""
    step = shard.step or (1,) * len(shard.origin)
    index = tuple(
        slice(o, o + (e - 1) * s + 1 if e else o, s) for o, e, s in zip(shard.origin, shard.extent, step, strict=True)
    )
    part = codes[index]
    dims = shard.layout.dims
    axes = shard.axes or tuple((dim,) for dim in range(len(dims)))
    # Split every global dimension over its layout dimensions, then bring those into the layout's order.
    split = [dims[axis] if len(group) > 1 else part.shape[i] for i, group in enumerate(axes) for axis in group]
    order = [axis for group in axes for axis in group]
    placed = part.reshape(split).transpose(np.argsort(order))
    out = np.zeros(dims, dtype=codes.dtype)
    out[tuple(slice(0, n) for n in placed.shape)] = placed
    return out


def shard_bytes(shard: Shard, codes: np.ndarray) -> np.ndarray:
    return reference(shard.layout).tile(shard_codes(shard, codes), 0)


def check(src: ShardSpec, dst: ShardSpec, codes: np.ndarray) -> Plan:
    """Applies the plan with every implementation and several threads, and after a round trip through bytes."""
    steps = plan(src, dst)
    assert Plan.decode(steps.encode()) == steps
    # As many bits are moved as the destinations have elements: that all are right below means each once.
    live_bits = sum(math.prod(shard.extent) * shard.layout.element_bits for shard in dst.shards)
    assert steps.moved_bytes == -(-live_bits // 8)
    sources = [shard_bytes(shard, codes) for shard in src.shards]
    expected = [shard_bytes(shard, codes) for shard in dst.shards]
    for kernels in _core.layout.KERNELS:
        for num_threads in (1, 3):
            destinations = [np.full(size, 0xA5, dtype=np.uint8) for size in steps.dst_bytes]
            steps._native.apply(sources, destinations, num_threads, kernels)
            for got, want in zip(destinations, expected, strict=True):
                np.testing.assert_array_equal(got, want)
    return steps


def codes_of(dtype: str, dims: tuple[int, ...], seed: int = 0) -> np.ndarray:
    bits = DTYPES[dtype]
    rng = np.random.default_rng(seed)
    return rng.integers(1, 1 << bits, dims, dtype=np.uint64).astype(f"u{max(8, bits) // 8}")


def whole(layout: TiledLayout) -> ShardSpec:
    shard = Shard(origin=(0,) * len(layout.dims), extent=layout.dims, layout=layout)
    return ShardSpec(dims=layout.dims, dtype=layout.dtype, shards=(shard,))


TILES = {"BF16": ["", ":T(2,128)(2,1)", ":T(8,128)(2,1)", ":T(3,5)", ":T(2,2)(2,1)"],
         "F8E4M3FN": ["", ":T(4,128)(4,1)", ":T(8,128)(4,1)", ":T(4,4)(4,1)"],
         "F32": ["", ":T(8,128)", ":T(2,3)"],
         "S4": [":E(4)", ":T(8,128)(8,1)E(4)", ":T(2,4)(2,1)E(4)"]}  # fmt: skip


def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """(origin, extent) of consecutive parts of a dimension."""
    bounds = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
    return [(a, b - a) for a, b in itertools.pairwise(bounds)] or [(0, size)]


@st.composite
def specs(draw: st.DrawFn, dims: tuple[int, ...], dtype: str) -> ShardSpec:
    """A grid of shards that covers the array, each in a layout of its own, some twice."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size in dims:
        parts = cuts(draw, size)
        boxes = [((*o, begin), (*e, extent)) for o, e in boxes for begin, extent in parts]
    boxes += draw(st.lists(st.sampled_from(boxes), max_size=2))
    shards = []
    for origin, extent in draw(st.permutations(boxes)):
        order = draw(st.permutations(range(len(dims))))
        text = "{" + ",".join(map(str, order)) + draw(st.sampled_from(TILES[dtype])) + "}"
        shards.append(Shard(origin=origin, extent=extent, layout=TiledLayout.parse(text, dtype, extent)))
    return ShardSpec(dims=dims, dtype=dtype, shards=tuple(shards))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_random_shards_become_random_shards_and_back(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(TILES)))
    dims = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    src, dst = data.draw(specs(dims, dtype)), data.draw(specs(dims, dtype))
    codes = codes_of(dtype, dims, data.draw(st.integers(0, 99)))
    check(src, dst, codes)
    check(dst, src, codes)


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_combs_of_indices_meet_exactly(data: st.DataObject) -> None:
    """Every k-th head to every m-th head, whatever k and m."""
    size = data.draw(st.integers(1, 40))

    def combs(step: int) -> ShardSpec:
        shards = []
        for first in range(min(step, size)):
            extent = (-(-(size - first) // step), 5)
            layout = TiledLayout.parse(data.draw(st.sampled_from(["{1,0:T(2,4)(2,1)}", "{0,1}"])), "BF16", extent)
            shards.append(Shard(origin=(first, 0), extent=extent, step=(step, 1), layout=layout))
        return ShardSpec(dims=(size, 5), dtype="BF16", shards=tuple(shards))

    src, dst = combs(data.draw(st.integers(1, 9))), combs(data.draw(st.integers(1, 9)))
    check(src, dst, codes_of("BF16", (size, 5)))


def heads_over(ranks: int, text: str, dims: tuple[int, ...], dtype: str = "BF16") -> ShardSpec:
    """KV heads (dimension 2) over ranks; with more ranks than heads each head is on several."""
    heads = dims[2]
    share = max(1, heads // ranks)
    shards = []
    for rank in range(ranks):
        extent = (*dims[:2], share, *dims[3:])
        origin = (0, 0, rank * heads // ranks, 0)
        shards.append(Shard(origin=origin, extent=extent, layout=TiledLayout.parse(text, dtype, extent)))
    return ShardSpec(dims=dims, dtype=dtype, shards=tuple(shards))


TP_LAYOUTS = {1: "{3,2,1,0:T(8,128)(2,1)}", 2: "{3,2,1,0:T(4,128)(2,1)}", 4: "{3,2,1,0:T(2,128)(2,1)}",
              8: "{3,1,2,0:T(8,128)(2,1)}", 16: "{3,1,2,0:T(8,128)(2,1)}"}  # fmt: skip


@pytest.mark.parametrize("to", sorted(TP_LAYOUTS))
@pytest.mark.parametrize("from_", sorted(TP_LAYOUTS))
def test_tensor_parallel_widths(from_: int, to: int) -> None:
    dims = (2, 16, 8, 128)
    src, dst = heads_over(from_, TP_LAYOUTS[from_], dims), heads_over(to, TP_LAYOUTS[to], dims)
    steps = check(src, dst, codes_of("BF16", dims))
    assert steps.moved_bytes == sum(steps.dst_bytes)


def test_replicas_share_the_work() -> None:
    dims = (1, 8, 2, 128)
    replicas, ranks = heads_over(8, TP_LAYOUTS[8], dims), heads_over(2, TP_LAYOUTS[8], dims)
    steps = check(replicas, ranks, codes_of("BF16", dims))
    assert len({src for src, _, _ in steps.steps}) == 2
    steps = check(replicas, replicas, codes_of("BF16", dims))
    assert len({src for src, _, _ in steps.steps}) == 8


def kv_fused(pages: int, page_size: int, heads: int, packing: int, dtype: str) -> Shard:
    """The 5-D pool of ragged paged attention: tokens in pages, K and V of a head side by side, packed."""
    groups = 2 * heads // packing
    layout = TiledLayout.parse(
        f"{{4,3,2,1,0:T({packing},128)({packing},1)}}" if packing > 1 else "{4,3,2,1,0:T(1,128)}",
        dtype,
        (pages, page_size, groups, packing, 128),
    )
    extent = (pages * page_size, 2 * heads, 128)
    return Shard(origin=(0, 0, 0), extent=extent, layout=layout, axes=((0, 1), (2, 3), (4,)))


def kv_split(pages: int, page_size: int, heads: int, text: str, dtype: str) -> tuple[Shard, Shard]:
    """K and V of their own: every second head of the fused order."""
    layout = TiledLayout.parse(text, dtype, (pages, page_size, heads, 128))
    extent = (pages * page_size, heads, 128)
    return tuple(  # type: ignore[return-value]
        Shard(origin=(0, part, 0), extent=extent, step=(1, 2, 1), layout=layout, axes=((0, 1), (2,), (3,)))
        for part in (0, 1)
    )


@pytest.mark.parametrize(
    ("dtype", "packing", "text"),
    [
        ("F32", 1, "{3,2,1,0:T(4,128)}"),
        ("BF16", 2, "{3,2,1,0:T(4,128)(2,1)}"),
        ("F8E4M3FN", 4, "{3,2,1,0:T(4,128)(4,1)}"),
        ("BF16", 2, "{3,2,1,0}"),
    ],
)
def test_keys_and_values_apart_and_together_with_pages_of_other_sizes(dtype: str, packing: int, text: str) -> None:
    dims = (64, 8, 128)
    fused = ShardSpec(dims=dims, dtype=dtype, shards=(kv_fused(4, 16, 4, packing, dtype),))
    split = ShardSpec(dims=dims, dtype=dtype, shards=kv_split(16, 4, 4, text, dtype))
    codes = codes_of(dtype, dims)
    check(fused, split, codes)
    check(split, fused, codes)


def test_latents_padded_packed_and_transposed() -> None:
    """MLA: 576 in 640; tokens packed in pairs; tokens in lanes."""
    dims = (128, 576)
    plain = Shard(origin=(0, 0), extent=dims, layout=TiledLayout.linear("BF16", dims))
    padded = Shard(
        origin=(0, 0),
        extent=dims,
        layout=TiledLayout.parse("{3,2,1,0:T(2,128)(2,1)}", "BF16", (4, 16, 2, 640)),
        axes=((0, 1, 2), (3,)),
    )
    transposed = Shard(
        origin=(0, 0),
        extent=dims,
        layout=TiledLayout.parse("{2,1,0:T(8,128)(2,1)}", "BF16", (2, 576, 64)),
        axes=((0, 2), (1,)),
    )
    codes = codes_of("BF16", dims)
    arms = [ShardSpec(dims=dims, dtype="BF16", shards=(shard,)) for shard in (plain, padded, transposed)]
    for src in arms:
        for dst in arms:
            check(src, dst, codes)


def test_pipeline_ranges_of_layers() -> None:
    dims = (8, 4, 16, 128)
    thirds = [(0, 3), (3, 3), (6, 2)]
    halves = [(0, 4), (4, 4)]

    def stages(parts: list[tuple[int, int]]) -> ShardSpec:
        shards = tuple(
            Shard(
                origin=(first, 0, 0, 0),
                extent=(count, *dims[1:]),
                layout=TiledLayout.parse("{3,2,1,0:T(8,128)(2,1)}", "BF16", (count, *dims[1:])),
            )
            for first, count in parts
        )
        return ShardSpec(dims=dims, dtype="BF16", shards=shards)

    check(stages(thirds), stages(halves), codes_of("BF16", dims))


def test_the_layouts_own_axes_follow_from_the_extents() -> None:
    dims = (64, 8, 128)
    fused = kv_fused(4, 16, 4, 2, "BF16")
    implied = Shard(origin=fused.origin, extent=fused.extent, layout=fused.layout)
    linear = whole(TiledLayout.linear("BF16", dims))
    named = plan(linear, ShardSpec(dims=dims, dtype="BF16", shards=(fused,)))
    assert plan(linear, ShardSpec(dims=dims, dtype="BF16", shards=(implied,))) == named


def test_what_no_source_holds_is_named() -> None:
    dims = (4, 6)
    layout = TiledLayout.linear("F32", (4, 3))
    left = Shard(origin=(0, 0), extent=(4, 3), layout=layout)
    src = ShardSpec(dims=dims, dtype="F32", shards=(left,))
    with pytest.raises(ConfigError, match=r"no source holds element \[0,3\] of destination 0"):
        plan(src, whole(TiledLayout.linear("F32", dims)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"origin": (0, 4)}, "3 indices from 4 by 1 of dimension 1 of size 6"),
        ({"origin": (-1, 0)}, "from -1"),
        ({"origin": (0,)}, "rank 2"),
        ({"extent": (4, 4)}, "3 elements for 4 indices"),
        ({"step": (1, 0)}, "by 0"),
        ({"step": (1, 3)}, "3 indices from 0 by 3"),
        ({"axes": ((0,), (0,))}, "axis 0 of dimension 1 is not free"),
        ({"axes": ((0, 1), ())}, "axes of 12 elements for 4"),
        ({"layout": TiledLayout.linear("S32", (4, 3))}, "dtype S32 in an array of F32"),
    ],
)
def test_shards_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"origin": (0, 0), "extent": (4, 3), "layout": TiledLayout.linear("F32", (4, 3))}
    shard = Shard(**{**fields, **change})
    spec = ShardSpec(dims=(4, 6), dtype="F32", shards=(shard,))
    with pytest.raises(ConfigError, match=message):
        plan(spec, spec)


def test_wrong_buffers_are_refused_before_a_byte_is_written() -> None:
    layout = TiledLayout.parse("{1,0:T(8,128)(2,1)}", "BF16", (8, 128))
    steps = plan(whole(layout), whole(layout))
    good, out = np.ones(2048, dtype=np.uint8), np.zeros(2048, dtype=np.uint8)
    both = np.zeros(3000, dtype=np.uint8)
    cases: list[tuple[type[Exception], list[Any], list[Any]]] = [
        (ConfigError, [good[:-1]], [out]),
        (ConfigError, [good], [out[:-1]]),
        (ConfigError, [good, good], [out]),
        (ConfigError, [good], []),
        (ConfigError, [good], [good]),
        (ConfigError, [both[:2048]], [both[952:]]),
        (TypeError, [good.astype(np.int8)], [out]),
        (TypeError, [np.ones(4096, dtype=np.uint8)[::2]], [out]),
    ]
    for error, src, dst in cases:
        with pytest.raises(error):
            steps.apply(src, dst)
    assert not out.any()


def test_damaged_plans_are_refused() -> None:
    dims = (64, 8, 128)
    src = ShardSpec(dims=dims, dtype="BF16", shards=(kv_fused(4, 16, 4, 2, "BF16"),))
    data = plan(src, whole(TiledLayout.linear("BF16", dims))).encode()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 + zlib.crc32(bytes([at % 251])) % 255
        with pytest.raises(StorageError):
            Plan.decode(bytes(damaged))
    for size in range(len(data)):
        with pytest.raises(StorageError):
            Plan.decode(data[:size])


def test_describe_names_what_moves() -> None:
    dims = (2, 16, 8, 128)
    text = plan(heads_over(1, TP_LAYOUTS[1], dims), heads_over(8, TP_LAYOUTS[8], dims)).describe()
    assert text.startswith("1 sources, 8 destinations, 65536 bytes moved\n")
    assert "0 -> 7: repack 8192 bytes" in text
    assert "runs" in plan(heads_over(1, TP_LAYOUTS[1], dims), heads_over(2, TP_LAYOUTS[2], dims)).describe()
