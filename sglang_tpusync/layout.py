"""TPU memory layouts: the place of every byte, changes of layout, and resharding as plans.

A layout is the text that XLA prints, for example ``{3,2,1,0:T(8,128)(2,1)}``; the definition and its limits are in
``csrc/tpusync/layout/tiled_layout.h``. Nothing here guesses a layout: read it from the buffer, or ask the compiler
with `default`.

Element values travel as *codes*: an unsigned-integer array holding the bit pattern of each element, native byte
order; elements of less than a byte one per uint8, in its low bits.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Self, SupportsIndex, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglang_tpusync import _core
from sglang_tpusync.errors import ConfigError, UnsupportedError

__all__ = ["DTYPES", "RUN_DTYPE", "Plan", "Shard", "ShardSpec", "TiledLayout", "default", "defaults", "plan"]

#: Bits of an element by the name of its type, as XLA prints it.
DTYPES: dict[str, int] = dict(_core.layout.DTYPES)

#: One run of bytes: `count` pieces of `length` bytes, the first at `offset`, `stride` apart (0 for a single piece).
RUN_DTYPE = np.dtype([("offset", "<u8"), ("length", "<u8"), ("count", "<u8"), ("stride", "<u8")])

Codes: TypeAlias = NDArray[np.unsignedinteger[Any]]
Index: TypeAlias = slice | SupportsIndex

_ALIGNMENT = 64  # of buffers that are made here: whole cache lines can be written around the caches
_ORACLE_TIMEOUT_S = 120.0


def _empty_bytes(size: int) -> NDArray[np.uint8]:
    """An aligned uint8[size] of undefined content."""
    raw = np.empty(size + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size]


class TiledLayout:
    """How an array of one dtype and shape lies in memory. Immutable, hashable, compares by value."""

    __slots__ = ("_native",)

    _native: _core.layout.TiledLayout

    def __init__(self, native: _core.layout.TiledLayout) -> None:
        """Use `parse` or `linear`."""
        self._native = native

    @classmethod
    def parse(cls, text: str, dtype: str, dims: Sequence[int]) -> Self:
        """The layout that `text` describes, for an array of `dims` elements of `dtype` (XLA's names, any case).

        Raises ConfigError for malformed text (with the position), an unknown dtype, or numbers that contradict each
        other or exceed 2^60 bits; UnsupportedError for what XLA may print and this cannot represent.
        """
        return cls(_core.layout.TiledLayout.parse(text, dtype, list(dims)))

    @classmethod
    def linear(cls, dtype: str, dims: Sequence[int]) -> Self:
        """Row-major, without tiles, in whole bytes per element."""
        return cls(_core.layout.TiledLayout.linear(dtype, list(dims)))

    @property
    def text(self) -> str:
        """XLA's text of the layout; parsing it gives an equal layout."""
        return self._native.text

    @property
    def dtype(self) -> str:
        return self._native.dtype

    @property
    def dims(self) -> tuple[int, ...]:
        return self._native.dims

    @property
    def minor_to_major(self) -> tuple[int, ...]:
        return self._native.minor_to_major

    @property
    def tiles(self) -> tuple[tuple[int, ...], ...]:
        return self._native.tiles

    @property
    def memory_space(self) -> int:
        """XLA's S(n): 0 for HBM, 5 for host memory. Has no influence on bytes."""
        return self._native.memory_space

    @property
    def element_bits(self) -> int:
        """Bits between neighbouring elements of a tile."""
        return self._native.element_bits

    @property
    def padded_bytes(self) -> int:
        """Size of the buffer in bytes."""
        return self._native.padded_bytes

    @property
    def page_bytes(self) -> int | None:
        """Bytes of one index of dimension 0, padding included, where dimension 0 is physically most major and no
        tile reaches it; None elsewhere, even where the elements of a page happen to be contiguous."""
        return self._native.page_bytes

    @property
    def code_dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The numpy dtype of codes: uint8 to uint64."""
        bits = max(8, self._native.dtype_bits)
        if bits > 64:
            raise UnsupportedError(f"{self.dtype}: codes of {bits} bits have no numpy type")
        return np.dtype(f"u{bits // 8}")

    def offset_bits(self, index: Sequence[int]) -> int:
        """Place of the element at `index`, in bits from the start of the buffer."""
        return self._native.offset_bits(list(index))

    def tile(
        self, codes: Codes, fill: int = 0, *, out: NDArray[np.uint8] | None = None, num_threads: int = 1
    ) -> NDArray[np.uint8]:
        """Codes of shape `dims` as the uint8[padded_bytes] that a device holds; padding elements become `fill`.

        `out`, if given, is written and returned. Raises TypeError for arrays of another dtype or that are not
        contiguous or misaligned, ConfigError for a wrong shape or a fill that is no code.
        """
        self._check_codes(codes, "codes")
        if fill < 0 or fill >= 1 << 64:
            raise ConfigError(f"fill {fill} does not fit {self._native.dtype_bits} bits")
        if out is None:
            out = _empty_bytes(self.padded_bytes)
        self._check_buffer(out, "out")
        self._native.tile(out, codes, fill, num_threads)
        return out

    def untile(self, buffer: NDArray[np.uint8], *, out: Codes | None = None, num_threads: int = 1) -> Codes:
        """The codes, of shape `dims`, in the uint8[padded_bytes] of a device. Padding is not read as data."""
        self._check_buffer(buffer, "buffer")
        if out is None:
            size = int(np.prod(self.dims, dtype=object)) * self.code_dtype.itemsize
            out = _empty_bytes(size).view(self.code_dtype).reshape(self.dims)
        self._check_codes(out, "out")
        self._native.untile(out, buffer, num_threads)
        return out

    def runs(self, slices: Sequence[Index] | Index = ()) -> NDArray[np.void]:
        """The bytes that hold the elements of a rectangle, in the order in which they lie in memory.

        `slices` index the leading dimensions as numpy would, in steps of 1; what is left out is whole. Returns a
        structured array (`RUN_DTYPE`, all in bytes) of merged runs: one run where the rectangle is contiguous. Bytes
        of padding belong to no run. Raises ConfigError where packed elements do not fill whole bytes.
        """
        origin, extent = self._box(slices if isinstance(slices, Sequence) else (slices,))
        rows = self._native.runs(origin, extent)
        return rows.view(RUN_DTYPE).reshape(len(rows))

    def live_mask(self) -> NDArray[np.uint8]:
        """uint8[padded_bytes]: ones in the bits that hold elements, zeros in padding."""
        return self._native.live_mask()

    def _box(self, slices: Sequence[Index]) -> tuple[list[int], list[int]]:
        if len(slices) > len(self.dims):
            raise ConfigError(f"{len(slices)} slices for rank {len(self.dims)}")
        origin, extent = [0] * len(self.dims), list(self.dims)
        for dim, index in enumerate(slices):
            size = self.dims[dim]
            if isinstance(index, slice):
                start, stop, step = index.indices(size)
                if step != 1:
                    raise ConfigError(f"slice {index} of dimension {dim}: steps of 1 only")
                origin[dim], extent[dim] = start, max(0, stop - start)
                continue
            at = index.__index__()
            if not -size <= at < size:
                raise ConfigError(f"index {at} of dimension {dim} of size {size}")
            origin[dim], extent[dim] = at % size, 1
        return origin, extent

    def _check_codes(self, codes: Codes, name: str) -> None:
        if not isinstance(codes, np.ndarray) or codes.dtype != self.code_dtype:
            got = codes.dtype if isinstance(codes, np.ndarray) else type(codes).__name__
            raise TypeError(f"{name} of {self.dtype} must be a numpy array of {self.code_dtype}, not {got}")
        if codes.shape != self.dims:
            raise ConfigError(f"{name} of shape {codes.shape}, must be {self.dims}")
        if not codes.flags.c_contiguous or not codes.flags.aligned:
            raise TypeError(f"{name} must be C-contiguous and aligned to its elements")

    def _check_buffer(self, buffer: NDArray[np.uint8], name: str) -> None:
        if not isinstance(buffer, np.ndarray) or buffer.dtype != np.uint8 or buffer.ndim != 1:
            raise TypeError(f"{name} must be a one-dimensional numpy array of uint8")
        if not buffer.flags.c_contiguous:
            raise TypeError(f"{name} must be C-contiguous")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TiledLayout) and self._native == other._native

    def __hash__(self) -> int:
        return hash((self.text, self.dtype, self.dims))

    def __repr__(self) -> str:
        return f"TiledLayout.parse({self.text!r}, {self.dtype!r}, {self.dims})"


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an array that one rank holds: indices ``origin + i * step`` for i in [0, extent), per dimension.

    `axes` names for each dimension of the array the dimensions of the layout that its index is split over, major
    first: tokens kept in pages are (page, token of the page), packed heads are (group, head of the group). None
    where the ranks agree, or where the layout's dimensions multiply up to the extents in order. A dimension of the
    layout that stands alone may be larger than the extent (576 in 640): the rest is padding.
    """

    origin: tuple[int, ...]
    extent: tuple[int, ...]
    layout: TiledLayout
    step: tuple[int, ...] | None = None
    axes: tuple[tuple[int, ...], ...] | None = None


class ShardSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An array and how it is cut: global `dims`, `dtype` and the shards. Shards may overlap (replication)."""

    dims: tuple[int, ...]
    dtype: str
    shards: tuple[Shard, ...]


class Plan:
    """What goes from which source shard to which destination shard. Immutable; made once and applied often."""

    __slots__ = ("_native",)

    _native: _core.layout.Plan

    def __init__(self, native: _core.layout.Plan) -> None:
        """Use `plan` or `decode`."""
        self._native = native

    @property
    def src_bytes(self) -> list[int]:
        """Size of each source buffer."""
        return self._native.src_bytes

    @property
    def dst_bytes(self) -> list[int]:
        """Size of each destination buffer."""
        return self._native.dst_bytes

    @property
    def moved_bytes(self) -> int:
        return self._native.moved_bytes

    @property
    def steps(self) -> list[tuple[int, int, int]]:
        """(source, destination, number of loops) of each step."""
        return self._native.steps

    def apply(
        self,
        src_buffers: Sequence[NDArray[np.uint8]],
        dst_buffers: Sequence[NDArray[np.uint8]],
        *,
        num_threads: int = 1,
    ) -> None:
        """Writes every destination: each element once, padding zero. Buffers are uint8 arrays of the plan's sizes.

        Raises ConfigError, before a byte is written, for buffers of other sizes or numbers or that overlap.
        """
        for name, buffers in (("source", src_buffers), ("destination", dst_buffers)):
            for number, buffer in enumerate(buffers):
                if not isinstance(buffer, np.ndarray) or buffer.dtype != np.uint8:
                    raise TypeError(f"{name} {number} must be a numpy array of uint8")
        self._native.apply(list(src_buffers), list(dst_buffers), num_threads)

    def describe(self) -> str:
        """One line per step: what it moves, with which kernel, in pieces of which size."""
        return self._native.describe()

    def encode(self) -> bytes:
        """The plan as bytes, checksummed: see docs/formats/reshard-plan.md."""
        return self._native.encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The plan that `encode` wrote. Raises StorageError for anything else."""
        return cls(_core.layout.Plan.decode(data))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self._native == other._native

    __hash__ = None  # type: ignore[assignment]


def plan(src: ShardSpec, dst: ShardSpec) -> Plan:
    """How to make the shards of `dst` out of those of `src`.

    Raises ConfigError when dims, dtypes or element sizes differ, when a shard does not fit its array, or when no
    source holds an element that a destination wants (its index is named).
    """

    def shards(spec: ShardSpec) -> list[Any]:
        return [
            (
                list(shard.origin),
                list(shard.extent),
                list(shard.step or ()),
                shard.layout._native,
                [list(axes) for axes in shard.axes or ()],
            )
            for shard in spec.shards
        ]

    return Plan(_core.layout.plan(list(src.dims), src.dtype, shards(src), list(dst.dims), dst.dtype, shards(dst)))


def default(dtype: str, dims: Sequence[int], topology: str = "v6e:2x2") -> TiledLayout:
    """The layout that XLA:TPU gives an array in HBM unless told otherwise, asked from an installed libtpu.

    Runs libtpu in a process of its own, because it aborts on some inputs; TPU_LIBRARY_PATH names one that is not
    installed as a package. Raises UnsupportedError when there is none or it gives no answer; never guesses.
    """
    return defaults([(dtype, tuple(dims))], topology)[0]


def defaults(requests: Sequence[tuple[str, tuple[int, ...]]], topology: str = "v6e:2x2") -> list[TiledLayout]:
    """`default` for many arrays, with one process for all."""
    question = json.dumps({"topology": topology, "requests": [[dtype, list(dims)] for dtype, dims in requests]})
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "sglang_tpusync._libtpu_oracle"],
            input=question,
            capture_output=True,
            text=True,
            timeout=_ORACLE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UnsupportedError(f"libtpu gave no answer within {_ORACLE_TIMEOUT_S} s") from error
    if answer.returncode != 0:
        reason = answer.stderr.strip().splitlines()[-1:] or ["no message"]
        raise UnsupportedError(f"libtpu failed on {requests[:1]} (exit {answer.returncode}): {reason[0]}")
    texts = json.loads(answer.stdout.splitlines()[-1])
    return [TiledLayout.parse(text, dtype, dims) for text, (dtype, dims) in zip(texts, requests, strict=True)]
