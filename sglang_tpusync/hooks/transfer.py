"""Hooks that make `tpusync` a name of a transfer backend like those that SGLang ships."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from sglang_tpusync.config import BACKEND_NAME
from sglang_tpusync.hooks.hook import around, registers

__all__ = ["HOOKS"]

_UTILS = "sglang.srt.disaggregation.utils"


def _add_choice(loaded: ModuleType) -> None:
    loaded.add_disagg_transfer_backend_choices([BACKEND_NAME])


def _choice_added(loaded: ModuleType) -> bool:
    return BACKEND_NAME in loaded.DISAGG_TRANSFER_BACKEND_CHOICES


def _add_member(loaded: ModuleType) -> None:
    """What EnumMeta does for a member in the body of the class."""
    backends = loaded.TransferBackend
    member = object.__new__(backends)
    member._name_, member._value_ = BACKEND_NAME.upper(), BACKEND_NAME
    member.__objclass__, member._sort_order_ = backends, len(backends._member_names_)
    backends._member_names_.append(member._name_)
    backends._member_map_[member._name_] = member
    backends._value2member_map_[member._value_] = member
    type.__setattr__(backends, member._name_, member)


def _member_added(loaded: ModuleType) -> bool:
    return BACKEND_NAME in {member.value for member in loaded.TransferBackend}


def _choose_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    if transfer_backend.value == BACKEND_NAME and class_type.value != "kvargs":
        from sglang_tpusync.disagg import kv_class

        return kv_class(class_type.value)
    return original(transfer_backend, class_type)


def _send_no_prefix_early(original: Callable[..., Any], scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang puts a CUDA event behind pages that a step before may still write. Where there is none, they go with the
    request's next chunk."""
    if scheduler.enable_overlap:
        import torch

        if not torch.cuda.is_available():
            return None
    return original(scheduler, req, *args, **kwargs)


HOOKS = (
    registers(
        _add_choice,
        name="transfer-choice",
        module="sglang.srt.arg_groups.choices",
        attribute="add_disagg_transfer_backend_choices",
        parameters=(),
        took=_choice_added,
        need="transfer",
        does="adds the name to the choices of --disaggregation-transfer-backend",
        why="the command line refuses the name.",
        until="none needed: a registration that SGLang offers",
    ),
    registers(
        _add_member,
        name="transfer-name",
        module=_UTILS,
        attribute="TransferBackend",
        parameters=(),
        took=_member_added,
        need="transfer",
        does="adds the name to SGLang's enumeration of transfer backends",
        why="SGLang refuses a name that its own list of choices has.",
        until="names of transfer backends that are text, or a registry of them",
    ),
    around(
        _choose_class,
        name="transfer-classes",
        module=_UTILS,
        attribute="get_kv_class",
        parameters=("transfer_backend", "class_type"),
        need="transfer",
        does="names the manager, sender, receiver and bootstrap server of the backend",
        why="SGLang does not know the classes of the backend.",
        until="a registry of transfer backends, as StorageBackendFactory is one",
    ),
    around(
        _send_no_prefix_early,
        name="transfer-early-prefix",
        module="sglang.srt.disaggregation.prefill",
        attribute="SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk",
        parameters=("req",),
        need="transfer",
        does="leaves a cached prefix to the request's next chunk where there are no CUDA events",
        why="the first prefix hit of a prefill server without CUDA would end it.",
        until="an event of the scheduler's device module in place of torch.cuda.Event",
    ),
)
