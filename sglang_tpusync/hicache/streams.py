"""Streams and events for transfers on the CPU, backed by tickets of native copies.

SGLang's transfer engine submits copies on a stream, records events behind them, polls the events in its scheduler,
and lets the forward of a layer wait for one. On the CPU torch's own streams and events do nothing; these do:

    Stream    an in-order native CopyStream Event     all copies submitted to a stream before record(); done when
    each of them is compute   the stream of everything else. Compute on the CPU runs on the calling thread and is
    over when it returns, so an
              event recorded there is done, and waiting there blocks the calling thread, which is the forward's

A copy that fails is done again by torch before its event is reported as done: what SGLang sees complete is
complete. Events and streams are confined to the scheduler's thread, as SGLang uses them.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_tpusync import runtime
from sglang_tpusync.errors import DeadlineError

__all__ = ["Compute", "DeviceModule", "Event", "PendingCopy", "Stream", "current_stream", "drain"]

logger = logging.getLogger("sglang_tpusync")

_CANCEL_GRACE_S = 5.0
_local = threading.local()
_streams: weakref.WeakSet[Stream] = weakref.WeakSet()


class PendingCopy:
    """A submitted copy, and how to do it again without the native core."""

    def __init__(self, ticket: Any, redo: Callable[[], None], what: str) -> None:
        self._ticket = ticket
        self._redo: Callable[[], None] | None = redo
        self._what = what

    @property
    def done(self) -> bool:
        return bool(self._ticket.done)

    def settle(self, deadline: float | None) -> None:
        """Returns when the bytes are where they should be. `deadline` is of time.monotonic(), None for a ticket
        that is done.

        Raises DeadlineError if the copy can neither finish nor be stopped: its bytes may still move, so nobody may
        use them.
        """
        if deadline is not None and not self._ticket.wait(max(0.0, deadline - time.monotonic())):
            self._ticket.cancel()
            if not self._ticket.wait(_CANCEL_GRACE_S):
                raise DeadlineError(f"{self._what} is late and cannot be stopped")
        reason = self._ticket.error()
        if reason is not None and self._redo is not None:
            logger.error("%s failed (%s) and is done again without the native core", self._what, reason)
            self._redo()
            self._redo = None
            runtime.copies.num_redone += 1


class Stream:
    """An in-order stream of native copies."""

    def __init__(self, name: str) -> None:
        from sglang_tpusync.hicache.host_pools import host_device

        self.native = host_device().open_stream(name)
        self._pending: list[PendingCopy] = []
        _streams.add(self)

    def add(self, ticket: Any, redo: Callable[[], None], what: str) -> None:
        self._pending.append(PendingCopy(ticket, redo, what))

    def pending(self) -> tuple[PendingCopy, ...]:
        """The copies that may still be under way. Those that are over are settled and forgotten."""
        while self._pending and self._pending[0].done:
            self._pending.pop(0).settle(None)
        return tuple(self._pending)

    def synchronize(self) -> None:
        deadline = time.monotonic() + runtime.copies.timeout_s
        while self._pending:
            self._pending[0].settle(deadline)
            self._pending.pop(0)

    def query(self) -> bool:
        return not self.pending()

    def wait_event(self, event: Any) -> None:
        """What is submitted from now on starts after `event`, which is waited for here unless it is of this stream."""
        if not (isinstance(event, Event) and event.stream is self):
            event.synchronize()

    def wait_stream(self, stream: Any) -> None:
        """Compute is over when its call returns; two streams of copies never share a slot that is in use."""


class Compute:
    """The stream of everything that runs on the calling thread."""

    def wait_event(self, event: Any) -> None:
        event.synchronize()

    def wait_stream(self, stream: Any) -> None:
        if isinstance(stream, Stream):
            stream.synchronize()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True


_COMPUTE = Compute()


def current_stream() -> Stream | Compute:
    """The stream that `DeviceModule.stream` selected in this thread."""
    return getattr(_local, "stream", None) or _COMPUTE


class Event:
    """A point on a stream. One that was never recorded is done."""

    def __init__(self) -> None:
        self.stream: Stream | Compute = _COMPUTE
        self._copies: tuple[PendingCopy, ...] = ()

    def record(self, stream: Any = None) -> None:
        chosen = current_stream() if stream is None else stream
        self.stream = chosen if isinstance(chosen, Stream) else _COMPUTE
        self._copies = chosen.pending() if isinstance(chosen, Stream) else ()

    def query(self) -> bool:
        if not all(copy.done for copy in self._copies):
            return False
        for copy in self._copies:
            copy.settle(None)
        self._copies = ()
        return True

    def synchronize(self) -> None:
        deadline = time.monotonic() + runtime.copies.timeout_s
        for copy in self._copies:
            copy.settle(deadline)
        self._copies = ()

    def wait(self, stream: Any = None) -> None:
        (current_stream() if stream is None else stream).wait_event(self)


def drain() -> None:
    """Returns when no copy of any stream can move a byte: before memory or slots go to somebody else."""
    for stream in list(_streams):
        stream.synchronize()


class DeviceModule:
    """Stands where SGLang's transfer code keeps `torch.cpu`: ours once a host pool of ours exists, the original
    before.
    """

    __name__ = "sglang_tpusync.hicache.streams"

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def Event(self, **options: Any) -> Any:
        if not runtime.copies.in_use:
            return self._original.Event(**options)
        if options.get("enable_timing"):
            raise TypeError("events of copies on the CPU keep no time")  # which SGLang takes for an answer
        return Event()

    def Stream(self, **options: Any) -> Any:
        return Stream("copy") if runtime.copies.in_use else self._original.Stream(**options)

    def current_stream(self, *args: Any) -> Any:
        return current_stream() if runtime.copies.in_use else self._original.current_stream(*args)

    def stream(self, stream: Any) -> Any:
        return _select(stream) if isinstance(stream, Stream | Compute) else self._original.stream(stream)


@contextmanager
def _select(stream: Any) -> Iterator[None]:
    previous = getattr(_local, "stream", None)
    _local.stream = stream
    try:
        yield
    finally:
        _local.stream = previous
