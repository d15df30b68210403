"""The compiler itself, asked live: a changed libtpu is noticed here. Needs the `libtpu` wheel, no TPU."""

from __future__ import annotations

import random

import pytest
from layout_reference import Reference

from sglang_tpusync.errors import UnsupportedError
from sglang_tpusync.layout import default, defaults

pytest.importorskip("libtpu", reason="the compiler's wheel is not installed: pip install libtpu")

NUM_ASKED = 2000
DTYPES = ["F32", "S32", "BF16", "F16", "S16", "F8E4M3FN", "F8E5M2", "S8", "U8", "PRED", "S4", "U4", "F4E2M1FN", "S2"]


def random_requests() -> list[tuple[str, tuple[int, ...]]]:
    choice = random.Random(20)
    sizes = (1, 2, 3, 4, 5, 8, 16, 17, 64, 100, 128, 130, 576, 640, 4096)
    requests = []
    while len(requests) < NUM_ASKED:
        dims = tuple(choice.choice(sizes) for _ in range(choice.randint(1, 5)))
        if dims and len(dims) > 0 and _product(dims) < 2**36:
            requests.append((choice.choice(DTYPES), dims))
    return requests


def _product(dims: tuple[int, ...]) -> int:
    product = 1
    for dim in dims:
        product *= dim
    return product


@pytest.mark.parametrize("topology", ["v6e:2x2", "tpu7x:2x2x1"])
def test_two_thousand_random_layouts_are_understood(topology: str) -> None:
    for (dtype, dims), layout in zip(random_requests(), defaults(random_requests(), topology), strict=True):
        reference = Reference(dims, layout.minor_to_major, layout.tiles, layout.element_bits)
        assert layout.padded_bytes == reference.padded_bytes, (dtype, dims, layout.text)
        assert type(layout).parse(layout.text, dtype, dims) == layout
        last = [dim - 1 for dim in dims]
        assert layout.offset_bits(last) == reference.place(last)[0] * layout.element_bits


def test_the_default_of_a_pool() -> None:
    assert default("BF16", (4096, 64, 8, 128)).text == "{3,2,1,0:T(8,128)(2,1)}"


def test_what_libtpu_does_not_know_is_an_error_and_no_guess() -> None:
    with pytest.raises(UnsupportedError, match="libtpu failed"):
        default("BF16", (4, 4), topology="v99:1x1")
