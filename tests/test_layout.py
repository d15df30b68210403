"""Layouts against the definition, against the compiler's own data, and against themselves."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_reference import Reference, element_codes

from sglang_tpusync import _core
from sglang_tpusync.errors import ConfigError, UnsupportedError
from sglang_tpusync.layout import DTYPES, RUN_DTYPE, TiledLayout

GOLDEN = Path(__file__).parent / "golden"

# One type per size of element; names with other sizes of cells come from golden data.
DTYPE_OF_BITS = {2: "S2", 4: "S4", 8: "F8E4M3FN", 16: "BF16", 32: "F32", 64: "F64"}
XLA_TILES = {
    2: [[[8, 128], [16, 1]], [[16, 128], [16, 1]]],
    4: [[[8, 128], [8, 1]], [[64, 128], [8, 1]]],
    8: [[[4, 128], [4, 1]], [[8, 128], [4, 1]], [[32, 128], [4, 1]], [[512], [128], [4, 1]]],
    16: [[[2, 128], [2, 1]], [[8, 128], [2, 1]], [[16, 128], [2, 1]], [[256], [128], [2, 1]]],
    32: [[[1, 128]], [[8, 128]], [[256]]],
    64: [[[8, 128]], []],
}


def text_of(minor_to_major: list[int], tiles: list[list[int]], bits: int) -> str:
    text = "{" + ",".join(map(str, minor_to_major))
    if tiles or bits < 8:
        text += ":"
    if tiles:
        text += "T" + "".join("(" + ",".join(map(str, tile)) + ")" for tile in tiles)
    return text + (f"E({bits})" if bits < 8 else "") + "}"


@st.composite
def layouts(draw: st.DrawFn) -> tuple[TiledLayout, Reference]:
    """Layouts that XLA prints, with small arrays, and others with odd tiles."""
    bits = draw(st.sampled_from(sorted(DTYPE_OF_BITS)))
    rank = draw(st.integers(0, 4))
    dims = [draw(st.integers(0, 9) if rank > 2 else st.integers(0, 40)) for _ in range(rank)]
    minor_to_major = draw(st.permutations(range(rank)))
    if draw(st.booleans()):
        tiles = draw(st.sampled_from(XLA_TILES[bits]))
    else:
        tile = st.lists(st.integers(1, 6), min_size=1, max_size=3)
        tiles = draw(st.lists(tile, max_size=3))
    layout = TiledLayout.parse(text_of(minor_to_major, tiles, bits), DTYPE_OF_BITS[bits], dims)
    return layout, Reference(dims, minor_to_major, tiles, bits)


def random_codes(layout: TiledLayout, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    top = 1 << min(DTYPES[layout.dtype], 63)
    return rng.integers(0, top, layout.dims, dtype=np.uint64).astype(layout.code_dtype)


@given(layouts(), st.integers(0, 2**32), st.booleans())
@settings(max_examples=300, deadline=None)
def test_tiling_follows_the_definition(case: tuple[TiledLayout, Reference], seed: int, filled: bool) -> None:
    layout, reference = case
    codes = random_codes(layout, seed)
    fill = (1 << DTYPES[layout.dtype]) - 2 if filled else 0
    expected = reference.tile(codes, fill)
    assert layout.padded_bytes == reference.padded_bytes
    for kernels in _core.layout.KERNELS:
        for num_threads in (1, 3):
            out = np.full(layout.padded_bytes, 0xA5, dtype=np.uint8)
            layout._native.tile(out, codes, fill, num_threads, kernels)
            # Bits behind the last cell of the last byte belong to nobody and are zero.
            np.testing.assert_array_equal(out, expected)


@given(layouts(), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_untiling_gives_the_codes_back_whatever_padding_holds(case: tuple[TiledLayout, Reference], seed: int) -> None:
    layout, _ = case
    codes = random_codes(layout, seed)
    tiled = layout.tile(codes)
    np.testing.assert_array_equal(layout.untile(tiled), codes)
    mask = layout.live_mask()
    np.testing.assert_array_equal(tiled & ~mask, 0)
    for kernels in _core.layout.KERNELS:
        back = np.zeros_like(codes)
        layout._native.untile(back, tiled | ~mask, 1, kernels)
        np.testing.assert_array_equal(back, codes)


@given(layouts())
@settings(max_examples=200, deadline=None)
def test_offsets_follow_the_definition(case: tuple[TiledLayout, Reference]) -> None:
    layout, reference = case
    for index in reference.indices()[:200]:
        assert layout.offset_bits(index) == reference.place(index)[0] * reference.bits


@given(layouts(), st.data())
@settings(max_examples=300, deadline=None)
def test_runs_are_the_bytes_of_the_rectangle_in_order(case: tuple[TiledLayout, Reference], data: st.DataObject) -> None:
    layout, reference = case
    box = []
    for dim in layout.dims:
        begin = data.draw(st.integers(0, dim))
        box.append(range(begin, data.draw(st.integers(begin, dim))))
    expected = reference.live_bytes(box)
    slices = [slice(r.start, r.stop) for r in box]
    if expected is None:
        with pytest.raises(ConfigError, match="whole bytes"):
            layout.runs(slices)
        return
    runs = layout.runs(slices)
    assert runs.dtype == RUN_DTYPE
    got = [
        int(run["offset"] + i * run["stride"] + j)
        for run in runs
        for i in range(run["count"])
        for j in range(run["length"])
    ]
    assert got == expected
    # Merged: a piece never starts where the one before it ends.
    pieces = [int(run["offset"] + i * run["stride"]) for run in runs for i in range(run["count"])]
    ends = [int(run["offset"] + i * run["stride"] + run["length"]) for run in runs for i in range(run["count"])]
    assert not set(pieces[1:]) & set(ends[:-1])


@given(layouts())
@settings(max_examples=100, deadline=None)
def test_text_survives_a_round_trip(case: tuple[TiledLayout, Reference]) -> None:
    layout, _ = case
    again = TiledLayout.parse(layout.text, layout.dtype, layout.dims)
    assert again == layout
    assert hash(again) == hash(layout)


def golden_layouts() -> list[tuple[str, str, tuple[int, ...], int, int | None]]:
    rows, dtype, text = [], "", ""
    for line in (GOLDEN / "layouts.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        if "{" in line:
            dtype, text = line.split()
            continue
        dims, padded, page = line.split()
        shape = tuple(int(dim) for dim in dims.split(",")) if dims != "-" else ()
        rows.append((dtype, text, shape, int(padded), None if page == "-" else int(page)))
    return rows


def test_every_golden_layout() -> None:
    rows = golden_layouts()
    assert len(rows) > 2000
    for dtype, text, dims, padded_bytes, page_bytes in rows:
        layout = TiledLayout.parse(text, dtype, dims)
        assert (layout.text, layout.padded_bytes, layout.page_bytes) == (text, padded_bytes, page_bytes), (dtype, dims)


def golden_images() -> list[list[str]]:
    lines = (GOLDEN / "images.txt").read_text().splitlines()
    return [line.split() for line in lines if not line.startswith("#")]


def test_every_golden_image() -> None:
    images = golden_images()
    assert len(images) > 100
    for dtype, text, dims, digest in images:
        layout = TiledLayout.parse(text, dtype, [int(dim) for dim in dims.split(",")])
        tiled = layout.tile(element_codes(DTYPES[dtype], layout.dims))
        assert hashlib.sha256(tiled.tobytes()).hexdigest() == digest, (dtype, text, dims)


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("", 0),
        ("3,2", 0),
        ("{1,0", 4),
        ("{1,0}x", 5),
        ("{1,0:}", 5),
        ("{1,,0}", 3),
        ("{1,0:T}", 6),
        ("{1,0:T()}", 7),
        ("{1,0:T(8,}", 9),
        ("{1,0:T(8,128)(2,1}", 17),
        ("{1,0:T(-8,128)}", 7),
        ("{1,0:T(99999999999999999999)}", 7),
        ("{1,0:E(0)}", 7),
        ("{1,0:S(5)T(8,128)}", 9),
        ("{1 ,0}", 2),
    ],
)
def test_malformed_text_is_refused_with_its_position(text: str, position: int) -> None:
    with pytest.raises(ConfigError, match=f"position {position}:"):
        TiledLayout.parse(text, "F32", (16, 16))


@pytest.mark.parametrize(
    "text",
    [
        "{1,0:T(*,128)}",
        "{1,0:T(8,128)(2,1)(2,1)(2,1)}",
        "{1,0:T(8,128)L(2)}",
        "{1,0:D(D,C)}",
        "{1,0:T(8,128)#(u32)}",
        "{1,0:T(8,128)M(4)}",
        "{1,0:T(8,128)SC(0:3)}",
        "{8,7,6,5,4,3,2,1,0}",
        "{1,0:T(8,1048576)}",
        "{1,0:T(8,128)E(4)}",
    ],
)
def test_what_cannot_be_represented_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedError):
        TiledLayout.parse(text, "F32", (16, 16))


@pytest.mark.parametrize(
    ("text", "dtype", "dims", "message"),
    [
        ("{1,0}", "F32", (4,), "2 dimensions in the layout, 1 in the array"),
        ("{1,1}", "F32", (4, 4), "no permutation"),
        ("{2,0}", "F32", (4, 4), "no permutation"),
        ("{1,0}", "F32", (4, -1), "-1 is negative"),
        ("{1,0}", "F33", (4, 4), "dtype 'F33' is unknown"),
        ("{1,0}", "F32", (2**40, 2**40), "2\\^60 bits"),
        ("{1,0:T(8,128)}", "F32", (2**31, 2**31), "2\\^60 bits"),
        ("{0}", "F32", (2**62,), "2\\^60 bits"),
        ("{1,0:T(0,128)}", "F32", (4, 4), "tile of size 0"),
    ],
)
def test_contradictions_are_refused_with_the_numbers(
    text: str, dtype: str, dims: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TiledLayout.parse(text, dtype, dims)


def test_nothing_overflows_at_2_to_the_40_elements() -> None:
    layout = TiledLayout.parse("{1,0:T(8,128)(2,1)}", "BF16", (2**20, 2**20))
    assert layout.padded_bytes == 2**41
    assert layout.page_bytes is None
    assert layout.offset_bits((2**20 - 1, 2**20 - 1)) == 2**44 - 16
    (run,) = layout.runs()
    assert run.item() == (0, 2**41, 1, 0)
    (head,) = layout.runs((slice(8, 16),))
    assert head.item() == (2**24, 2**24, 1, 0)
    with pytest.raises(ConfigError):
        layout.untile(np.zeros(10, dtype=np.uint8), out=np.zeros((1, 1), dtype=np.uint16))
    one = TiledLayout.parse("{0:T(1024)}", "F32", (2**40 + 1,))
    assert one.padded_bytes == 2**42 + 4096
    assert one.runs()[0].item() == (0, 2**42 + 4, 1, 0)


def test_wrong_arrays_are_refused() -> None:
    layout = TiledLayout.parse("{1,0:T(8,128)(2,1)}", "BF16", (8, 128))
    codes = np.zeros((8, 128), dtype=np.uint16)
    tiled = layout.tile(codes)
    wrong: list[tuple[type[Exception], Any]] = [
        (TypeError, codes.astype(np.uint32)),
        (TypeError, codes.astype(np.float16)),
        (TypeError, np.zeros((128, 8), dtype=np.uint16).T),
        (TypeError, codes.tolist()),
        (TypeError, codes.astype(">u2")),
        (TypeError, np.zeros(2049, dtype=np.uint8)[1:].view(np.uint16).reshape(8, 128)),
        (ConfigError, codes[:4]),
    ]
    for error, value in wrong:
        with pytest.raises(error):
            layout.tile(value)
    for buffer in (tiled[:-1], tiled.astype(np.uint16), np.repeat(tiled, 2)[::2]):
        with pytest.raises((TypeError, ConfigError)):
            layout.untile(buffer)
    with pytest.raises(ConfigError, match="overlap"):
        layout.untile(tiled, out=tiled.view(np.uint16).reshape(8, 128))
    with pytest.raises(ConfigError, match="fill 65536"):
        layout.tile(codes, fill=65536)
    read_only = tiled.copy()
    read_only.flags.writeable = False
    with pytest.raises(TypeError, match="writable"):
        layout.tile(codes, out=read_only)
    with pytest.raises(ConfigError, match="not in \\[0, 8\\)"):
        layout.offset_bits((8, 0))
    with pytest.raises(ConfigError, match="steps of 1"):
        layout.runs((slice(0, 8, 2),))


def test_large_arrays_go_around_the_caches_and_over_threads() -> None:
    rng = np.random.default_rng(1)
    for dtype, text, dims in [
        ("BF16", "{3,2,1,0:T(8,128)(2,1)}", (64, 64, 8, 128)),
        ("F8E4M3FN", "{3,2,1,0:T(8,128)(4,1)}", (128, 64, 8, 128)),
        ("BF16", "{0,3,2,1:T(8,128)(2,1)}", (128, 64, 8, 64)),
        ("BF16", "{2,0,1:T(8,128)(2,1)}", (4160, 2, 576)),
        ("F32", "{2,1,0:T(8,128)}", (100, 100, 200)),
    ]:
        layout = TiledLayout.parse(text, dtype, dims)
        codes = rng.integers(0, 1 << DTYPES[dtype], dims, dtype=np.uint64).astype(layout.code_dtype)
        plain = np.zeros(layout.padded_bytes, dtype=np.uint8)
        layout._native.tile(plain, codes, 0, 1, "portable")
        for kernels in _core.layout.KERNELS:
            for num_threads in (1, 2, 5):
                tiled = layout.tile(codes)
                layout._native.tile(tiled, codes, 0, num_threads, kernels)
                np.testing.assert_array_equal(tiled, plain)
                back = layout.untile(tiled, num_threads=num_threads)
                layout._native.untile(back, tiled, num_threads, kernels)
                np.testing.assert_array_equal(back, codes)
