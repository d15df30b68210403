"""Tests that import SGLang itself. They run in a process of their own, see tests/test_hicache_inside.py."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from sglang_tpusync import runtime
from sglang_tpusync.hooks import hooks

hooks.arm()  # before any module of SGLang is loaded, as the plugin does


def refuse(*args: object, **kwargs: object) -> None:
    raise NotImplementedError("the package `datasets` is not installed")


if importlib.util.find_spec("datasets") is None:  # SGLang's test kits import it and never call it here
    stub = ModuleType("datasets")
    stub.load_dataset = refuse  # type: ignore[attr-defined]
    sys.modules["datasets"] = stub


@pytest.fixture(autouse=True)
def unchanged_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "weights", runtime.Weights())
