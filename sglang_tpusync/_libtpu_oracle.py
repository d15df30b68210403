"""Asks libtpu for default layouts through the public PJRT C API. Runs as a process of its own: libtpu may abort.

Standard input: ``{"topology": "v6e:2x2", "requests": [["BF16", [4096, 64, 8, 128]], ...]}``; the last line of
standard output: the layouts' texts as a JSON list. Needs the `libtpu` package, or in TPU_LIBRARY_PATH the path of a
libtpu.so, and nothing else; no TPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

__all__ = ["main"]

# PJRT_Buffer_Type of the C API.
BUFFER_TYPES = {
    **{"PRED": 1, "S8": 2, "S16": 3, "S32": 4, "S64": 5, "U8": 6, "U16": 7, "U32": 8, "U64": 9},
    **{"F16": 10, "F32": 11, "F64": 12, "BF16": 13, "C64": 14, "C128": 15},
    **{"F8E5M2": 16, "F8E4M3FN": 17, "F8E4M3B11FNUZ": 18, "F8E5M2FNUZ": 19, "F8E4M3FNUZ": 20},
    **{"S4": 21, "U4": 22, "S2": 24, "U2": 25, "F8E4M3": 26, "F8E3M4": 27, "F8E8M0FNU": 28, "F4E2M1FN": 29},
}

# Places of functions in PJRT_Api, counted from its first one, and of the extension in its chain.
FIRST_FUNCTION_OFFSET = 40
ERROR_MESSAGE, PLUGIN_INITIALIZE, TOPOLOGY_CREATE = 1, 3, 82
LAYOUTS_EXTENSION = 4
EXTENSION_FIRST_FUNCTION_OFFSET = 24
LAYOUT_DESTROY, LAYOUT_SERIALIZE, TOPOLOGY_DEFAULT_LAYOUT = 0, 1, 4


class _Args(ctypes.Structure):
    """The head of every argument struct."""

    struct_size: int
    _fields_: ClassVar[Any] = (("struct_size", ctypes.c_size_t), ("extension_start", ctypes.c_void_p))

    def __init__(self, **values: Any) -> None:
        super().__init__(struct_size=ctypes.sizeof(self), **values)


class _ErrorMessage(_Args):
    message: int
    message_size: int
    _fields_ = (("error", ctypes.c_void_p), ("message", ctypes.c_void_p), ("message_size", ctypes.c_size_t))


class _TopologyCreate(_Args):
    topology: int
    _fields_ = (
        ("topology_name", ctypes.c_char_p),
        ("topology_name_size", ctypes.c_size_t),
        ("create_options", ctypes.c_void_p),
        ("num_options", ctypes.c_size_t),
        ("topology", ctypes.c_void_p),
    )


class _DefaultLayout(_Args):
    layout: int
    _fields_ = (
        ("topology", ctypes.c_void_p),
        ("type", ctypes.c_int),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
        ("num_dims", ctypes.c_size_t),
        ("layout", ctypes.c_void_p),
    )


class _Layout(_Args):
    _fields_ = (("layout", ctypes.c_void_p),)


class _Serialize(_Args):
    bytes: int
    size: int
    serialized: int
    deleter: int
    _fields_ = (
        ("layout", ctypes.c_void_p),
        ("bytes", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("serialized", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_CALL = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class Oracle:
    """One topology of one loaded libtpu. Confined to one thread."""

    def __init__(self, library: Path, topology: str) -> None:
        get_api = ctypes.CDLL(str(library)).GetPjrtApi
        get_api.restype = ctypes.c_void_p
        self._api = int(get_api())
        self._call(self._function(PLUGIN_INITIALIZE), _Args())
        self._layouts = self._extension(LAYOUTS_EXTENSION)
        name = topology.encode()
        created = _TopologyCreate(topology_name=name, topology_name_size=len(name))
        self._call(self._function(TOPOLOGY_CREATE), created)
        self._topology = created.topology

    def layout(self, dtype: str, dims: list[int]) -> str:
        array = (ctypes.c_int64 * len(dims))(*dims)
        asked = _DefaultLayout(
            topology=self._topology, type=BUFFER_TYPES[dtype.upper()], dims=array, num_dims=len(dims)
        )
        self._call(self._layouts_function(TOPOLOGY_DEFAULT_LAYOUT), asked)
        text = _Serialize(layout=asked.layout)
        self._call(self._layouts_function(LAYOUT_SERIALIZE), text)
        out = ctypes.string_at(text.bytes, text.size).decode()
        if text.deleter:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(text.deleter)(text.serialized)
        self._call(self._layouts_function(LAYOUT_DESTROY), _Layout(layout=asked.layout))
        return out

    def _function(self, number: int) -> int:
        return _pointer(self._api + FIRST_FUNCTION_OFFSET + 8 * number)

    def _layouts_function(self, number: int) -> int:
        return _pointer(self._layouts + EXTENSION_FIRST_FUNCTION_OFFSET + 8 * number)

    def _extension(self, wanted: int) -> int:
        at = _pointer(self._api + 8)
        while at:
            if ctypes.c_int.from_address(at + 8).value == wanted:
                return at
            at = _pointer(at + 16)
        raise RuntimeError(f"this libtpu has no PJRT extension of type {wanted}")

    def _call(self, function: int, args: _Args) -> None:
        error = _CALL(function)(ctypes.addressof(args))
        if error:
            message = _ErrorMessage(error=error)
            _CALL(self._function(ERROR_MESSAGE))(ctypes.addressof(message))
            raise RuntimeError(ctypes.string_at(message.message, message.message_size).decode())


def _pointer(address: int) -> int:
    return ctypes.c_void_p.from_address(address).value or 0


def library_path() -> Path:
    """TPU_LIBRARY_PATH, as in jax and torch_tpu, else the file of the installed package."""
    named = os.environ.get("TPU_LIBRARY_PATH")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("libtpu")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("libtpu is not installed")
    return Path(spec.submodule_search_locations[0]) / "libtpu.so"


def main() -> None:
    # Without these libtpu looks for a metadata server and warns.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_WORKER_ID", "0")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v6e-4")
    question = json.load(sys.stdin)
    oracle = Oracle(library_path(), question["topology"])
    answer = [oracle.layout(dtype, dims) for dtype, dims in question["requests"]]
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # libtpu's own clean-up at exit is not needed, and may wait


if __name__ == "__main__":
    main()
