"""`tpusync bench serving`: real servers, prompts whose KV comes from every tier, times and identical answers."""

from __future__ import annotations

__all__: list[str] = []
