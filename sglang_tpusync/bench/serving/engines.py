"""What the measurement asks of a server, whoever started it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sglang_tpusync.bench.serving.answer import Answer

__all__ = ["Engine"]


class Engine(Protocol):
    """A running server. Confined to the measuring thread."""

    @property
    def backend(self) -> str:
        """`none` for the server without any cache."""

    def ask(self, prompt: Sequence[int]) -> Answer:
        """Greedy answer with log probabilities."""

    def settle(self) -> None:
        """Waits until every backup is in the store, then forgets device and host DRAM."""

    def crash(self) -> None:
        """SIGKILL to every process of the server."""

    def restart(self) -> None:
        """Starts it again as it was."""

    def stop(self) -> None: ...
