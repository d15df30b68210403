"""Host pools of SGLang whose copies are native: one call per operation, on the stream that the transfer engine
selected.

For device pools in ordinary memory (`--device cpu`), where SGLang itself has no copies. The pools keep the layouts
of SGLang byte for byte, so that what is stored from them is what any host pool of SGLang would hold.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.runtime_context import get_memory

from sglang_tpusync import _core, runtime
from sglang_tpusync.config import Options, read_environment, read_options
from sglang_tpusync.hicache.selection import options_source
from sglang_tpusync.hicache.shared_pool import SharedHostPool
from sglang_tpusync.hicache.streams import Stream, current_stream, drain

__all__ = ["NativeMHAHostPool", "NativeMLAHostPool", "choose_mha", "choose_mla", "host_device"]


@functools.cache
def host_device() -> Any:
    """The device of this process: its threads move the bytes of every stream."""
    atexit.register(drain)
    return _core.HostDevice(num_threads=runtime.copies.num_threads)


def choose_mha(cls: type, buffer_info: Any) -> type:
    """Ours for the pool class that SGLang chose, where copies are ours to do."""
    return NativeMHAHostPool if cls is MHATokenToKVPoolHost and _copies_wanted(buffer_info) else cls


def choose_mla(cls: type, buffer_info: Any) -> type:
    plain = isinstance(getattr(buffer_info, "buffers", None), tuple | list)
    return NativeMLAHostPool if cls is MLATokenToKVPoolHost and plain and _copies_wanted(buffer_info) else cls


def _copies_wanted(buffer_info: Any) -> bool:
    """Whether the device is the CPU and the user asked for this package; then its copies are set up from here on."""
    if torch.device(getattr(buffer_info, "device", "meta")).type != "cpu":
        return False
    memory = get_memory()
    source = options_source(memory.hicache_storage_backend, memory.hicache_storage_backend_extra_config)
    if source is None and not read_environment().cpu_engine:
        return False
    options = read_options(source.text) if source is not None else Options()
    if options.native_copies:
        from sglang_tpusync.hooks import hooks

        hooks.require("copies")
        runtime.copies.num_threads = options.copy_threads
        runtime.copies.timeout_s = options.copy_timeout_s
        runtime.copies.in_use = True
    return options.native_copies


class _Side:
    """One side of a copy: where the rows of each part (K and V, or the latent) lie. Immutable."""

    def __init__(self, geometry: Any, buffers: Sequence[torch.Tensor]) -> None:
        self.geometry = geometry
        self.bases = np.array([buffer.data_ptr() for buffer in buffers], dtype=np.uint64)
        self.sizes = np.array([_extent_bytes(buffer) for buffer in buffers], dtype=np.uint64)


class _NativeCopies:
    """The two transfer methods of a host pool over one native call each."""

    page_size: int
    layout: str
    size: int
    layer_num: int

    def _init_copies(
        self,
        device_parts: Sequence[Sequence[torch.Tensor]],
        host_parts: Sequence[torch.Tensor],
        num_heads: int,
        head_bytes: int,
    ) -> None:
        """`device_parts[part][layer]` are (slots, heads, dim), rows packed; `host_parts[part]` is contiguous, in
        `layout`.
        """
        self._device_parts = [list(part) for part in device_parts]
        self._host_parts = list(host_parts)
        first = self._device_parts[0][0]
        row_bytes = num_heads * head_bytes
        device = _core.PageGeometry.device(
            num_layers=self.layer_num,
            num_slots=first.shape[0],
            row_bytes=row_bytes,
            row_stride_bytes=first.stride(0) * first.element_size(),
            page_size=self.page_size,
        )
        host = _core.PageGeometry.host(
            layout=self.layout,  # type: ignore[arg-type]  # checked by the core
            num_layers=self.layer_num,
            num_slots=self.size,
            num_heads=num_heads,
            head_bytes=head_bytes,
            page_size=self.page_size,
        )
        self._device_side = _Side(device, [buffer for part in self._device_parts for buffer in part])
        self._host_side = _Side(host, self._host_parts)

    def _copy(self, to_device: bool, host_indices: Any, device_indices: Any, layers: tuple[int, int]) -> None:
        """Submits a copy of token rows to the current stream; outside any stream it is done on return."""
        host_slots, device_slots = _slots(host_indices), _slots(device_indices)
        dst, src = (self._device_side, self._host_side) if to_device else (self._host_side, self._device_side)
        dst_slots, src_slots = (device_slots, host_slots) if to_device else (host_slots, device_slots)
        chosen = current_stream()
        stream = chosen if isinstance(chosen, Stream) else _own_stream()
        ticket = stream.native.submit_copy(
            dst_bases=dst.bases,
            dst_sizes=dst.sizes,
            src_bases=src.bases,
            src_sizes=src.sizes,
            dst=dst.geometry,
            src=src.geometry,
            dst_slots=dst_slots,
            src_slots=src_slots,
            layers=layers,
        )
        redo = functools.partial(self._copy_with_torch, to_device, host_slots, device_slots, layers)
        way = "host to device" if to_device else "device to host"
        stream.add(ticket, redo, f"copy of {len(host_slots)} tokens, layers {layers[0]} to {layers[1]}, {way}")
        if stream is not chosen:
            stream.synchronize()

    def _copy_with_torch(
        self, to_device: bool, host_slots: NDArray[np.int64], device_slots: NDArray[np.int64], layers: tuple[int, int]
    ) -> None:
        """The same copy in plain torch, on the calling thread."""
        host_index, device_index = torch.from_numpy(host_slots), torch.from_numpy(device_slots)
        page, token = host_index // self.page_size, host_index % self.page_size
        for device_part, host_part in zip(self._device_parts, self._host_parts, strict=True):
            for layer in range(*layers):
                device = device_part[layer].view(torch.uint8)
                host = _host_rows(host_part.view(torch.uint8), self.layout, layer)
                place = (page, token) if host.dim() == 4 else (host_index,)
                if to_device:
                    device[device_index] = host[place]
                else:
                    host[place] = device[device_index]

    def clear(self) -> None:
        drain()  # the slots go to others
        super().clear()  # type: ignore[misc]

    def destroy(self) -> None:
        drain()  # the memory goes back
        self._host_parts = []
        super().destroy()  # type: ignore[misc]


class NativeMHAHostPool(_NativeCopies, SharedHostPool, MHATokenToKVPoolHost):  # type: ignore[misc]
    """Host pool of K and V, (slots, heads, dim) per layer, of one dtype."""

    num_parts = 2

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "pin_memory": False})
        device_parts = [self.device_k_buffers, self.device_v_buffers]
        host_parts = [self.kv_buffer[0], self.kv_buffer[1]]
        self._init_copies(device_parts, host_parts, self.head_num, self.head_dim * self.dtype.itemsize)

    def load_to_device_per_layer(
        self,
        device_pool: Any,
        host_indices: Any,
        device_indices: Any,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        if is_draft or 0 <= layer_id < self.target_layer_num:
            self._copy(True, host_indices, device_indices, (layer_id, layer_id + 1))

    def backup_from_device_all_layer(
        self,
        device_pool: Any,
        host_indices: Any,
        device_indices: Any,
        io_backend: str,
    ) -> None:
        self._copy(False, host_indices, device_indices, (0, self.layer_num))


class NativeMLAHostPool(_NativeCopies, SharedHostPool, MLATokenToKVPoolHost):  # type: ignore[misc]
    """Host pool of MLA's latent, (slots, 1, dim) per layer."""

    num_parts = 1

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "pin_memory": False})
        layers = [self._host_layer_by_controller[layer] for layer in self._buffer_index_by_layer]
        if self._layer_shard_enabled or self.dcp_size > 1 or layers != list(range(self.layer_num)):
            raise NotImplementedError("copies on the CPU know no layer sharding and no DCP of MLA pools")
        self._init_copies([self.device_kv_buffers], [self.kv_buffer], 1, self.kv_cache_dim * self.dtype.itemsize)

    def load_to_device_per_layer(
        self,
        device_pool: Any,
        host_indices: Any,
        device_indices: Any,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        if is_draft or layer_id in self._target_layer_indices:
            layer = self._host_layer_by_controller[layer_id]
            self._copy(True, host_indices, device_indices, (layer, layer + 1))

    def backup_from_device_all_layer(
        self,
        device_pool: Any,
        host_indices: Any,
        device_indices: Any,
        io_backend: str,
    ) -> None:
        self._copy(False, host_indices, device_indices, (0, self.layer_num))


@functools.cache
def _own_stream() -> Stream:
    return Stream("copy-sync")


def _slots(indices: torch.Tensor) -> NDArray[np.int64]:
    return np.ascontiguousarray(indices.detach().cpu().numpy(), dtype=np.int64)


def _extent_bytes(buffer: torch.Tensor) -> int:
    """Bytes from the first element to one past the last, whatever lies between rows."""
    last = sum((length - 1) * stride for length, stride in zip(buffer.shape, buffer.stride(), strict=True))
    return (last + 1) * buffer.element_size() if buffer.numel() else 0


def _host_rows(part: torch.Tensor, layout: str, layer: int) -> torch.Tensor:
    """A view of one layer of a part: (slots, heads, dim), or (pages, tokens of a page, heads, dim) in a paged
    layout.
    """
    if layout == "layer_first":
        return part[layer]
    if layout in ("page_first", "page_first_direct"):
        return part[:, layer]
    return part[:, :, :, layer].permute(0, 2, 1, 3)  # page_head
