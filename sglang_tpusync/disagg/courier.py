"""The prefill side's writes: a thread of its own that submits them and follows their tickets.

    chunk -> [KV, and with the last chunk the states] -> [rows of metadata] -> [the row that says ready] -> sent

Each step towards a decode rank begins when every byte of the one before is acknowledged, so a decode server that finds
the ready row has all the rest. Chunks of a room are on their way together, those of other rooms beside them. The
scheduler only queues; what cannot be sent fails its room with a reason, and no other.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglang_tpusync._core import Endpoint, Ticket
from sglang_tpusync.disagg.messages import Hello, Registration, Request, encode, indices
from sglang_tpusync.disagg.pairing import Pairing, Pieces
from sglang_tpusync.errors import TpuSyncError, TransferError

__all__ = ["Chunk", "Courier", "Link", "Sending"]

logger = logging.getLogger("sglang_tpusync")

_POLL_S = 0.002  # between looks for new chunks while tickets are outstanding
_CONNECT_THREADS = 4
_CONNECT_TIMEOUT_S = 5.0

Items = NDArray[np.int64]


class Link:
    """A decode rank as a prefill rank knows it. `peer` belongs to the courier's thread."""

    def __init__(self, registration: Registration, pairing: Pairing) -> None:
        self.registration = registration
        self.pairing = pairing
        self.state: Literal["closed", "connecting", "open"] = "closed"
        self.peer = 0
        self.waiting: list[Sending] = []


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler hands over: pages of a request that are computed. Page numbers int64[n]."""

    pages: Items
    first: int  # place of the first page among the pages that the decode server asked for
    last: bool = False
    row: int = 0  # of the metadata; with the last chunk
    states: tuple[Items | None, ...] = ()  # with the last chunk
    ready: Callable[[], None] | None = None  # waits until the pages are written


class _Target:
    """One decode rank of a room."""

    def __init__(self, link: Link, request: Request) -> None:
        self.link = link
        self.request = request
        pairing = link.pairing
        self.pages = indices(request.pages, "pages", pairing.kv.num_target_items)
        if len(request.states) not in (0, len(pairing.states)):
            raise TransferError(f"{len(request.states)} states were asked for, there are {len(pairing.states)}")
        self.states = [
            indices(data, f"state {number}", pairing.states[number].num_target_items)
            for number, data in enumerate(request.states)
        ]
        self.row = indices(np.int32(request.row).tobytes(), "row", pairing.ready.num_target_items)
        self.tickets: deque[Ticket] = deque()
        self.step: Literal["kv", "rows", "ready", "sent"] = "kv"


class Sending:
    """A room that is being sent. All but the constructor belongs to the courier's thread."""

    def __init__(self, room: int, targets: Sequence[tuple[Link, Request]]) -> None:
        """Raises TransferError for a request that asks for what is not there."""
        self.room = room
        self.targets = [_Target(link, request) for link, request in targets if not request.dummy]
        self.chunks: deque[Chunk] = deque()
        self.over = False  # sent, failed or dropped: nothing more is submitted
        self.last: Chunk | None = None

    @property
    def outstanding(self) -> bool:
        return any(target.tickets for target in self.targets)


class Courier:
    """Calls `on_sent(room)` and `on_failed(room, reason)` from its own thread, once per sending at most."""

    def __init__(
        self,
        endpoint: Endpoint,
        hello: Hello,
        *,
        on_sent: Callable[[Sending], None],
        on_failed: Callable[[Sending, str], None],
        timeout_s: float,
    ) -> None:
        self._endpoint = endpoint
        self._hello = encode(hello)
        self._on_sent = on_sent
        self._on_failed = on_failed
        self._timeout_s = timeout_s
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._links: dict[int, Link] = {}  # by peer
        self._active: dict[int, Sending] = {}  # by id()
        self._dialling = ThreadPoolExecutor(_CONNECT_THREADS, thread_name_prefix="tpusync-dial")
        self._thread = threading.Thread(target=self._run, name="tpusync-courier", daemon=True)
        self._listener = threading.Thread(target=self._listen, name="tpusync-courier-events", daemon=True)
        self._thread.start()
        self._listener.start()

    def connect(self, link: Link) -> None:
        """Dials ahead of the first chunk. Never blocks."""
        self._events.put(lambda: self._dial(link))

    def send(self, sending: Sending, chunk: Chunk) -> None:
        """Never blocks. The chunks of a sending in the order of their pages."""
        self._events.put(lambda: self._accept(sending, chunk))

    def drop(self, sending: Sending) -> None:
        """Submits nothing more for it. Writes that are under way end by themselves."""
        self._events.put(lambda: self._end(sending))

    @property
    def num_active(self) -> int:
        """Sendings with something to do or outstanding."""
        return len(self._active)

    def close(self) -> None:
        """The endpoint must be closed first: it ends what is outstanding."""
        self._events.put(None)
        self._thread.join(10)
        self._listener.join(10)
        self._dialling.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        while True:
            oldest = next(
                (
                    target.tickets[0]
                    for sending in self._active.values()
                    for target in sending.targets
                    if target.tickets
                ),
                None,
            )
            if oldest is not None:
                oldest.wait(_POLL_S)
            try:
                event = self._events.get(block=oldest is None)
                while True:
                    if event is None:
                        return
                    event()
                    event = self._events.get(block=False)
            except queue.Empty:
                pass
            except Exception:  # nothing may end this thread: every room hangs on it
                logger.exception("an event of the courier failed")
            for sending in list(self._active.values()):
                self._guarded(sending, lambda sending=sending: self._advance(sending))  # type: ignore[misc]

    def _guarded(self, sending: Sending, action: Callable[[], None]) -> None:
        try:
            action()
        except TpuSyncError as error:
            self._fail(sending, str(error))
        except Exception as error:
            logger.exception("sending room %s failed", sending.room)
            self._fail(sending, f"{type(error).__name__}: {error}")

    def _listen(self) -> None:
        """Peers that are lost: their tickets say so by themselves, what waits for them is told here."""
        while True:
            events = self._endpoint.receive(timeout_s=1.0)
            for event in events:
                if event.kind == "lost":
                    self._events.put(lambda peer=event.peer, why=event.reason: self._lost(peer, why))  # type: ignore[misc]
            if not events and not self._thread.is_alive():
                return

    def _dial(self, link: Link) -> None:
        if link.state != "closed":
            return
        link.state = "connecting"
        self._dialling.submit(self._connect, link)

    def _connect(self, link: Link) -> None:
        """On a thread that may block."""
        try:
            peer = self._endpoint.connect(link.registration.addresses, _CONNECT_TIMEOUT_S)
            found = next((info["endpoint"] for info in self._endpoint.peers() if info["id"] == peer), None)
            if found != link.registration.endpoint:
                self._endpoint.disconnect(peer)
                raise TransferError("another process answers there")
            hello = self._endpoint.submit_message(peer, self._hello)
            if (
                not hello.wait(_CONNECT_TIMEOUT_S) or hello.error() is not None
            ):  # what follows may come by other streams
                self._endpoint.disconnect(peer)
                raise TransferError(f"it does not hear who calls: {hello.error() or 'no answer'}")
        except Exception as error:
            reason = f"{', '.join(link.registration.addresses)} cannot be reached: {error}"
            self._events.put(lambda: self._unreachable(link, reason))
            return
        self._events.put(lambda: self._connected(link, peer))

    def _connected(self, link: Link, peer: int) -> None:
        link.peer, link.state = peer, "open"
        self._links[peer] = link
        waiting, link.waiting = link.waiting, []
        for sending in waiting:
            self._guarded(sending, lambda sending=sending: self._submit_chunks(sending))  # type: ignore[misc]

    def _unreachable(self, link: Link, reason: str) -> None:
        link.state = "closed"
        waiting, link.waiting = link.waiting, []
        for sending in waiting:
            self._fail(sending, reason)

    def _lost(self, peer: int, why: str) -> None:
        link = self._links.pop(peer, None)
        if link is None:
            return
        link.state = "closed"
        logger.warning(
            "the connection to decode rank %s:%s is lost: %s", link.registration.host, link.registration.port, why
        )
        for sending in list(self._active.values()):
            if not sending.over and any(target.link is link for target in sending.targets):
                self._fail(sending, f"the connection to the decode server is lost: {why}")

    def _accept(self, sending: Sending, chunk: Chunk) -> None:
        if sending.over:
            return
        self._active[id(sending)] = sending
        sending.chunks.append(chunk)
        self._guarded(sending, lambda: self._submit_chunks(sending))

    def _submit_chunks(self, sending: Sending) -> None:
        if sending.over:
            return
        closed = [target.link for target in sending.targets if target.link.state != "open"]
        for link in closed:
            if sending not in link.waiting:
                link.waiting.append(sending)
            self._dial(link)
        if closed:
            return
        while sending.chunks:
            chunk = sending.chunks.popleft()
            if chunk.ready is not None:
                chunk.ready()
            for target in sending.targets:
                self._submit_kv(target, chunk)
            if chunk.last:
                sending.last = chunk

    def _submit_kv(self, target: _Target, chunk: Chunk) -> None:
        pairing = target.link.pairing
        there = target.pages[chunk.first : chunk.first + len(chunk.pages)]
        if len(there) != len(chunk.pages):
            raise TransferError(
                f"pages {chunk.first} to {chunk.first + len(chunk.pages)} are to be sent, the decode server asked for "
                f"{len(target.pages)}"
            )
        _check_items("pages", chunk.pages, pairing.kv.num_source_items)
        if len(there):
            self._write(target, pairing.kv.pieces(chunk.pages, there))
        if not chunk.last:
            return
        for number, here in enumerate(chunk.states):
            if here is None or not len(here):
                continue
            wanted = target.states[number] if number < len(target.states) else np.empty(0, np.int64)
            if len(wanted) != len(here):
                raise TransferError(
                    f"state {number}: {len(here)} items are to be sent, the decode server asked for {len(wanted)}"
                )
            _check_items(f"state {number}", here, pairing.states[number].num_source_items)
            self._write(target, pairing.states[number].pieces(here, wanted))

    def _advance(self, sending: Sending) -> None:
        for target in sending.targets:
            while target.tickets and target.tickets[0].done:
                reason = target.tickets.popleft().error()
                if reason is not None:
                    self._fail(sending, f"writing to the decode server failed: {reason}")
        if sending.over:
            if not sending.outstanding:
                self._active.pop(id(sending), None)
            return
        if sending.last is None:
            return
        for target in sending.targets:
            self._next_step(target, sending.last.row)
        if all(target.step == "sent" for target in sending.targets):
            self._end(sending)
            self._on_sent(sending)

    def _next_step(self, target: _Target, row: int) -> None:
        """Nothing is outstanding: what the last step wrote is there."""
        if target.tickets or target.step == "sent":
            return
        here, pairing = np.array([row], np.int64), target.link.pairing
        if target.step == "kv":
            _check_items("row", here, pairing.ready.num_source_items)
            self._write(target, pairing.rows.pieces(here, target.row))
            target.step = "rows"
        elif target.step == "rows":
            self._write(target, pairing.ready.pieces(here, target.row))
            target.step = "ready"
        else:
            target.step = "sent"

    def _write(self, target: _Target, pieces: Pieces) -> None:
        if not len(pieces.lengths):
            return
        link, grant = target.link, target.request.grant
        target.tickets.append(self._endpoint.submit_write(link.peer, grant, *pieces, timeout_s=self._timeout_s))

    def _fail(self, sending: Sending, reason: str) -> None:
        if not sending.over:
            self._end(sending)
            self._on_failed(sending, reason)

    def _end(self, sending: Sending) -> None:
        sending.over = True
        sending.chunks.clear()
        for target in sending.targets:
            for ticket in target.tickets:
                ticket.cancel()
            if sending in target.link.waiting:
                target.link.waiting.remove(sending)
        if not sending.outstanding:
            self._active.pop(id(sending), None)


def _check_items(what: str, items: Items, count: int) -> None:
    if len(items) and (items.min() < 0 or items.max() >= count):
        raise TransferError(f"{what}: numbers from {items.min()} to {items.max()}, allowed are 0 to {count - 1}")
