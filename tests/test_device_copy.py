"""Copies between device and host pools of SGLang, compared with plain tensor indexing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tpusync import _core
from sglang_tpusync.errors import ConfigError

torch = pytest.importorskip("torch")

HOST_LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
DTYPES = [torch.bfloat16, torch.float16, torch.uint8, torch.float32]


@dataclass
class Pools:
    """Device buffers [slots, heads, dim] per part and layer, one host buffer per part, with other random content."""

    device: list[list[Any]]  # [part][layer]
    host: list[Any]  # [part], dims as SGLang allocates them
    layout: str
    page_size: int
    num_layers: int
    num_heads: int
    row_gap: int  # elements between two device rows

    @property
    def device_geometry(self) -> _core.PageGeometry:
        buffer = self.device[0][0]
        item = buffer.element_size()
        return _core.PageGeometry.device(
            num_layers=self.num_layers,
            num_slots=buffer.shape[0],
            row_bytes=buffer[0].numel() * item,
            row_stride_bytes=buffer.stride(0) * item,
            page_size=self.page_size,
        )

    @property
    def host_geometry(self) -> _core.PageGeometry:
        host = self.host[0]
        return _core.PageGeometry.host(
            layout=self.layout,  # type: ignore[arg-type]
            num_layers=self.num_layers,
            num_slots=host.numel() // (self.num_layers * self.device[0][0][0].numel()),
            num_heads=self.num_heads,
            head_bytes=host.shape[-1] * host.element_size(),
            page_size=self.page_size,
        )

    def host_row(self, part: int, layer: int, slot: int) -> Any:
        """A view of (heads, dim): the definition of the layouts, by indexing."""
        host, page, token = self.host[part], slot // self.page_size, slot % self.page_size
        if self.layout == "layer_first":
            return host[layer, slot]
        if self.layout == "page_first":
            return host[slot, layer]
        if self.layout == "page_first_direct":
            return host[page, layer, token]
        return host[page, :, token, layer]


def random_bits(shape: tuple[int, ...], dtype: Any, generator: Any) -> Any:
    item = torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(0, 256, (*shape[:-1], shape[-1] * item), dtype=torch.uint8, generator=generator)
    return bits.view(dtype)


def make_pools(
    *,
    seed: int,
    num_parts: int,
    num_layers: int,
    num_heads: int,
    dim: int,
    dtype: Any,
    layout: str,
    page_size: int,
    device_pages: int,
    host_pages: int,
    row_gap: int = 0,
) -> Pools:
    generator = torch.Generator().manual_seed(seed)
    dims = {
        "layer_first": (num_layers, host_pages * page_size, num_heads, dim),
        "page_first": (host_pages * page_size, num_layers, num_heads, dim),
        "page_first_direct": (host_pages, num_layers, page_size, num_heads, dim),
        "page_head": (host_pages, num_heads, page_size, num_layers, dim),
    }[layout]
    row = num_heads * dim

    def device_buffer() -> Any:
        rows = random_bits((device_pages * page_size, row + row_gap), dtype, generator)
        return rows[:, :row].unflatten(1, (num_heads, dim))

    return Pools(
        device=[[device_buffer() for _ in range(num_layers)] for _ in range(num_parts)],
        host=[random_bits(dims, dtype, generator) for _ in range(num_parts)],
        layout=layout,
        page_size=page_size,
        num_layers=num_layers,
        num_heads=num_heads,
        row_gap=row_gap,
    )


def addresses(tensors: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    def size(tensor: Any) -> int:
        last = sum((dim - 1) * stride for dim, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return (last + 1) * int(tensor.element_size())

    return (
        np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64),
        np.array([size(tensor) for tensor in tensors], dtype=np.uint64),
    )


def submit(
    stream: _core.CopyStream,
    pools: Pools,
    *,
    to_host: bool,
    device_slots: np.ndarray,
    host_slots: np.ndarray,
    layers: tuple[int, int],
) -> _core.Ticket:
    device_side = (*addresses([b for part in pools.device for b in part]), pools.device_geometry, device_slots)
    host_side = (*addresses(pools.host), pools.host_geometry, host_slots)
    dst, src = (host_side, device_side) if to_host else (device_side, host_side)
    return stream.submit_copy(
        dst_bases=dst[0],
        dst_sizes=dst[1],
        src_bases=src[0],
        src_sizes=src[1],
        dst=dst[2],
        src=src[2],
        dst_slots=dst[3],
        src_slots=src[3],
        layers=layers,
    )


def bits(tensor: Any) -> Any:
    return tensor.contiguous().view(torch.uint8)


def reference_to_host(pools: Pools, device_slots: np.ndarray, host_slots: np.ndarray, layers: range) -> list[Any]:
    copy = Pools(**{**vars(pools), "host": [host.clone() for host in pools.host]})
    for part, buffers in enumerate(pools.device):
        for layer in layers:
            for device_slot, host_slot in zip(device_slots.tolist(), host_slots.tolist(), strict=True):
                copy.host_row(part, layer, host_slot)[:] = buffers[layer][device_slot]
    return copy.host


def reference_to_device(
    pools: Pools, device_slots: np.ndarray, host_slots: np.ndarray, layers: range
) -> list[list[Any]]:
    out = [[buffer.clone() for buffer in part] for part in pools.device]
    for part, buffers in enumerate(out):
        for layer in layers:
            for device_slot, host_slot in zip(device_slots.tolist(), host_slots.tolist(), strict=True):
                buffers[layer][device_slot] = pools.host_row(part, layer, host_slot)
    return out


def page_slots(pages: list[int], page_size: int) -> np.ndarray:
    return np.array([page * page_size + i for page in pages for i in range(page_size)], dtype=np.int64)


@pytest.fixture(scope="module")
def stream() -> _core.CopyStream:
    return _core.HostDevice(num_threads=2).open_stream("test")


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    mla = draw(st.booleans())
    page_size = draw(st.sampled_from([1, 16, 64]))
    device_pages, host_pages = draw(st.integers(2, 6)), draw(st.integers(2, 8))
    num_pages = draw(st.integers(0, min(device_pages, host_pages)))
    num_layers = draw(st.integers(1, 4))
    begin = draw(st.integers(0, num_layers))
    # SGLang hands out device tokens one by one when the page size is 1; a page of device slots is consecutive.
    return {
        "pools": {
            "seed": draw(st.integers(0, 2**31)),
            "num_parts": 1 if mla else 2,
            "num_layers": num_layers,
            "num_heads": 1 if mla else draw(st.integers(1, 7)),
            "dim": draw(st.sampled_from([1, 3, 64, 72, 576] if mla else [1, 5, 16, 64, 128])),
            "dtype": draw(st.sampled_from(DTYPES)),
            "layout": draw(st.sampled_from(HOST_LAYOUTS)),
            "page_size": page_size,
            "device_pages": device_pages,
            "host_pages": host_pages,
            "row_gap": draw(st.sampled_from([0, 0, 8])),
        },
        "device_slots": page_slots(draw(st.permutations(range(device_pages)))[:num_pages], page_size),
        "host_slots": page_slots(draw(st.permutations(range(host_pages)))[:num_pages], page_size),
        "layers": (begin, draw(st.integers(begin, num_layers))),
    }


@given(cases())
@settings(max_examples=150, deadline=None)
def test_backup_equals_indexing(stream: _core.CopyStream, case: dict[str, Any]) -> None:
    pools = make_pools(**case["pools"])
    expected = reference_to_host(pools, case["device_slots"], case["host_slots"], range(*case["layers"]))
    before = [[bits(b).clone() for b in part] for part in pools.device]
    ticket = submit(
        stream,
        pools,
        to_host=True,
        device_slots=case["device_slots"],
        host_slots=case["host_slots"],
        layers=case["layers"],
    )
    assert ticket.wait(30)
    assert ticket.error() is None
    for got, want in zip(pools.host, expected, strict=True):
        assert torch.equal(bits(got), bits(want))
    for part, old in zip(pools.device, before, strict=True):
        assert all(torch.equal(bits(b), o) for b, o in zip(part, old, strict=True))


@given(cases())
@settings(max_examples=150, deadline=None)
def test_load_back_per_layer_equals_indexing(stream: _core.CopyStream, case: dict[str, Any]) -> None:
    pools = make_pools(**case["pools"])
    expected = reference_to_device(pools, case["device_slots"], case["host_slots"], range(*case["layers"]))
    tickets = [
        submit(
            stream,
            pools,
            to_host=False,
            device_slots=case["device_slots"],
            host_slots=case["host_slots"],
            layers=(layer, layer + 1),
        )
        for layer in range(*case["layers"])
    ]
    for ticket in tickets:
        assert ticket.wait(30)
        assert ticket.error() is None
    for got, want in zip(pools.device, expected, strict=True):
        for got_layer, want_layer in zip(got, want, strict=True):
            assert torch.equal(bits(got_layer), bits(want_layer))


def small_pools(**changes: Any) -> Pools:
    options: dict[str, Any] = {
        "seed": 0,
        "num_parts": 2,
        "num_layers": 3,
        "num_heads": 3,
        "dim": 8,
        "dtype": torch.bfloat16,
        "layout": "page_first",
        "page_size": 16,
        "device_pages": 4,
        "host_pages": 4,
    }
    return make_pools(**{**options, **changes})


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
def test_a_large_copy_in_pieces_equals_indexing(stream: _core.CopyStream, layout: str) -> None:
    pools = small_pools(layout=layout, dim=256, device_pages=160, host_pages=170)
    rng = np.random.default_rng(3)
    device_slots = page_slots(rng.permutation(160).tolist(), 16)
    host_slots = page_slots(rng.permutation(170)[:160].tolist(), 16)
    assert pools.host_geometry.page_bytes * 160 > 8 << 20
    expected = reference_to_host(pools, device_slots, host_slots, range(3))
    ticket = submit(stream, pools, to_host=True, device_slots=device_slots, host_slots=host_slots, layers=(0, 3))
    assert ticket.wait(30)
    assert ticket.error() is None
    assert all(torch.equal(bits(got), bits(want)) for got, want in zip(pools.host, expected, strict=True))


def set_slot(at: int, value: int) -> Callable[[dict[str, Any]], None]:
    def change(arguments: dict[str, Any]) -> None:
        arguments["dst_slots"][at] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_slot(5, 64), "destination slot 64 of token 5 is not in [0, 64)"),
        (set_slot(5, -1), "destination slot -1 of token 5"),
        (set_slot(5, 4), "given twice"),
        (lambda a: a.update(layers=(1, 4)), "layers [1, 4) of 3"),
        (lambda a: a.update(src_slots=a["src_slots"][:16]), "16 source slots for 32 destination slots"),
        (lambda a: a["src_sizes"].__setitem__(4, 100), "source buffer 4 of 100 bytes"),
        (lambda a: a["dst_bases"].__setitem__(1, 0), "is no memory"),
        (lambda a: a["dst_bases"].__setitem__(1, a["dst_bases"][0] + 8), "destination buffers overlap"),
        (
            lambda a: a.update(src_bases=a["src_bases"][:5], src_sizes=a["src_sizes"][:5]),
            "5 source buffers at 3 a part",
        ),
    ],
)
def test_a_wrong_request_fails_its_ticket_and_moves_nothing(
    stream: _core.CopyStream, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    pools = small_pools()
    dst_bases, dst_sizes = addresses(pools.host)
    src_bases, src_sizes = addresses([b for part in pools.device for b in part])
    arguments: dict[str, Any] = {
        "dst_bases": dst_bases,
        "dst_sizes": dst_sizes,
        "src_bases": src_bases,
        "src_sizes": src_sizes,
        "dst": pools.host_geometry,
        "src": pools.device_geometry,
        "dst_slots": page_slots([0, 1], 16),
        "src_slots": page_slots([2, 3], 16),
        "layers": (0, 3),
    }
    change(arguments)
    before = [host.clone() for host in pools.host]
    ticket = stream.submit_copy(**arguments)
    assert ticket.done
    error = ticket.error()
    assert error is not None
    assert error.startswith("invalid: ")
    assert message in error
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(pools.host, before, strict=True))


def test_arrays_of_another_type_are_refused(stream: _core.CopyStream) -> None:
    pools = small_pools()
    slots = page_slots([0], 16)
    for wrong in (slots.astype(np.int32), np.repeat(slots, 2)[::2], slots.reshape(1, -1), slots.tolist()):
        with pytest.raises(TypeError):
            submit(stream, pools, to_host=True, device_slots=wrong, host_slots=slots, layers=(0, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 0}, "page_size is 0"),
        ({"layout": "page_last"}, "page_first_direct"),
        ({"layout": "page_head", "num_slots": 30}, "no multiple of page_size"),
        ({"head_bytes": 2**62}, "2^62"),
    ],
)
def test_a_geometry_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {
        "layout": "page_first",
        "num_layers": 2,
        "num_slots": 64,
        "num_heads": 4,
        "head_bytes": 128,
        "page_size": 16,
    }
    with pytest.raises(ConfigError, match=message.replace("^", r"\^")):
        _core.PageGeometry.host(**{**options, **changes})


def test_a_marker_is_done_when_what_came_before_it_is() -> None:
    stream = _core.HostDevice(num_threads=1).open_stream("paused")
    pools = small_pools()
    stream.pause(3600)
    slots = page_slots([1], 16)
    copy = submit(stream, pools, to_host=True, device_slots=slots, host_slots=slots, layers=(0, 3))
    marker = stream.submit_marker()
    assert not marker.wait(0.05)
    assert not copy.done
    assert copy.error() is None
    stream.pause(0)
    assert marker.wait(30)
    assert copy.done


def test_closing_a_stream_ends_its_tickets() -> None:
    device = _core.HostDevice(num_threads=1)
    stream = device.open_stream("closing")
    stream.pause(3600)
    ticket = stream.submit_marker()
    del stream
    assert ticket.done
    assert (ticket.error() or "").startswith("cancelled: ")


def test_a_stream_keeps_its_device() -> None:
    stream = _core.HostDevice(num_threads=1).open_stream("owner")
    assert stream.submit_marker().wait(30)
