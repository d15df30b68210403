"""Which bytes of a prefill rank's buffers go where in a decode rank's: made once per pair of ranks, pure.

Pages of KV are rows of `page_size` tokens, each the rank's heads one after the other. Two ranks that hold the same
heads exchange whole pages; two that do not exchange, of every token, the heads that both hold. What cannot be
exchanged so is refused here with both values named, before any byte is on its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglang_tpusync.disagg.messages import Buffer, Registration
from sglang_tpusync.errors import UnsupportedError
from sglang_tpusync.hicache.identity import head_range

__all__ = ["ROWS", "Pairing", "Pieces", "Source", "SourceBuffer", "pair", "runs"]

ROWS = "rows"  # the layout of a page: tokens, then heads, then the head's elements

# States that are a number of whole items on both sides.
_STATES = frozenset({"mamba", "swa", "dsa"})


class SourceBuffer(NamedTuple):
    """Memory of the prefill rank: items of equal size, one after the other."""

    address: int
    num_bytes: int
    item_bytes: int
    layer: int


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefill rank holds."""

    tp_size: int
    tp_rank: int
    num_kv_heads: int  # of the model; 0: latent KV, which every rank holds whole
    page_size: int
    kv_dtype: str
    layout: str
    namespace: str  # digest of the weights; empty: unknown
    start_layer: int
    kv: tuple[SourceBuffer, ...]
    rows: tuple[SourceBuffer, ...]
    states: tuple[tuple[str, tuple[SourceBuffer, ...]], ...]


class Pieces(NamedTuple):
    """Arguments of Endpoint.submit_write: n pieces from here to there."""

    addresses: NDArray[np.uint64]
    regions: NDArray[np.uint32]
    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint64]


class _Buffers:
    """Pairs of buffers, and which pieces of an item of one are which of the other."""

    def __init__(
        self,
        pairs: Sequence[tuple[SourceBuffer, Buffer]],
        cuts: tuple[NDArray[np.uint64], NDArray[np.uint64], int] | None,
    ) -> None:
        self.num_source_items = min((source.num_bytes // source.item_bytes for source, _ in pairs), default=0)
        self.num_target_items = min((target.num_bytes // target.item_bytes for _, target in pairs), default=0)
        self._address = np.array([source.address for source, _ in pairs], np.uint64)
        self._source_bytes = np.array([source.item_bytes for source, _ in pairs], np.uint64)
        self._region = np.array([target.region for _, target in pairs], np.uint32)
        self._target_bytes = np.array([target.item_bytes for _, target in pairs], np.uint64)
        self._cuts = cuts

    def pieces(self, source_items: NDArray[np.int64], target_items: NDArray[np.int64]) -> Pieces:
        """Of items `source_items` to `target_items`, buffer by buffer. Both of one length, both in range."""
        source, target = source_items.astype(np.uint64), target_items.astype(np.uint64)
        address = self._address[:, None] + self._source_bytes[:, None] * source
        offset = self._target_bytes[:, None] * target
        length = np.broadcast_to(self._source_bytes[:, None], offset.shape)
        region = np.broadcast_to(self._region[:, None], offset.shape)
        if self._cuts is not None:
            source_cut, target_cut, cut_bytes = self._cuts
            address = address[:, :, None] + source_cut
            offset = offset[:, :, None] + target_cut
            length = np.full(offset.shape, cut_bytes, np.uint64)
            region = np.broadcast_to(region[:, :, None], offset.shape)
        return Pieces(
            address.ravel(),
            np.ascontiguousarray(region).ravel(),
            offset.ravel(),
            np.ascontiguousarray(length).ravel(),
        )


class Pairing:
    """A prefill rank and a decode rank. Immutable."""

    def __init__(
        self, kv: _Buffers, states: Sequence[_Buffers], rows: Sequence[tuple[SourceBuffer, Buffer]], ready_row: int
    ) -> None:
        self.kv = kv
        self.states = tuple(states)
        self.rows = _Buffers([pair for number, pair in enumerate(rows) if number != ready_row], None)
        self.ready = _Buffers([rows[ready_row]], None)


def pair(source: Source, target: Registration) -> Pairing:
    """How `source` serves `target`. Raises UnsupportedError that names what differs, with both values."""
    for what, ours, theirs in (
        ("page size", source.page_size, target.page_size),
        ("KV dtype", source.kv_dtype, target.kv_dtype),
        ("layout of a page", source.layout, target.layout),
        ("number of states", len(source.states), len(target.states)),
        ("number of metadata buffers", len(source.rows), len(target.rows)),
    ):
        if ours != theirs:
            raise UnsupportedError(f"{what} differs: prefill has {ours}, decode has {theirs}")
    if source.namespace and target.namespace and source.namespace != target.namespace:
        raise UnsupportedError(
            f"the models differ: prefill has weights {source.namespace[:16]}, decode has {target.namespace[:16]}"
        )
    if max(source.tp_size, target.tp_size) % min(source.tp_size, target.tp_size):
        raise UnsupportedError(
            f"TP widths do not divide each other: prefill has {source.tp_size}, decode has {target.tp_size}"
        )
    if target.tp_rank >= target.tp_size:
        raise UnsupportedError(f"decode has TP rank {target.tp_rank} of {target.tp_size}")
    if target.ready_row >= len(target.rows):
        raise UnsupportedError(f"decode has ready row {target.ready_row} of {len(target.rows)}")
    rows = list(zip(source.rows, target.rows, strict=True))
    _same_items("metadata buffer", rows)
    states = [_pair_state(source, target, number) for number in range(len(source.states))]
    return Pairing(_pair_kv(source, target), states, rows, target.ready_row)


def _pair_kv(source: Source, target: Registration) -> _Buffers:
    pairs = [(source.kv[i], target.kv[j]) for i, j in _matched(source, target)]
    if source.num_kv_heads == 0 or source.tp_size == target.tp_size:
        _same_items("KV buffer", pairs)
        return _Buffers(pairs, None)
    if source.layout != ROWS:
        raise UnsupportedError(
            f"TP widths differ (prefill {source.tp_size}, decode {target.tp_size}): the layout {source.layout!r} of a "
            f"page cannot be cut by heads, allowed is {ROWS!r}"
        )
    return _Buffers(pairs, _head_cuts(source, target, pairs))


def _head_cuts(
    source: Source, target: Registration, pairs: Sequence[tuple[SourceBuffer, Buffer]]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], int]:
    """Of each token of a page: where the heads lie that both ranks hold, and their length."""
    ours = head_range(source.tp_rank, source.tp_size, source.num_kv_heads)
    theirs = head_range(target.tp_rank, target.tp_size, source.num_kv_heads)
    first, end = max(ours[0], theirs[0]), min(ours[1], theirs[1])
    if first >= end:
        raise UnsupportedError(f"prefill holds KV heads {ours}, decode holds {theirs}: none is in both")
    head_bytes = {a.item_bytes / (source.page_size * (ours[1] - ours[0])) for a, _ in pairs}
    head_bytes |= {b.item_bytes / (source.page_size * (theirs[1] - theirs[0])) for _, b in pairs}
    size = next(iter(head_bytes), 0.0)
    if len(head_bytes) != 1 or not size.is_integer():
        raise UnsupportedError(
            f"pages do not divide into {source.page_size} tokens of heads of one size: prefill has pages of "
            f"{sorted({a.item_bytes for a, _ in pairs})} bytes and heads {ours}, decode "
            f"{sorted({b.item_bytes for _, b in pairs})} and {theirs} of {source.num_kv_heads}"
        )
    token = np.arange(source.page_size, dtype=np.uint64)
    source_cut = (token * np.uint64(ours[1] - ours[0]) + np.uint64(first - ours[0])) * np.uint64(size)
    target_cut = (token * np.uint64(theirs[1] - theirs[0]) + np.uint64(first - theirs[0])) * np.uint64(size)
    return source_cut, target_cut, (end - first) * int(size)


def _pair_state(source: Source, target: Registration, number: int) -> _Buffers:
    kind, buffers = source.states[number]
    other = target.states[number]
    if kind != other.kind or len(buffers) != len(other.buffers):
        raise UnsupportedError(
            f"state {number} differs: prefill has {len(buffers)} buffers of {kind}, decode has {len(other.buffers)} of "
            f"{other.kind}"
        )
    if kind not in _STATES:
        raise UnsupportedError(f"state {number} is {kind!r}: allowed are {', '.join(sorted(_STATES))}")
    if source.tp_size != target.tp_size and kind != "dsa":
        raise UnsupportedError(
            f"state {kind} needs equal TP widths: prefill has {source.tp_size}, decode has {target.tp_size}"
        )
    pairs = list(zip(buffers, other.buffers, strict=True))
    _same_items(f"state {kind}", pairs)
    return _Buffers(pairs, None)


def _same_items(what: str, pairs: Sequence[tuple[SourceBuffer, Buffer]]) -> None:
    for number, (source, target) in enumerate(pairs):
        if source.item_bytes != target.item_bytes:
            raise UnsupportedError(
                f"items of {what} {number} differ: prefill has {source.item_bytes} bytes, decode {target.item_bytes}"
            )


def _matched(source: Source, target: Registration) -> list[tuple[int, int]]:
    """Which buffer belongs to which: by layer where both name layers, by place where the numbers are equal, and for a
    stage of a pipeline by the place of its first layer."""
    ours, theirs = [b.layer for b in source.kv], [b.layer for b in target.kv]
    if ours and min(ours) >= 0 and theirs and min(theirs) >= 0:
        places: dict[int, list[int]] = {}
        for place, layer in enumerate(theirs):
            places.setdefault(layer, []).append(place)
        try:
            return [(i, places[layer].pop(0)) for i, layer in enumerate(ours)]
        except (KeyError, IndexError):
            raise UnsupportedError(f"decode lacks layers of prefill: prefill {ours}, decode {theirs}") from None
    if len(ours) == len(theirs):
        return [(i, i) for i in range(len(ours))]
    halves = 1 if source.num_kv_heads == 0 else 2  # all K, then all V
    here, there = len(ours) // halves, len(theirs) // halves
    if len(ours) % halves or len(theirs) % halves or source.start_layer + here > there:
        raise UnsupportedError(
            f"numbers of KV buffers differ: prefill has {len(ours)} from layer {source.start_layer} on, decode "
            f"{len(theirs)}"
        )
    return [(h * here + i, h * there + source.start_layer + i) for h in range(halves) for i in range(here)]


def runs(items: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """First items and lengths of the runs of neighbours in a set of items, ascending."""
    unique = np.unique(items)
    if not len(unique):
        return np.empty(0, np.uint64), np.empty(0, np.uint64)
    breaks = np.flatnonzero(np.diff(unique) != 1) + 1
    starts = np.concatenate(([0], breaks))
    ends = np.concatenate((breaks, [len(unique)]))
    return unique[starts].astype(np.uint64), (ends - starts).astype(np.uint64)
