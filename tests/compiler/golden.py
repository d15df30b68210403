"""Makes tests/golden/ anew from XLA:TPU's compiler: scripts/golden runs this in the environment of scripts/oracle.

layouts.txt: the default HBM layout of many arrays, asked through the PJRT C API, with padded bytes and, where
dimension 0 is an untiled most major one, the bytes of a page. They come from the text by the definition alone
(tests/layout_reference.py), not from the code under test; every 50th array is compiled and the compiler's own size
compared.

images.txt: sha256 of the bytes of constants in HBM order, read out of compiled executables, padding bits zeroed.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

from device_arrays import BITS, NUMPY, argument, image, reference_of, sharding_of
from layout_reference import Reference

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
CHECK_EVERY = 50
LAYOUTS_HEAD = (
    "# Default HBM layouts of XLA:TPU: dtype and layout, then dims, padded bytes and page bytes. scripts/golden"
)
IMAGE_DIMS = [(16, 256), (20, 300), (7, 130), (5, 128), (3, 256), (2, 384), (64, 8, 128), (6, 4, 128), (5, 2, 256),
              (9, 3, 130), (3, 4, 2, 128), (2, 16, 4, 4, 128), (40, 1, 576), (8, 640), (300,), (5000,)]  # fmt: skip


def shapes() -> list[tuple[int, ...]]:
    """Pools of KV caches as engines allocate them, weights, and small odd arrays."""
    out: list[tuple[int, ...]] = []
    for pages, page_size, heads, dim in itertools.product((64, 4096), (1, 16, 64), (1, 2, 4, 8), (64, 128, 256)):
        out.append((pages, page_size, heads, dim))
    for pages, page_size, heads in itertools.product((64, 1000, 4096), (16, 64, 128), (1, 2, 4, 8)):
        out += [(pages, page_size, heads, packing, 128) for packing in (1, 2, 4, 8)]
    for tokens, heads, dim in itertools.product((64, 4096, 4097, 4160), (1, 2, 3, 8), (64, 128, 576)):
        out.append((tokens, heads, dim))
    for pages, page_size in itertools.product((64, 4096), (16, 32, 64)):
        out += [(pages, page_size, 576), (pages, page_size, 640), (pages, page_size, 1, 576), (pages, 576, page_size)]
        out += [(pages, page_size // packing, packing, 640) for packing in (1, 2, 4)]
    out += [(), (1,), (128,), (300,), (5000,), (4096, 14336), (4096, 4096), (3, 5), (20, 300), (2, 5, 7, 130), (0, 128)]
    rng = random.Random(5)
    for _ in range(40):
        out.append(tuple(rng.choice((1, 2, 3, 5, 8, 17, 32, 64, 130, 257)) for _ in range(rng.randint(1, 5))))
    return out


def ask(topology: str, requests: list[tuple[str, tuple[int, ...]]]) -> list[str]:
    question = json.dumps({"topology": topology, "requests": requests})
    oracle = str(ROOT / "sglang_tpusync" / "_libtpu_oracle.py")
    answer = subprocess.run([sys.executable, oracle], input=question, capture_output=True, text=True, check=True)
    return list(json.loads(answer.stdout.splitlines()[-1]))


def page_bytes(reference: Reference) -> int | None:
    dims = reference.dims
    tiled = len(reference.tiles[0]) if reference.tiles else 0
    if not dims or dims[0] == 0 or reference.order[0] != 0 or tiled >= len(dims):
        return None
    return reference.padded_bytes // dims[0]


def write_layouts() -> None:
    requests = [(dtype, dims) for dtype in BITS for dims in shapes()]
    texts = ask("v6e:2x2", requests)
    assert texts == ask("tpu7x:2x2x1", requests), "the topologies differ"
    sharding, num_checked = sharding_of("v6e:2x2"), 0
    groups: dict[tuple[str, str], list[str]] = {}
    for number, ((dtype, dims), text) in enumerate(zip(requests, texts, strict=True)):
        reference = reference_of(text, dtype, dims)
        page = page_bytes(reference)
        line = f"{','.join(map(str, dims)) or '-'} {reference.padded_bytes} {'-' if page is None else page}"
        groups.setdefault((dtype, text), []).append(line)
        if number % CHECK_EVERY == 0 and dtype in ("F32", "BF16", "F8E4M3FN", "S8") and dims and 0 not in dims:
            got = argument(sharding, dtype, dims)
            assert got == (text, reference.padded_bytes), (dtype, dims, got, text, reference.padded_bytes)
            num_checked += 1
    lines = [
        "# Default HBM layouts of XLA:TPU: dtype and layout, then dims, padded bytes and page bytes. scripts/golden"
    ]
    for (dtype, text), rows in groups.items():
        lines += [f"{dtype} {text}", *dict.fromkeys(rows)]
    (GOLDEN / "layouts.txt").write_text("\n".join(lines) + "\n")
    print(f"{len(requests)} layouts, {num_checked} of them compiled")


def write_images() -> None:
    seen: dict[tuple[str, str, tuple[int, ...]], str] = {}
    missing = []
    for topology in ("v6e:2x2", "tpu7x:2x2x1"):
        sharding = sharding_of(topology)
        for dtype, dims in itertools.product(NUMPY, IMAGE_DIMS):
            if BITS[dtype] < 8 and len(dims) < 2:
                continue  # libtpu aborts on these
            try:
                found = image(sharding, dtype, dims)
            except Exception as error:  # what this version of jax or of the compiler refuses
                found = None
                print(f"{topology} {dtype} {dims}: {str(error)[:80]}")
            if found is None:
                missing.append((topology, dtype, dims))
            else:
                seen.setdefault((dtype, found[0], dims), found[1])
    lines = ["# sha256 of constants in HBM order, padding bits zeroed: dtype, layout, dims, digest. scripts/golden"]
    lines += [f"{dtype} {layout} {','.join(map(str, dims))} {digest}" for (dtype, layout, dims), digest in seen.items()]
    (GOLDEN / "images.txt").write_text("\n".join(lines) + "\n")
    print(f"{len(seen)} images; without one: {missing}")


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    wanted = sys.argv[1:] or ["layouts", "images"]
    if "layouts" in wanted:
        write_layouts()
    if "images" in wanted:
        write_images()


if __name__ == "__main__":
    main()
