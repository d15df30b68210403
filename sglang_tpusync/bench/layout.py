"""What a change of layout costs beside memcpy of the same bytes, on one thread, in the same rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglang_tpusync.bench.report import Row, measured
from sglang_tpusync.bench.rounds import measure_interleaved
from sglang_tpusync.layout import Shard, ShardSpec, TiledLayout, plan

__all__ = ["CASES", "Case", "measure"]

Bytes = NDArray[np.uint8]
Run = Callable[[], None]

_ALIGNMENT = 2 << 20  # huge pages, where the system gives them


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A named change of layout: `build(pages)` gives what to run, the bytes it moves, and numpy's way if there is."""

    name: str
    goal: float | None
    build: Callable[[int], tuple[Run, int, Run | None]]


def _bytes(size: int) -> Bytes:
    raw = np.empty(size + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    out = raw[start : start + size]
    out.fill(1)
    return out


def _split_kv(pages: int) -> TiledLayout:
    return TiledLayout.parse("{3,2,1,0:T(8,128)(2,1)}", "BF16", (pages, 64, 8, 128))


def _untile(pages: int) -> tuple[Run, int, Run | None]:
    layout = _split_kv(pages)
    tiled = _bytes(layout.padded_bytes)
    codes = _bytes(layout.padded_bytes).view(np.uint16).reshape(layout.dims)

    def with_numpy() -> None:
        packed = tiled.view(np.uint16).reshape(pages, 64, 4, 128, 2)
        np.copyto(codes.reshape(pages, 64, 4, 2, 128), packed.transpose(0, 1, 2, 4, 3))

    return lambda: _ignore(layout.untile(tiled, out=codes)), layout.padded_bytes, with_numpy


def _tile(pages: int) -> tuple[Run, int, Run | None]:
    layout = _split_kv(pages)
    tiled = _bytes(layout.padded_bytes)
    codes = _bytes(layout.padded_bytes).view(np.uint16).reshape(layout.dims)

    def with_numpy() -> None:
        packed = tiled.view(np.uint16).reshape(pages, 64, 4, 128, 2)
        np.copyto(packed, codes.reshape(pages, 64, 4, 2, 128).transpose(0, 1, 2, 4, 3))

    return lambda: _ignore(layout.tile(codes, out=tiled)), layout.padded_bytes, with_numpy


def _whole(layout: TiledLayout) -> ShardSpec:
    shard = Shard(origin=(0,) * len(layout.dims), extent=layout.dims, layout=layout)
    return ShardSpec(dims=layout.dims, dtype=layout.dtype, shards=(shard,))


def _reshard(src: ShardSpec, dst: ShardSpec) -> tuple[Run, int, Run | None]:
    steps = plan(src, dst)
    sources, destinations = [_bytes(n) for n in steps.src_bytes], [_bytes(n) for n in steps.dst_bytes]
    return lambda: steps.apply(sources, destinations), steps.moved_bytes, None


def _to_linear(source: TiledLayout, split: tuple[int, ...], order: tuple[int, ...]) -> tuple[Run, int, Run | None]:
    """A whole array, and numpy's way: the buffer seen as dimensions of `split`, transposed to `order`."""
    steps = plan(_whole(source), _whole(TiledLayout.linear(source.dtype, source.dims)))
    tiled, codes = _bytes(source.padded_bytes), _bytes(source.padded_bytes)
    seen = tiled.view(source.code_dtype).reshape(split).transpose(order)
    target = codes.view(source.code_dtype).reshape(seen.shape)
    return lambda: steps.apply([tiled], [codes]), steps.moved_bytes, lambda: np.copyto(target, seen)


def _heads(text: str, ways: int) -> Callable[[int], tuple[Run, int, Run | None]]:
    """A pool of 8 heads to `ways` ranks, each with the layout that XLA gives its shard."""

    def build(pages: int) -> tuple[Run, int, Run | None]:
        source = _split_kv(pages)
        heads = 8 // ways
        layout = TiledLayout.parse(text, "BF16", (pages, 64, heads, 128))
        shards = tuple(Shard(origin=(0, 0, rank * heads, 0), extent=layout.dims, layout=layout) for rank in range(ways))
        return _reshard(_whole(source), ShardSpec(dims=source.dims, dtype="BF16", shards=shards))

    return build


def _gather(layout: TiledLayout, page: tuple[int, ...], text: str, count: int) -> tuple[Run, int, Run | None]:
    """`count` pages of the leading dimension, scattered over the pool, into pages in the layout of `text`."""
    page_layout = TiledLayout.parse(text, layout.dtype, page)
    source = _bytes(layout.padded_bytes)
    out = _bytes(page_layout.padded_bytes)
    num_pages = layout.dims[0] // page[0]
    plans = []
    for i in range(count):
        origin = ((i * 37 % num_pages) * page[0], *[0] * (len(page) - 1))
        shard = Shard(origin=origin, extent=page, layout=page_layout)
        plans.append(plan(_whole(layout), ShardSpec(dims=layout.dims, dtype=layout.dtype, shards=(shard,))))

    def run() -> None:
        for each in plans:
            each.apply([source], [out])

    return run, count * plans[0].moved_bytes, None


def _page_in_lanes(pages: int) -> tuple[Run, int, Run | None]:
    layout = TiledLayout.parse("{0,3,2,1:T(8,128)(2,1)}", "BF16", (pages, 64, 8, 64))
    return _gather(layout, (1, 64, 8, 64), "{3,2,1,0}", 64)


def _tokens_in_lanes(pages: int) -> tuple[Run, int, Run | None]:
    layout = TiledLayout.parse("{0,2,1:T(8,128)(2,1)}", "BF16", (pages * 64, 8, 64))
    return _gather(layout, (64, 8, 64), "{0,2,1:T(8,64)(2,1)}", min(pages, 1024))


def _ragged_page(pages: int) -> tuple[Run, int, Run | None]:
    text = "{4,3,2,1,0:T(4,128)(4,1)}"
    layout = TiledLayout.parse(text, "F8E4M3FN", (pages, 64, 4, 4, 128))
    return _gather(layout, (1, 64, 4, 4, 128), text, min(pages, 1024))


def _ragged_untile(pages: int) -> tuple[Run, int, Run | None]:
    source = TiledLayout.parse("{4,3,2,1,0:T(4,128)(4,1)}", "F8E4M3FN", (pages, 64, 4, 4, 128))
    return _to_linear(source, (pages, 64, 4, 128, 4), (0, 1, 2, 4, 3))


def _latent(pages: int) -> tuple[Run, int, Run | None]:
    source = TiledLayout.parse("{0,3,2,1:T(8,128)(2,1)}", "BF16", (pages, 64, 1, 576))
    return _to_linear(source, (64, 72, pages // 128, 4, 128, 2), (2, 4, 0, 1, 3, 5))


CASES: tuple[Case, ...] = (
    Case(name="bf16 (P,64,8,128) untile", goal=0.5, build=_untile),
    Case(name="bf16 (P,64,8,128) tile", goal=0.5, build=_tile),
    Case(name="bf16 TP1 -> TP2, pairs of heads", goal=0.6, build=_heads("{3,2,1,0:T(4,128)(2,1)}", 2)),
    Case(name="bf16 TP1 -> TP8, single heads", goal=0.35, build=_heads("{3,1,2,0:T(8,128)(2,1)}", 8)),
    Case(name="bf16 (64P,8,64) gather of pages, 256-byte runs", goal=0.3, build=_tokens_in_lanes),
    Case(name="bf16 (P,64,8,64) gather of single pages, 4-byte pieces", goal=None, build=_page_in_lanes),
    Case(name="fp8 (P,64,4,4,128) gather of pages", goal=0.5, build=_ragged_page),
    Case(name="fp8 (P,64,4,4,128) untile", goal=0.5, build=_ragged_untile),
    Case(name="bf16 MLA (P,64,1,576) untile", goal=0.5, build=_latent),
)


def _ignore(value: Any) -> None:
    del value


def _rate(run: Run, size: int) -> Callable[[], float]:
    def once() -> float:
        start = time.perf_counter()
        run()
        return size / (time.perf_counter() - start) / 1e9

    return once


def measure(pages: int, rounds: int, cases: Sequence[Case] = CASES) -> list[Row]:
    """One row per case: GB/s of the bytes moved, memcpy of as many bytes as the limit, numpy as a peer."""
    rows = []
    for case in cases:
        run, size, with_numpy = case.build(pages)
        memcpy_size = max(size, 128 << 20)
        source, target = _bytes(memcpy_size), _bytes(memcpy_size)
        arms = {
            "ours": _rate(run, size),
            "memcpy": _rate(lambda s=source, t=target: np.copyto(t, s), memcpy_size),  # type: ignore[misc]
        }
        if with_numpy is not None:
            arms["numpy"] = _rate(with_numpy, size)
        for arm in arms.values():
            arm()
        samples = measure_interleaved(arms, rounds)
        rows.append(
            measured(
                case.name.replace("P", str(pages), 1) if "(P" in case.name else case.name,
                samples["ours"],
                unit="GB/s",
                better="higher",
                limit="memcpy of the same bytes, one thread",
                limit_samples=samples["memcpy"],
                goal=case.goal,
                peers={name: samples[name] for name in ("numpy",) if name in samples},
            )
        )
    return rows
