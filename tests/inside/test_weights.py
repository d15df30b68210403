"""Every path that changes weights is announced before the original code runs, whatever becomes of it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.utils.weight_checker import WeightChecker

from sglang_tpusync import runtime
from sglang_tpusync.hooks import ALL, hooks
from sglang_tpusync.runtime import Epoch, Weights

CALLS: dict[str, Any] = {
    "update_weights_from_disk": lambda: WeightUpdater.update_weights_from_disk(None, "path", "auto"),
    "load_weights_from_distributed": lambda: WeightUpdater.load_weights_from_distributed(None, []),
    "update_weights_from_tensor": lambda: WeightUpdater.update_weights_from_tensor(None, []),
    "update_weights_from_ipc": lambda: WeightUpdater.update_weights_from_ipc(None, None),
    "end_weight_update": lambda: WeightUpdater.end_weight_update(None, run_post_load=True),
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
    assert len(CALLS) == sum(hook.need == "weights" and hook.name != "weights-flush" for hook in ALL)


def test_a_flush_after_a_change_begins_an_epoch() -> None:
    weights = Weights()
    begun: list[Epoch | None] = []
    weights.listen(lambda: begun.append(weights.epoch))
    weights.flushed("1")
    assert weights.epoch is None
    assert begun == []
    weights.change("a test")
    weights.flushed("1")
    assert weights.changed_by is None
    first = weights.epoch
    assert first is not None
    assert not first.lasting
    weights.change("a test")
    weights.flushed("2")
    assert weights.epoch != first
    assert begun == [first, weights.epoch]


def test_a_flush_within_a_session_begins_none() -> None:
    weights = Weights()
    for _ in range(2):  # the target and the draft
        weights.begin_session()
    weights.change("a test")
    weights.flushed()
    weights.end_session()
    weights.flushed()
    assert weights.changed_by == "a test"
    weights.end_session()
    weights.flushed()
    assert weights.epoch is not None


def test_only_a_version_that_is_trusted_and_new_names_weights() -> None:
    weights = Weights()
    weights.trust_versions("default")
    weights.change("a test")
    weights.flushed("default")
    assert weights.epoch is not None
    assert not weights.epoch.lasting
    weights.change("a test")
    weights.flushed("step 7")
    assert weights.epoch == Epoch("version step 7", True)
    weights.change("a test")
    weights.flushed("step 7")
    assert not weights.epoch.lasting


@pytest.mark.parametrize("flushed", [True, False])
def test_the_flush_of_a_scheduler_is_noticed(flushed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.scheduler import Scheduler

    runtime.weights.change("a test")
    scheduler = mock.Mock()
    scheduler.is_fully_idle.return_value = flushed
    scheduler.waiting_queue = scheduler.running_batch.reqs = []
    assert Scheduler.flush_cache(scheduler) == flushed
    assert (runtime.weights.changed_by is None) == flushed
    assert (runtime.weights.epoch is not None) == flushed
