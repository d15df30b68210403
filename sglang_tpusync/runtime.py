"""What is true of a process as a whole: which weights it holds, and whether copies of this package are in use."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["CopyMode", "Epoch", "Weights", "copies", "weights"]

logger = logging.getLogger("sglang_tpusync")


class Epoch(NamedTuple):
    """Weights that a process came to hold after its start."""

    name: str
    lasting: bool  # another process may come to hold the same and say so; else nobody ever will again


class Weights:
    """Which weights this process holds. Thread-safe.

        change()  ->  nothing may be stored or served: caches may hold pages of the weights before
        flushed() ->  the caches are empty: a new epoch begins, unless a session of updates is still open

    Listeners are called, on the thread that flushed, when an epoch has begun.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed_by: str | None = None
        self._epoch: Epoch | None = None
        self._num_sessions = 0
        self._version: str | None = None  # the last one that named weights; None: versions name nothing
        self._listeners: list[Callable[[], None]] = []

    @property
    def changed_by(self) -> str | None:
        """What changed the weights first since the caches were last empty; None: nothing did."""
        return self._changed_by

    @property
    def epoch(self) -> Epoch | None:
        """None: the weights of the start."""
        return self._epoch

    def change(self, what: str) -> None:
        """To be called before the first byte changes, also when the change may fail later."""
        with self._lock:
            first = self._changed_by is None
            self._changed_by = self._changed_by or what
        if first:
            logger.warning(
                "weights of this process change (%s): its store of KV pages refuses reads and writes until the cache "
                "is flushed",
                what,
            )

    def begin_session(self) -> None:
        """Updates follow one another: a flush between them makes no epoch, as weights are only partly new."""
        with self._lock:
            self._num_sessions += 1

    def end_session(self) -> None:
        with self._lock:
            self._num_sessions = max(0, self._num_sessions - 1)

    def flushed(self, version: str | None = None) -> None:
        """Every cache of this process is empty, and nothing is under way.

        `version` names the weights if versions are trusted and it is another one than before.
        """
        with self._lock:
            if self._changed_by is None or self._num_sessions > 0:
                return
            is_new = self._version is not None and version is not None and version != self._version
            self._epoch = Epoch(f"version {version}", True) if is_new else Epoch(f"nonce {uuid.uuid4().hex}", False)
            self._version = version if is_new else self._version
            self._changed_by = None
            listeners = list(self._listeners)
        logger.info("a new epoch of weights begins: %s", self._epoch.name)
        for listener in listeners:
            listener()

    def trust_versions(self, current: str) -> None:
        """The user says that equal versions are equal weights, in every process. `current` is that of the start."""
        with self._lock:
            self._version = self._version or current

    def listen(self, listener: Callable[[], None]) -> None:
        with self._lock:
            self._listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)


class CopyMode:
    """How this process copies between device and host memory where SGLang itself cannot (`--device cpu`)."""

    def __init__(self) -> None:
        self.in_use = False  # true once a host pool of ours exists: from then on, events are tickets
        self.num_threads = 2
        self.timeout_s = 60.0
        self.num_redone = 0  # copies that failed in the native core and were done again without it


weights = Weights()
copies = CopyMode()
