"""Hooks that give SGLang copies between device and host memory where it has none: on `--device cpu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_tpusync.hooks.hook import Hook, around, instead

__all__ = ["HOOKS"]

_UNTIL_EVENTS = "a transfer engine that takes its streams and events from the host pool"
_UNTIL_POOL = "a registry of host pool classes by device type, used by build_kv_host_pool"


def _mha_host_pool(original: Callable[..., Any], buffer_info: Any) -> Any:
    from sglang_tpusync.hicache import host_pools

    return host_pools.choose_mha(original(buffer_info), buffer_info)


def _mla_host_pool(original: Any) -> Any:
    def build(*args: Any, **kwargs: Any) -> Any:
        from sglang_tpusync.hicache import host_pools

        buffer_info = args[0] if args else kwargs["buffer_info"]
        return host_pools.choose_mla(original, buffer_info)(*args, **kwargs)

    return build


def _streams(original: Any) -> Any:
    from sglang_tpusync.hicache.streams import DeviceModule

    return DeviceModule(original)


def _events_of(name: str, module: str) -> Hook:
    return instead(
        _streams,
        name=name,
        module=module,
        attribute="device_module",
        uses=("Event", "Stream", "stream", "current_stream"),
        need="copies",
        does="backs events and streams of transfers on the CPU by tickets of native copies",
        why="a copy would have to block the scheduler, or its completion would be a lie.",
        until=_UNTIL_EVENTS,
    )


HOOKS = (
    around(
        _mha_host_pool,
        name="mha-host-pool",
        module="sglang.srt.mem_cache.pool_host.mha",
        attribute="get_mha_host_pool_cls",
        parameters=("buffer_info",),
        need="copies",
        does="builds our host pool for a device pool in ordinary memory",
        why="SGLang's host pool asks for a CUDA runtime.",
        until=_UNTIL_POOL,
    ),
    instead(
        _mla_host_pool,
        name="mla-host-pool",
        module="sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler",
        attribute="MLATokenToKVPoolHost",
        uses=("load_to_device_per_layer", "backup_from_device_all_layer"),
        need="copies",
        does="builds our MLA host pool for a device pool in ordinary memory",
        why="SGLang's host pool asks for a CUDA runtime.",
        until=_UNTIL_POOL,
    ),
    _events_of("transfer-events", "sglang.srt.mem_cache.l2_transfer"),
    _events_of("layer-events", "sglang.srt.managers.cache_controller"),
)
