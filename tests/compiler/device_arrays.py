"""What XLA:TPU's compiler does with an array: its layout, its size, and its bytes in HBM order. No TPU is needed.

Runs in the environment of scripts/oracle and, because libtpu aborts on some inputs, as a process of its own. Standard
input: ``{"topology": "v6e:2x2", "images": [["BF16", [20, 300]]], "arguments": [["F32", [4, 5]]]}``. The last line of
standard output: ``{"images": [[layout, sha256] or null], "arguments": [[layout, bytes]]}``.

An image is a constant, read out of a compiled executable; digests are of all its bytes with padding bits zeroed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_WORKER_ID", "0")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v6e-4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import topologies
from layout_reference import Reference, element_codes

__all__ = ["BITS", "NUMPY", "argument", "image", "reference_of", "sharding_of"]

Dims = tuple[int, ...]

BITS = {"F32": 32, "S32": 32, "BF16": 16, "F16": 16, "S16": 16, "F8E4M3FN": 8, "F8E5M2": 8, "S8": 8, "U8": 8, "PRED": 8,
        "S4": 4, "U4": 4, "F4E2M1FN": 4, "S2": 2}  # fmt: skip
NUMPY = {"F32": "float32", "S32": "int32", "BF16": "bfloat16", "F16": "float16", "S16": "int16",
         "F8E4M3FN": "float8_e4m3fn", "F8E5M2": "float8_e5m2", "S8": "int8", "U8": "uint8", "S4": "int4",
         "F4E2M1FN": "float4_e2m1fn", "S2": "int2"}  # fmt: skip
# Every file of Riegeli, the container of newer executables, begins so; a header lies before every 64 KiB block.
RIEGELI_SIGNATURE = bytes.fromhex("83af70d10d884a3f")
RIEGELI_BLOCK_BYTES, RIEGELI_HEADER_BYTES = 65536, 24


def numpy_dtype(dtype: str) -> Any:
    return getattr(ml_dtypes, NUMPY[dtype], None) or np.dtype(NUMPY[dtype])


def sharding_of(topology: str) -> Any:
    """All of an array on the first device of a topology."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    return jax.sharding.SingleDeviceSharding(device)


def reference_of(text: str, dtype: str, dims: Dims) -> Reference:
    match = re.fullmatch(r"\{([\d,]*)(?::(?:T((?:\([\d,]+\))+))?(?:E\((\d+)\))?)?\}", text)
    assert match, text
    order = [int(i) for i in match[1].split(",") if i]
    tiles = [[int(i) for i in tile.split(",")] for tile in re.findall(r"\(([\d,]+)\)", match[2] or "")]
    return Reference(dims, order, tiles, int(match[3] or max(8, BITS[dtype])))


def argument(sharding: Any, dtype: str, dims: Dims) -> tuple[str, int]:
    """The layout that the compiler gives an argument, and its bytes in HBM."""
    struct = jax.ShapeDtypeStruct(dims, jnp.dtype(numpy_dtype(dtype)), sharding=sharding)
    compiled = jax.jit(lambda x: x).lower(struct).compile()
    layout = str(compiled.runtime_executable().get_parameter_layouts()[0])
    return layout, compiled.memory_analysis().argument_size_in_bytes


def image(sharding: Any, dtype: str, dims: Dims) -> tuple[str, str] | None:
    """Layout and digest of a constant of `element_codes`; None where the compiler keeps no such constant."""
    codes = element_codes(BITS[dtype], dims)
    constant = jnp.asarray(codes.view(numpy_dtype(dtype)))
    scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding)
    function = jax.jit(lambda n: (constant, n), out_shardings=sharding)
    executable = function.lower(scalar).compile().runtime_executable()
    shape = ",".join(map(str, dims))
    # The layout of the constant, which need not be that of the output.
    match = re.search(rf"\[{shape}\](\{{[^ ]*\}}) constant\(", executable.hlo_modules()[0].to_string())
    if not match:
        return None
    reference = reference_of(match[1], dtype, dims)
    mask = reference.tile(np.full(dims, (1 << reference.bits) - 1, dtype=np.uint64), 0)
    found = find_image(payload(executable.serialize()), reference.tile(codes, 0), mask)
    return None if found is None else (match[1], hashlib.sha256(found.tobytes()).hexdigest())


def payload(serialized: bytes) -> bytes:
    """The executable without the headers of its container."""
    start = serialized.find(RIEGELI_SIGNATURE)
    if start < 0:
        return serialized
    body = serialized[start:]
    blocks = range(0, len(body), RIEGELI_BLOCK_BYTES)
    return b"".join(body[at + RIEGELI_HEADER_BYTES : at + RIEGELI_BLOCK_BYTES] for at in blocks)


def find_image(raw: bytes, image: np.ndarray, mask: np.ndarray) -> np.ndarray | None:
    """The bytes of the executable that equal `image` wherever `mask` says so, the other bits zeroed."""
    live = np.flatnonzero(mask == 0xFF)
    if len(live) == 0:
        return None
    stretch = live[: int(np.argmax(np.diff(live, append=live[-1] + 2) != 1)) + 1]
    needle, at = image[stretch].tobytes(), -1
    while (at := raw.find(needle, at + 1)) >= 0:
        begin = at - int(stretch[0])
        if begin < 0 or begin + len(image) > len(raw):
            continue
        found = np.frombuffer(raw, dtype=np.uint8, count=len(image), offset=begin)
        if np.array_equal(found & mask, image & mask):
            return found & mask
    return None


def main() -> None:
    question = json.load(sys.stdin)
    sharding = sharding_of(question["topology"])
    images = [image(sharding, dtype, tuple(dims)) for dtype, dims in question["images"]]
    arguments = [argument(sharding, dtype, tuple(dims)) for dtype, dims in question["arguments"]]
    sys.stdout.write("\n" + json.dumps({"images": images, "arguments": arguments}) + "\n")


if __name__ == "__main__":
    main()
