"""Benchmarks that ship with the package and speak one language: `report`."""

from __future__ import annotations

__all__: list[str] = []
