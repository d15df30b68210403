"""One process of a node as a campaign drives it: a DRAM region, a store and the stack over both, behind a pipe.

A page's content follows from its key, so a process verifies what it reads by itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_tpusync import _core

__all__ = ["NUM_SLOTS", "Node", "NodeError", "Pages", "Read"]

NUM_SLOTS = 8
PIECES = (4096, 512)
NAMESPACE = b"m" * 32
ANSWER_S = 60.0  # nothing waits for another process: an answer that takes so long is a hang


class Pages(NamedTuple):
    """Pages first to end of a chain, a prefix of so many pages."""

    chain: int
    first: int
    end: int


class Read(NamedTuple):
    """What a lookup promised, and how many leading pages arrived with their own bytes."""

    matched: int
    read: int


class NodeError(AssertionError):
    """The process broke its contract: wrong bytes, an exception, no answer."""


class Node:
    """The parent's end. One command at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.stopped = False
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._directory, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def match(self, pages: Pages) -> int:
        return int(self._ask("match", pages))

    def put(self, pages: Pages) -> bool:
        """Seals them in slots that stay in use until `release`. False: there are not enough free slots."""
        return bool(self._ask("put", pages))

    def read(self, pages: Pages) -> Read | None:
        """None: there are not enough free slots."""
        answer = self._ask("read", pages)
        return None if answer is None else Read(*answer)

    def promise(self, pages: Pages) -> int:
        """Answers how many pages were promised, each of them read after others had wanted its slot."""
        return int(self._ask("promise", pages))

    def release(self) -> None:
        self._ask("release", None)

    def flush(self) -> bool:
        return bool(self._ask("flush", None))

    def remove(self, pages: Pages) -> None:
        self._ask("remove", pages)

    def clear(self) -> None:
        self._ask("clear", None)

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)
        self.stopped = True

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)
        self.stopped = False

    def kill(self, during: tuple[str, Pages] | None = None, after_s: float = 0.0) -> None:
        """SIGKILL, `after_s` into a command if one is given."""
        if during is not None:
            self._connection.send(during)
            self._process.join(after_s)
        self.close()

    def start_again(self) -> None:
        self.stopped = False
        self._start()

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def _ask(self, command: str, pages: Pages | None) -> Any:
        self._connection.send((command, pages))
        if not self._connection.poll(ANSWER_S):
            raise NodeError(f"{command} of {pages}: no answer in {ANSWER_S:g} s")
        failed, answer = self._connection.recv()
        if failed:
            raise NodeError(f"{command} of {pages}: {answer}")
        return answer


def key_of(chain: int, page: int) -> bytes:
    return np.random.default_rng((chain, page)).bytes(_core.KEY_BYTES)


def keys_of(chain: int, first: int, end: int) -> bytes:
    return b"".join(key_of(chain, page) for page in range(first, end))


def content_of(chain: int, page: int, piece: int) -> NDArray[np.uint8]:
    return np.random.default_rng((chain, page, piece)).integers(0, 256, PIECES[piece], np.uint8)


class _Server:
    def __init__(self, directory: Path) -> None:
        self.region = _core.HostRegion(
            root=str(directory / "dram"), namespace=NAMESPACE, piece_bytes=list(PIECES), num_slots=NUM_SLOTS,
            reserve_bytes=0,
        )  # fmt: skip
        self.store = _core.FlashStore(
            path=str(directory / "flash"), namespace=NAMESPACE, namespace_json="{}", page_bytes=sum(PIECES),
            capacity_bytes=64 << 20, floor_bytes=0, write_budget_bytes_per_day=1 << 40, allow_tmpfs=True,
        )  # fmt: skip
        self.stack = _core.TierStack(region=self.region, store=self.store)
        memory, starts = self.region.memory(), np.cumsum([0, *PIECES[:-1]]) * NUM_SLOTS
        self.slots = [
            [
                memory[start + slot * size : start + (slot + 1) * size]
                for start, size in zip(starts, PIECES, strict=True)
            ]
            for slot in range(NUM_SLOTS)
        ]
        self.in_use: list[NDArray[np.int64]] = []

    def match(self, pages: Pages) -> int:
        total, own, peer, flash = self.stack.match(keys_of(*pages), keys_of(pages.chain, 0, pages.first))
        if own + peer + flash != total or not 0 <= total <= pages.end - pages.first:
            raise NodeError(f"a match of {total} is {own} own, {peer} of peers and {flash} of flash")
        return total

    def put(self, pages: Pages) -> bool:
        slots = self.region.alloc(pages.end - pages.first)
        if slots is None:
            return False
        for slot, page in zip(slots.tolist(), range(pages.first, pages.end), strict=True):
            for piece, view in enumerate(self.slots[slot]):
                view[:] = content_of(pages.chain, page, piece)
        self.in_use.append(slots)
        outcomes = self.stack.put(keys_of(*pages), keys_of(pages.chain, 0, pages.first), slots)
        if outcomes.any():
            raise NodeError(f"outcomes of a put: {outcomes.tolist()}")
        return True

    def read(self, pages: Pages) -> Read | None:
        matched = self.match(pages)
        slots = self.region.alloc(matched)
        if slots is None:
            return None
        good = self._read(Pages(pages.chain, pages.first, pages.first + matched), slots)
        self.region.free(slots)
        return Read(matched, good)

    def _read(self, pages: Pages, slots: NDArray[np.int64]) -> int:
        for slot in slots.tolist():
            for view in self.slots[slot]:
                view[:] = 0x5A
        addresses = np.array([[view.ctypes.data for view in self.slots[slot]] for slot in slots.tolist()], np.uint64)
        prefix = keys_of(pages.chain, 0, pages.first)
        ticket = self.stack.submit_get(keys_of(*pages), prefix, addresses.reshape(-1, len(PIECES)), slots)
        if not ticket.wait(ANSWER_S):
            raise NodeError("a get that does not end")
        outcomes = ticket.outcomes().tolist()
        for page, slot, outcome in zip(range(pages.first, pages.end), slots.tolist(), outcomes, strict=True):
            right = all(
                np.array_equal(view, content_of(pages.chain, page, piece))
                for piece, view in enumerate(self.slots[slot])
            )
            if outcome == 0 and not right:
                raise NodeError(f"page {page} of chain {pages.chain} arrived with wrong bytes")
        return next((i for i, outcome in enumerate(outcomes) if outcome != 0), len(outcomes))

    def promise(self, pages: Pages) -> int:
        promised = self.stack.promise(keys_of(*pages), keys_of(pages.chain, 0, pages.first), 10.0)
        count = promised.num_pages
        # As many slots as there are: what is promised has to survive that others want all of them.
        others = self.region.alloc(self.region.available)
        matched = self.match(Pages(pages.chain, pages.first, pages.first + count))
        if others is not None:
            self.region.free(others)
        promised.release()
        if matched != count:
            raise NodeError(f"{count} pages were promised, {matched} are there")
        return count

    def release(self, _: None) -> None:
        for slots in self.in_use:
            self.region.free(slots)
        self.in_use.clear()

    def flush(self, _: None) -> bool:
        return self.stack.flush(ANSWER_S)

    def remove(self, pages: Pages) -> None:
        self.stack.remove(keys_of(*pages))

    def clear(self, _: None) -> None:
        self.stack.clear()


def _serve(directory: Path, connection: Connection) -> None:
    server = _Server(directory)
    while True:
        try:
            command, pages = connection.recv()
        except EOFError:
            return
        try:
            connection.send((False, getattr(server, command)(pages)))
        except Exception as error:
            connection.send((True, f"{type(error).__name__}: {error}"))
