"""Hooks that make `tpusync` a name of a storage backend like those that SGLang ships."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from sglang_tpusync.config import BACKEND_NAME
from sglang_tpusync.hooks.hook import around, registers

__all__ = ["HOOKS"]

logger = logging.getLogger("sglang_tpusync")

_FACTORY = "sglang.srt.mem_cache.storage.backend_factory"
_CONTROLLER = "sglang.srt.managers.cache_controller"
_STEP = "handle_hicache_ratio_default"  # the first resolution step that looks at the hierarchical cache


def _add_cli_choice(original: Callable[..., Any], parser: Any, cls: Any, **kwargs: Any) -> Any:
    result = original(parser, cls, **kwargs)
    for action in parser._actions:
        if action.dest == "hicache_storage_backend" and action.choices and BACKEND_NAME not in action.choices:
            action.choices = [*action.choices, BACKEND_NAME]
    return result


def _resolve_one_flag(server_args: Any, previous: Callable[[Any], None]) -> None:
    """A resolution step of SGLang: our name turns the hierarchical cache on, and the options of both backends are
    checked here already.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    given = resolving_view(server_args)
    if given.hicache_storage_backend == BACKEND_NAME:
        from sglang_tpusync.plugin import check_use

        check_use(given.hicache_storage_backend_extra_config)
        if not given.enable_hierarchical_cache and not given.disaggregation_decode_enable_offload_kvcache:
            declare_resolution(server_args, "sglang_tpusync", enable_hierarchical_cache=True)
            logger.info("--hicache-storage-backend %s implies --enable-hierarchical-cache", BACKEND_NAME)
    if given.disaggregation_transfer_backend == BACKEND_NAME and given.disaggregation_mode in ("prefill", "decode"):
        from sglang_tpusync.plugin import check_transfer

        check_transfer()
    previous(server_args)


def _register_one_flag(loaded: ModuleType) -> None:
    loaded.register_resolution_hook(_STEP)(_resolve_one_flag)


def _one_flag_took(loaded: ModuleType) -> bool:
    return _resolve_one_flag in loaded._HOOKS.get(_STEP, ())


def _create_backend(
    original: Callable[..., Any],
    cls: Any,
    backend_name: str,
    backend_class: Any,
    storage_config: Any,
    mem_pool_host: Any,
) -> Any:
    if backend_name == BACKEND_NAME:
        return backend_class(storage_config, mem_pool_host)
    return original(cls, backend_name, backend_class, storage_config, mem_pool_host)


def _register_backend(loaded: ModuleType) -> None:
    loaded.StorageBackendFactory.register_backend(BACKEND_NAME, "sglang_tpusync.hicache", "TpuSyncStorage")


def _backend_registered(loaded: ModuleType) -> bool:
    return BACKEND_NAME in loaded.StorageBackendFactory._registry


def _choose_zero_copy(
    original: Callable[..., Any], controller: Any, storage_backend: str, *args: Any, **kwargs: Any
) -> Any:
    if storage_backend == BACKEND_NAME:
        _refuse_unknown_pools(controller)
    result = original(controller, storage_backend, *args, **kwargs)
    if storage_backend == BACKEND_NAME:
        controller.page_get_func = controller._page_get_zero_copy
        controller.page_set_func = controller._page_set_zero_copy
    return result


def _refuse_unknown_pools(controller: Any) -> None:
    """Before anything is attached: SGLang registers side pools when its threads run already."""
    for entry in getattr(controller.mem_pool_host, "entries", None) or ():
        if str(entry.name) != "kv":
            from sglang_tpusync.hicache.side_pools import pages_of_side_pool

            pages_of_side_pool(str(entry.name), entry.host_pool)


def _pass_prefix_keys(original: Callable[..., Any], attachment: Any, **kwargs: Any) -> Any:
    controller = attachment._cache.cache_controller
    backend = getattr(controller, "storage_backend", None)
    backend = getattr(backend, "_backend", backend)  # the failure injector of SGLang's tests stands in front
    if kwargs.get("storage_backend") == BACKEND_NAME or getattr(backend, "wants_prefix_keys", False):
        kwargs["hicache_storage_pass_prefix_keys"] = True
    return original(attachment, **kwargs)


HOOKS = (
    around(
        _add_cli_choice,
        name="cli-choice",
        module="sglang.srt.arg_groups.arg_utils",
        attribute="add_cli_args_from_dataclass",
        parameters=("parser", "cls"),
        need="cli",
        does="adds the name to the choices of --hicache-storage-backend",
        why="the command line refuses the name.",
        until="an adder for the choices of hicache_storage_backend, as add_disagg_transfer_backend_choices is one",
    ),
    registers(
        _register_one_flag,
        name="one-flag",
        module="sglang.srt.arg_groups.resolution_hooks",
        attribute="register_resolution_hook",
        parameters=("name",),
        took=_one_flag_took,
        need="cli",
        does="lets the name imply --enable-hierarchical-cache, and checks options before any process is started",
        why="the name alone would start a server without a store.",
        until="none needed: a registration that SGLang offers",
    ),
    registers(
        _register_backend,
        name="backend-class",
        module=_FACTORY,
        attribute="StorageBackendFactory.register_backend",
        parameters=("name", "module_path", "class_name"),
        took=_backend_registered,
        need="name",
        does="names the class of the backend",
        why="SGLang does not know the backend.",
        until="none needed: a registration that SGLang offers",
    ),
    around(
        _create_backend,
        name="backend-constructor",
        module=_FACTORY,
        attribute="StorageBackendFactory._create_builtin_backend",
        parameters=("backend_name", "backend_class", "storage_config", "mem_pool_host"),
        need="name",
        does="constructs the registered class with (storage_config, mem_pool_host)",
        why="SGLang refuses to construct a backend that it registered but does not list.",
        until="a default branch in _create_builtin_backend for registered names",
    ),
    around(
        _choose_zero_copy,
        name="zero-copy",
        module=_CONTROLLER,
        attribute="HiCacheController.attach_storage_backend",
        parameters=("storage_backend",),
        need="name",
        does="selects the zero-copy page functions (batch_get_v1, batch_set_v1)",
        why="pages would be copied through Python tensors one by one.",
        until="a capability attribute of the backend class in place of the list of names, like interface_v1",
    ),
    around(
        _pass_prefix_keys,
        name="prefix-keys",
        module="sglang.srt.mem_cache.unified_cache.storage_attachment",
        attribute="StorageAttachment.apply_runtime_config",
        parameters=("storage_backend", "hicache_storage_pass_prefix_keys"),
        need="name",
        does="turns hicache_storage_pass_prefix_keys on",
        why="the store cannot keep the head of a prefix warmer than its tail.",
        until="a default of hicache_storage_pass_prefix_keys that the backend class may set",
    ),
)
