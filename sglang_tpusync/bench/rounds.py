"""Interleaving: every arm in every round, so that a change of the machine's mood hits all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

__all__ = ["interleaved", "measure_interleaved"]

Arm = TypeVar("Arm")


def interleaved(arms: Sequence[Arm], num_rounds: int) -> Iterator[tuple[int, Arm]]:
    """(round, arm) pairs; each round starts with another arm, so that none is always first."""
    for index in range(num_rounds):
        first = index % len(arms)
        for arm in (*arms[first:], *arms[:first]):
            yield index, arm


def measure_interleaved(arms: Mapping[str, Callable[[], float]], num_rounds: int) -> dict[str, list[float]]:
    """Calls each arm once a round; answers its results by name, in the order of the rounds."""
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for _, name in interleaved(list(arms), num_rounds):
        samples[name].append(arms[name]())
    return samples
