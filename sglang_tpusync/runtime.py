"""What is true of a process as a whole: which weights it holds, and whether copies of this package are in use."""

from __future__ import annotations

import logging
import threading

__all__ = ["CopyMode", "Weights", "copies", "weights"]

logger = logging.getLogger("sglang_tpusync")


class Weights:
    """Whether the weights of this process are still those it started with. Thread-safe.

    Pages of a process whose weights have changed belong to no namespace that anybody could name: until it is
    restarted, the store neither serves nor accepts any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed_by: str | None = None

    @property
    def changed_by(self) -> str | None:
        """What changed the weights first; None while they are those of the start."""
        return self._changed_by

    def change(self, what: str) -> None:
        """To be called before the first byte changes, also when the change may fail later."""
        with self._lock:
            first = self._changed_by is None
            self._changed_by = self._changed_by or what
        if first:
            logger.warning(
                "weights of this process change (%s): its store of KV pages refuses reads and writes until a restart",
                what,
            )


class CopyMode:
    """How this process copies between device and host memory where SGLang itself cannot (`--device cpu`)."""

    def __init__(self) -> None:
        self.in_use = False  # true once a host pool of ours exists: from then on, events are tickets
        self.num_threads = 2
        self.timeout_s = 60.0
        self.num_redone = 0  # copies that failed in the native core and were done again without it


weights = Weights()
copies = CopyMode()
