"""The order of the tests: what is fast and would explain the rest runs first, real servers run last."""

from __future__ import annotations

import os

import pytest

collect_ignore = ["inside"]  # imports SGLang: test_hicache_inside.py runs it in a process of its own


def _rank(item: pytest.Item) -> int:
    if item.get_closest_marker("server"):
        return 2
    return 1 if item.get_closest_marker("campaign") else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_rank)


os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # as in servers: testing/cpu_engine.py
