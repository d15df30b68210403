"""Hooks that notice every change of weights in the process that holds them, before the first byte changes, and every
flush after it, with which the weights that are there now become those of a new epoch.

They sit where the weights of one model runner are written, below every request type, and where they are looked up
at each call: so that they hold from the moment they are applied, also when a store is attached to a server that
already runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_tpusync import runtime
from sglang_tpusync.hooks.hook import Hook, around

__all__ = ["HOOKS"]

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_LORA = "sglang.srt.lora.lora_manager"
_CHECKER = "sglang.srt.utils.weight_checker"
_UNTIL = "a callback of the storage backend before and after a change of weights"


def _announce(what: str) -> Callable[..., Any]:
    def advice(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        runtime.weights.change(what)
        return original(*args, **kwargs)

    return advice


def _begin(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    runtime.weights.change("begin_weight_update")
    runtime.weights.begin_session()
    return original(*args, **kwargs)


def _end(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A session that could not be ended stays open: nobody knows what the weights are."""
    runtime.weights.change("end_weight_update")
    result = original(*args, **kwargs)
    runtime.weights.end_session()
    return result


def _flush(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    flushed = original(*args, **kwargs)
    if flushed:
        from sglang.srt.runtime_context import get_serving

        runtime.weights.flushed(str(get_serving().weight_version))
    return flushed


def _on(module: str, attribute: str, parameters: tuple[str, ...], advice: Callable[..., Any] | None = None) -> Hook:
    method = attribute.rpartition(".")[2].removeprefix("_")
    return around(
        advice or _announce(method),
        name="weights-" + method.replace("_", "-"),
        module=module,
        attribute=attribute,
        parameters=parameters,
        need="weights",
        does=f"makes the store refuse both ways before {method}",
        why="pages computed with other weights could be served.",
        until=_UNTIL,
    )


HOOKS = (
    _on(_UPDATER, "WeightUpdater.update_weights_from_disk", ("model_path",)),
    _on(_UPDATER, "WeightUpdater.load_weights_from_distributed", ("named_tensors",)),
    _on(_UPDATER, "WeightUpdater.update_weights_from_tensor", ("named_tensors",)),
    _on(_UPDATER, "WeightUpdater.update_weights_from_ipc", ("recv_req",)),
    _on(_UPDATER, "WeightUpdater.begin_weight_update", (), _begin),
    _on(_UPDATER, "WeightUpdater.end_weight_update", ("run_post_load",), _end),
    _on(_LORA, "LoRAManager.load_lora_adapter", ("lora_ref",)),
    _on(_LORA, "LoRAManager.load_lora_adapter_from_tensors", ("lora_ref",)),
    _on(_CHECKER, "WeightChecker._reset_tensors", ()),
    around(
        _flush,
        name="weights-flush",
        module="sglang.srt.managers.scheduler",
        attribute="Scheduler.flush_cache",
        parameters=("empty_cache",),
        need="weights",
        does="begins a new epoch of weights once the caches are empty",
        why="a change of weights would close the store until the server is restarted.",
        until=_UNTIL,
    ),
)
