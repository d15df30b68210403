"""A slow model of tiled layouts, written from the definition in XLA's documentation and from nothing of ours."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

__all__ = ["Reference", "element_codes"]


class Reference:
    """Places of elements by the recursive definition: linear_index((floor(e/t), e mod t), (ceil(d/t), t))."""

    def __init__(
        self, dims: Sequence[int], minor_to_major: Sequence[int], tiles: Sequence[Sequence[int]], bits: int
    ) -> None:
        self.dims, self.bits = tuple(dims), bits
        self.order = [int(dim) for dim in reversed(minor_to_major)]
        self.tiles = [tuple(tile) for tile in tiles]

    def place(self, index: Sequence[int]) -> tuple[int, int]:
        """(number of the element's cell, number of cells), walking the tiles one after the other."""
        shape = [self.dims[dim] for dim in self.order]
        at = [index[dim] for dim in self.order]
        for tile in self.tiles:
            while len(shape) < len(tile):
                shape, at = [1, *shape], [0, *at]
            lead = len(shape) - len(tile)
            outer = [-(-size // t) for size, t in zip(shape[lead:], tile, strict=True)]
            inner_at = [i % t for i, t in zip(at[lead:], tile, strict=True)]
            outer_at = [i // t for i, t in zip(at[lead:], tile, strict=True)]
            shape, at = [*shape[:lead], *outer, *tile], [*at[:lead], *outer_at, *inner_at]
        cell, cells = 0, 1
        for size, i in zip(shape, at, strict=True):
            cell, cells = cell * size + i, cells * size
        return cell, cells

    def indices(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*(range(dim) for dim in self.dims)))

    @property
    def num_cells(self) -> int:
        return 0 if 0 in self.dims else self.place([0] * len(self.dims))[1]

    @property
    def padded_bytes(self) -> int:
        return -(-self.num_cells * self.bits // 8)

    def tile(self, codes: np.ndarray, fill: int) -> np.ndarray:
        cells = np.full(self.num_cells, fill, dtype=np.uint64)
        if self.num_cells:
            places, _ = self.place(list(np.indices(self.dims)))  # type: ignore[arg-type]
            cells[places] = codes
        bits = (cells[:, None] >> np.arange(self.bits, dtype=np.uint64)) & np.uint64(1)
        return np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little")

    def live_bytes(self, box: Sequence[range]) -> list[int] | None:
        """Bytes of the elements of a box, ascending; None where they are not whole bytes."""
        bits = sorted(
            self.place(index)[0] * self.bits + bit for index in itertools.product(*box) for bit in range(self.bits)
        )
        counts: dict[int, int] = {}
        for bit in bits:
            counts[bit // 8] = counts.get(bit // 8, 0) + 1
        return None if any(count != 8 for count in counts.values()) else sorted(counts)


def element_codes(bits: int, dims: Sequence[int]) -> np.ndarray:
    """Codes of `bits` (up to 32) by a closed formula: what golden images hold. The C++ tests have it too."""
    i = np.arange(int(np.prod(dims)), dtype=np.uint64)
    mixed = (i * np.uint64(2654435761) + np.uint64(12345)) & np.uint64(0xFFFFFFFF)
    if bits == 32:
        codes = mixed.astype(np.uint32)
    elif bits == 16:
        codes = ((i * np.uint64(40503) + np.uint64(77)) & np.uint64(0xFFFF)).astype(np.uint16)
    else:
        codes = ((mixed >> np.uint64(13)) & np.uint64((1 << bits) - 1)).astype(np.uint8)
    return codes.reshape(dims)
