"""The compiler itself, asked live: a changed libtpu is noticed here. `scripts/oracle` installs it; no TPU is needed."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from layout_reference import Reference, element_codes

from sglang_tpusync.errors import UnsupportedError
from sglang_tpusync.layout import DTYPES, TiledLayout, default, defaults

pytestmark = pytest.mark.timeout(900)  # the first run installs the compiler

ROOT = Path(__file__).resolve().parent.parent
NUM_ASKED = 2000
ASKED_DTYPES = [
    *("F32", "S32", "BF16", "F16", "S16", "F8E4M3FN", "F8E5M2", "S8", "U8", "PRED"),
    *("S4", "U4", "F4E2M1FN", "S2"),
]
# Compiled live: an abort of the compiler, which some shapes of packed elements cause, would end them all.
COMPILED_DTYPES = ["F32", "BF16", "F8E4M3FN", "S8"]
IMAGE_DIMS = [(20, 300), (5, 128), (64, 8, 128), (6, 4, 128), (9, 3, 130), (3, 4, 2, 128), (40, 1, 576), (5000,)]
PACKED_IMAGES = [("S4", (20, 300)), ("S4", (16, 256))]


@pytest.fixture(scope="module")
def compiler() -> Path:
    """The interpreter of an environment that has libtpu and jax."""
    done = subprocess.run(["./scripts/oracle"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.splitlines()[-1]) / "python"


@pytest.fixture
def libtpu(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (library,) = compiler.parent.parent.glob("lib/python3.*/site-packages/libtpu/libtpu.so")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))


@cache
def random_requests() -> list[tuple[str, tuple[int, ...]]]:
    choice = random.Random(20)
    sizes = (1, 2, 3, 4, 5, 8, 16, 17, 64, 100, 128, 130, 576, 640, 4096)
    requests: list[tuple[str, tuple[int, ...]]] = []
    while len(requests) < NUM_ASKED:
        dims = tuple(choice.choice(sizes) for _ in range(choice.randint(1, 5)))
        if _product(dims) < 2**36:
            requests.append((choice.choice(ASKED_DTYPES), dims))
    return requests


def _product(dims: tuple[int, ...]) -> int:
    product = 1
    for dim in dims:
        product *= dim
    return product


def compile_arrays(compiler: Path, topology: str, images: list[Any], arguments: list[Any]) -> dict[str, Any]:
    """What tests/compiler/device_arrays.py says, in a process of its own."""
    question = json.dumps({"topology": topology, "images": images, "arguments": arguments})
    command = [str(compiler), str(ROOT / "tests" / "compiler" / "device_arrays.py")]
    done = subprocess.run(command, input=question, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize("topology", ["v6e:2x2", "tpu7x:2x2x1"])
def test_two_thousand_random_layouts_are_understood(topology: str) -> None:
    for (dtype, dims), layout in zip(random_requests(), defaults(random_requests(), topology), strict=True):
        reference = Reference(dims, layout.minor_to_major, layout.tiles, layout.element_bits)
        assert layout.padded_bytes == reference.padded_bytes, (dtype, dims, layout.text)
        assert TiledLayout.parse(layout.text, dtype, dims) == layout
        last = [dim - 1 for dim in dims]
        assert layout.offset_bits(last) == reference.place(last)[0] * layout.element_bits


@pytest.mark.usefixtures("libtpu")
def test_sizes_are_those_of_the_compiler(compiler: Path) -> None:
    """The layouts that were asked are those that the compiler uses, and as large as it says."""
    small = [(dtype, dims) for dtype, dims in random_requests() if dtype in COMPILED_DTYPES and _product(dims) < 2**28]
    asked = small[:24]
    compiled = compile_arrays(compiler, "v6e:2x2", [], asked)["arguments"]
    for request, layout, (text, size) in zip(asked, defaults(asked), compiled, strict=True):
        assert (layout.text, layout.padded_bytes) == (text, size), request


@pytest.mark.parametrize("topology", ["v6e:2x2", "tpu7x:2x2x1"])
def test_bytes_are_those_in_compiled_executables(compiler: Path, topology: str) -> None:
    asked = [*itertools.product(COMPILED_DTYPES, IMAGE_DIMS), *PACKED_IMAGES]
    images = compile_arrays(compiler, topology, asked, [])["images"]
    discriminating = 0
    for (dtype, dims), found in zip(asked, images, strict=True):
        assert found is not None, (dtype, dims)
        layout = TiledLayout.parse(found[0], dtype, dims)
        tiled = layout.tile(element_codes(DTYPES[dtype], dims))
        assert hashlib.sha256(tiled.tobytes()).hexdigest() == found[1], (dtype, dims, layout.text)
        discriminating += tiled.tobytes() != element_codes(DTYPES[dtype], dims).tobytes()
    assert discriminating > len(asked) * 3 // 4


@pytest.mark.usefixtures("libtpu")
def test_the_default_of_a_pool() -> None:
    assert default("BF16", (4096, 64, 8, 128)).text == "{3,2,1,0:T(8,128)(2,1)}"


@pytest.mark.usefixtures("libtpu")
def test_what_libtpu_does_not_know_is_an_error_and_no_guess() -> None:
    with pytest.raises(UnsupportedError, match="libtpu failed"):
        default("BF16", (4, 4), topology="v99:1x1")


def test_without_libtpu_there_is_no_layout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))
    with pytest.raises(UnsupportedError, match="libtpu failed"):
        default("BF16", (4, 4))
