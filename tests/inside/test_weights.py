"""Every path that changes weights is announced before the original code runs, whatever becomes of it."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.utils.weight_checker import WeightChecker

from sglang_tpusync import runtime
from sglang_tpusync.hooks import ALL, hooks

CALLS: dict[str, Any] = {
    "update_weights_from_disk": lambda: WeightUpdater.update_weights_from_disk(None, "path", "auto"),
    "load_weights_from_distributed": lambda: WeightUpdater.load_weights_from_distributed(None, []),
    "update_weights_from_tensor": lambda: WeightUpdater.update_weights_from_tensor(None, []),
    "update_weights_from_ipc": lambda: WeightUpdater.update_weights_from_ipc(None, None),
    "begin_weight_update": lambda: WeightUpdater.begin_weight_update(None),
    "load_lora_adapter": lambda: LoRAManager.load_lora_adapter(None, None),
    "load_lora_adapter_from_tensors": lambda: LoRAManager.load_lora_adapter_from_tensors(None, None, {}, {}),
    "reset_tensors": lambda: WeightChecker._reset_tensors(None),
}


@pytest.mark.parametrize("what", list(CALLS))
def test_a_change_of_weights_is_announced_first(what: str) -> None:
    hooks.require("weights")
    assert runtime.weights.changed_by is None
    with pytest.raises((AttributeError, AssertionError, TypeError)):  # there is no object: the original fails at once
        CALLS[what]()
    assert runtime.weights.changed_by == what


def test_every_hook_of_the_weights_is_called_here() -> None:
    assert len(CALLS) == sum(hook.need == "weights" for hook in ALL)
