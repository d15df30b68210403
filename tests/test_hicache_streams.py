"""Events and pending copies, on tickets made for the purpose. No SGLang, no native core."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_tpusync import runtime
from sglang_tpusync.errors import DeadlineError
from sglang_tpusync.hicache import streams
from sglang_tpusync.hicache.streams import Compute, DeviceModule, Event, PendingCopy, Stream


class Ticket:
    """A ticket that is done when told, or when it is cancelled if it `obeys`."""

    def __init__(self, *, done: bool = False, error: str | None = None, obeys: bool = True) -> None:
        self.done, self._error, self._obeys = done, error, obeys

    def wait(self, timeout_s: float) -> bool:
        return self.done

    def cancel(self) -> None:
        self.done, self._error = self._obeys, "cancelled"

    def error(self) -> str | None:
        return self._error if self.done else None


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "copies", runtime.CopyMode())
    monkeypatch.setattr(streams, "_CANCEL_GRACE_S", 0.0)


def stream_of(*tickets: Ticket) -> tuple[Stream, list[int]]:
    """A stream with these copies under way, and the list of those that were done again."""
    stream, redone = object.__new__(Stream), list[int]()
    stream._pending = []
    for number, ticket in enumerate(tickets):
        stream.add(ticket, lambda number=number: redone.append(number), f"copy {number}")
    return stream, redone


def test_an_event_that_was_never_recorded_is_done() -> None:
    assert Event().query()
    Event().synchronize()


def test_an_event_stands_for_the_copies_before_it_and_no_others() -> None:
    first, second = Ticket(), Ticket()
    stream, _ = stream_of(first)
    event = Event()
    event.record(stream)
    stream.add(second, lambda: None, "later")
    assert not event.query()
    first.done = True
    assert event.query()
    assert not stream.query()


def test_a_failed_copy_is_done_again_once_before_its_event_is_done() -> None:
    ticket = Ticket()
    stream, redone = stream_of(ticket)
    event, other = Event(), Event()
    event.record(stream)
    other.record(stream)
    ticket.done, ticket._error = True, "io"
    assert redone == []
    assert event.query()
    assert redone == [0]
    assert other.query()
    stream.synchronize()
    assert redone == [0]
    assert runtime.copies.num_redone == 1


def test_a_copy_that_cannot_be_done_again_is_never_reported_as_done() -> None:
    def fail() -> None:
        raise RuntimeError("no memory")

    copy = PendingCopy(Ticket(done=True, error="io"), fail, "copy")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            copy.settle(None)
    assert runtime.copies.num_redone == 0


def test_a_late_copy_is_stopped_and_done_again() -> None:
    stream, redone = stream_of(Ticket())
    runtime.copies.timeout_s = 0.0
    stream.synchronize()
    assert redone == [0]


def test_a_copy_that_cannot_be_stopped_is_not_used() -> None:
    stream, redone = stream_of(Ticket(obeys=False))
    runtime.copies.timeout_s = 0.0
    event = Event()
    event.record(stream)
    with pytest.raises(DeadlineError, match="copy 0 is late and cannot be stopped"):
        Compute().wait_event(event)
    assert redone == []
    assert not event.query()


def test_waiting_on_compute_blocks_the_caller_and_a_stream_waits_for_others_only() -> None:
    stream, redone = stream_of(Ticket())
    event = Event()
    event.record(stream)
    stream.wait_event(event)  # in order: nothing to wait for
    stream.wait_stream(object())
    runtime.copies.timeout_s = 0.0
    event.wait(Compute())
    assert redone == [0]


def test_the_current_stream_is_of_its_thread_and_ends_with_its_block() -> None:
    stream, _ = stream_of()
    module = DeviceModule(SimpleNamespace())
    assert isinstance(streams.current_stream(), Compute)
    with module.stream(stream):
        assert streams.current_stream() is stream
        event = Event()
        event.record()
        assert event.stream is stream
    assert isinstance(streams.current_stream(), Compute)


def test_the_original_serves_until_copies_are_ours() -> None:
    original = SimpleNamespace(
        Event=lambda **options: ("event", options), Stream=lambda **options: "stream", current_stream=lambda: "current",
        stream=lambda chosen: ("with", chosen), synchronize=lambda: "synchronized",
    )  # fmt: skip
    module = DeviceModule(original)
    assert module.Event(enable_timing=True) == ("event", {"enable_timing": True})
    assert (module.Stream(), module.current_stream(), module.synchronize()) == ("stream", "current", "synchronized")
    assert module.stream("theirs") == ("with", "theirs")
    runtime.copies.in_use = True
    assert isinstance(module.Event(), Event)
    assert isinstance(module.current_stream(), Compute)
    with pytest.raises(TypeError):  # what SGLang takes for "keeps no time"
        module.Event(enable_timing=True)


def test_draining_waits_for_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    slow: Any = SimpleNamespace(synchronize=lambda: order.append(time.monotonic()))
    monkeypatch.setattr(streams, "_streams", [slow, slow])
    streams.drain()
    assert len(order) == 2
