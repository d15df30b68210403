"""Host pools with native copies, compared with plain torch, over all layouts, dtypes and page sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang_tpusync import runtime
from sglang_tpusync.hicache import host_pools
from sglang_tpusync.hicache.streams import Compute, Event, Stream, _select

NUM_PAGES = 5
LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32]


@pytest.fixture(autouse=True, scope="module")
def published() -> None:
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    runtime.copies.in_use = True


def mha_pair(layout: str, dtype: torch.dtype, heads: int, dim: int, page_size: int, layers: int) -> tuple[Any, Any]:
    device = MHATokenToKVPool(
        size=NUM_PAGES * page_size, page_size=page_size, dtype=dtype, head_num=heads, head_dim=dim, layer_num=layers,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    info = device.get_device_pool_infos()[0].buffer_info
    host = host_pools.NativeMHAHostPool(
        info, 2.0, 0, page_size, layout, device_capacity_tokens=device.size, start_layer=0, end_layer=layers
    )
    return device, host


def mla_pair(layout: str, dtype: torch.dtype, rank: int, rope: int, page_size: int, layers: int) -> tuple[Any, Any]:
    device = MLATokenToKVPool(
        size=NUM_PAGES * page_size, page_size=page_size, dtype=dtype, kv_lora_rank=rank, qk_rope_head_dim=rope,
        layer_num=layers, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    info = device.get_device_pool_infos()[0].buffer_info
    host = host_pools.NativeMLAHostPool(
        info, 2.0, 0, page_size, layout, device_capacity_tokens=device.size, start_layer=0, end_layer=layers,
        target_layer_num=layers,
    )  # fmt: skip
    return device, host


def device_buffers(device: Any) -> list[torch.Tensor]:
    buffers = [*device.k_buffer, *device.v_buffer] if hasattr(device, "k_buffer") else device.kv_buffer
    return [buffer.view(torch.uint8) for buffer in buffers]


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Random bytes hold NaNs, which differ from themselves."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def fill(tensors: list[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8, generator=generator))


def random_slots(generator: torch.Generator, num_pages: int, of: int, page_size: int) -> torch.Tensor:
    pages = torch.randperm(of, generator=generator)[:num_pages]
    return (pages[:, None] * page_size + torch.arange(page_size)).flatten()


def round_trip(device: Any, host: Any, seed: int, num_pages: int) -> None:
    """Backs pages up into random slots, checks the pool's own view of them, and loads them back elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    page = host.page_size
    buffers = device_buffers(device)
    fill(buffers, seed)
    host.kv_buffer.view(torch.uint8).zero_()
    source = random_slots(generator, num_pages, buffers[0].shape[0] // page, page)
    slots = random_slots(generator, num_pages, host.page_num, page)
    host.backup_from_device_all_layer(device, slots, source, "kernel")
    flat = expected_flat(buffers, host, source)
    for i in range(num_pages):
        found = host.get_data_page(int(slots[i * page])).contiguous().view(torch.uint8)
        assert torch.equal(found, flat[i]), f"page {i} of {host.layout}"
    target = random_slots(generator, num_pages, buffers[0].shape[0] // page, page)
    expected = [buffer.clone() for buffer in buffers]
    for old, new in zip(expected, buffers, strict=True):
        old[target] = new[source]
    for layer in range(host.layer_num):
        host.load_to_device_per_layer(device, slots, target, layer, "kernel")
    for old, new in zip(expected, device_buffers(device), strict=True):
        assert torch.equal(old, new)


def expected_flat(buffers: list[torch.Tensor], host: Any, source: torch.Tensor) -> list[torch.Tensor]:
    """Flat pages in the byte order of the host layout, made from the device buffers by transposition alone."""
    parts = len(buffers) // host.layer_num
    pages = []
    for begin in range(0, len(source), host.page_size):
        rows = torch.stack([buffer[source[begin : begin + host.page_size]] for buffer in buffers])
        rows = rows.reshape(parts, host.layer_num, *rows.shape[1:])  # part, layer, token, head, bytes
        order = {
            "layer_first": (0, 1, 2, 3, 4),
            "page_first": (0, 2, 1, 3, 4),
            "page_first_direct": (0, 1, 2, 3, 4),
            "page_head": (0, 3, 2, 1, 4),
        }[host.layout]
        pages.append(rows.permute(order).contiguous().flatten())
    return pages


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    heads=st.sampled_from([1, 2, 3, 5, 8]),
    dim=st.sampled_from([8, 24, 64]),
    page_size=st.sampled_from([1, 16, 64]),
    layers=st.integers(1, 4),
    num_pages=st.integers(1, NUM_PAGES),
    seed=st.integers(0, 2**31),
)
def test_mha_copies_equal_transposition(
    layout: str, dtype: torch.dtype, heads: int, dim: int, page_size: int, layers: int, num_pages: int, seed: int
) -> None:
    device, host = mha_pair(layout, dtype, heads, dim, page_size, layers)
    round_trip(device, host, seed, num_pages)
    assert runtime.copies.num_redone == 0


@settings(max_examples=30, deadline=None)
@given(
    layout=st.sampled_from(["layer_first", "page_first", "page_first_direct"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    page_size=st.sampled_from([1, 16, 64]),
    layers=st.integers(1, 4),
    num_pages=st.integers(1, NUM_PAGES),
    seed=st.integers(0, 2**31),
)
def test_mla_copies_equal_transposition(
    layout: str, dtype: torch.dtype, page_size: int, layers: int, num_pages: int, seed: int
) -> None:
    device, host = mla_pair(layout, dtype, 24, 8, page_size, layers)
    round_trip(device, host, seed, num_pages)
    assert runtime.copies.num_redone == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_copy_without_the_core_does_the_same(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every native copy is made to fail: what is done again by torch must give the same bytes."""
    device, host = mha_pair(layout, torch.bfloat16, 3, 24, 16, 3)
    submit = host_pools._own_stream().native.submit_copy

    class Broken:
        def submit_copy(self, **arguments: Any) -> Any:
            return submit(**{**arguments, "layers": (0, 99)})  # refused by the core: the ticket fails

    monkeypatch.setattr(host_pools._own_stream(), "native", Broken())
    monkeypatch.setattr(runtime.copies, "num_redone", 0)
    round_trip(device, host, 7, 4)
    assert runtime.copies.num_redone == 1 + host.layer_num


def test_an_event_is_done_when_its_copies_are() -> None:
    device, host = mha_pair("page_first", torch.bfloat16, 2, 64, 16, 2)
    fill(device_buffers(device), 1)
    host.kv_buffer.view(torch.uint8).zero_()
    stream, event = Stream("paused"), Event()
    stream.native.pause(3600)
    with _select(stream):
        host.backup_from_device_all_layer(device, torch.arange(16), torch.arange(16, 32), "kernel")
        event.record()
    assert not event.query()
    assert host.kv_buffer.view(torch.uint8).sum() == 0
    stream.native.pause(0)
    Compute().wait_event(event)
    assert event.query()
    assert same_bytes(host.kv_buffer[0, :16, 0], device.k_buffer[0][16:32])


def test_a_late_copy_is_stopped_and_done_without_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    device, host = mha_pair("page_first_direct", torch.bfloat16, 2, 64, 16, 2)
    fill(device_buffers(device), 2)
    monkeypatch.setattr(runtime.copies, "timeout_s", 0.01)
    monkeypatch.setattr(runtime.copies, "num_redone", 0)
    stream, event = Stream("stuck"), Event()
    stream.native.pause(0.3)  # longer than the copy may take
    with _select(stream):
        host.backup_from_device_all_layer(device, torch.arange(16), torch.arange(16, 32), "kernel")
        event.record()
    event.synchronize()
    assert runtime.copies.num_redone == 1
    assert same_bytes(host.kv_buffer[1, 0, 1], device.v_buffer[1][16:32])


def test_slots_go_to_others_only_when_no_copy_can_write_them(monkeypatch: pytest.MonkeyPatch) -> None:
    device, host = mha_pair("page_first", torch.bfloat16, 2, 64, 16, 2)
    monkeypatch.setattr(runtime.copies, "timeout_s", 60)
    fill(device_buffers(device), 3)
    stream = Stream("slow")
    stream.native.pause(0.2)
    with _select(stream):
        host.backup_from_device_all_layer(device, torch.arange(16), torch.arange(16, 32), "kernel")
    host.clear()
    assert stream.query()
    assert same_bytes(host.kv_buffer[0, :16, 1], device.k_buffer[1][16:32])
