"""Prompts as token ids: random, from a seed, with no two sharing a first page."""

from __future__ import annotations

import numpy as np

__all__ = ["prompt_ids"]

# SmolLM2's vocabulary has 49,152 tokens, the first few of them special; the long-context model shares its tokenizer.
_FIRST_TOKEN, _END_TOKEN = 100, 49_000


def prompt_ids(seed: int, *name: int | str, num_tokens: int) -> list[int]:
    """Token ids, uniform over the ordinary vocabulary; the same for the same seed and name, on every machine."""
    words = [seed, *(int.from_bytes(str(part).encode(), "little") for part in name)]
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))
    ids: list[int] = generator.integers(_FIRST_TOKEN, _END_TOKEN, size=num_tokens).tolist()
    return ids
