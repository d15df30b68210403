"""Tests that import SGLang itself. They run in a process of their own, see tests/test_hicache_inside.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_tpusync import runtime
from sglang_tpusync.hooks import hooks

hooks.arm()  # before any module of SGLang is loaded, as the plugin does


@pytest.fixture(autouse=True)
def unchanged_weights(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(runtime, "weights", runtime.Weights())
    yield
