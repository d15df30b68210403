"""Hooks that notice every change of weights in the process that holds them, before the first byte changes.

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


def _on(module: str, attribute: str, parameters: tuple[str, ...]) -> Hook:
    method = attribute.rpartition(".")[2].removeprefix("_")
    return around(
        _announce(method),
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
    _on(_UPDATER, "WeightUpdater.begin_weight_update", ()),
    _on(_LORA, "LoRAManager.load_lora_adapter", ("lora_ref",)),
    _on(_LORA, "LoRAManager.load_lora_adapter_from_tensors", ("lora_ref",)),
    _on(_CHECKER, "WeightChecker._reset_tensors", ()),
)
