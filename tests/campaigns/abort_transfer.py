"""Rooms between a prefill and a decode rank, given up at any moment by either side, or with their connection.

What was sent arrives whole. What was given up is quiet: once a grant says so, its pages are painted, and nobody may
have touched the paint when they are used again. At the end nothing is left: rooms, grants, threads, file descriptors.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from sglang_tpusync.bench.report import Row
from sglang_tpusync.disagg.courier import Sending
from tests.campaigns.campaign import as_count, bound, fraction, main
from tests.transfer_ranks import PAGES, Node, chunk

ENDS = ("sent", "sent", "revoked", "dropped", "both", "lost")
WIDTH = 2  # rooms at once, each with half of the pages
TIMEOUT_S = 60.0


class Slot:
    """Half of the pages and a metadata row, used by one room after the other."""

    def __init__(self, node: Node, number: int) -> None:
        self.node = node
        self.pages = list(range(number, PAGES, WIDTH))
        self.row = 1 + number
        self.paint: NDArray[np.uint8] | None = None
        self.touched = 0

    def begin(self, room: int, order: list[int]) -> Sending:
        node, kv = self.node, self.node.decode[0].kv
        if self.paint is not None and not np.array_equal(kv[:, self.pages], self.paint):
            self.touched += 1
        self.source = order[: len(self.pages)]
        sending = Sending(room, [(node.links[0][0], node.request(0, room, self.pages, row=self.row))])
        half = len(self.pages) // 2
        node.couriers[0].send(sending, chunk(self.source[:half], 0, False))
        node.couriers[0].send(sending, chunk(self.source[half:], half, True))
        return sending

    def is_whole(self) -> bool:
        return bool(np.array_equal(self.node.decode[0].kv[:, self.pages], self.node.whole[:, self.source]))

    def end(self, room: int, colour: int) -> None:
        grants = self.node.grants[0]
        grants.revoke(room)
        until = time.monotonic() + TIMEOUT_S
        while not grants.is_quiet(room):
            if time.monotonic() > until:
                raise TimeoutError(f"room {room} is not quiet")
            time.sleep(0.0002)
        kv = self.node.decode[0].kv
        kv[:, self.pages] = colour
        self.paint = kv[:, self.pages].copy()


def run(seed: int, runs: int) -> list[Row]:
    generator = np.random.default_rng(seed)
    tally: Counter[str] = Counter()
    node = Node(1, 1, 8, same_host=False, frame_bytes=4096)
    try:
        slots = [Slot(node, number) for number in range(WIDTH)]
        _rooms(node, slots, range(20), generator, Counter())  # pools of threads grow to their size
        _settle(node, slots[0], -1000)
        before = _resources()
        _rooms(node, slots, range(20, 20 + runs), generator, tally)
        _settle(node, slots[0], -2000)
        left = {"rooms": node.couriers[0].num_active, "grants": len(node.grants[0])}
        after = _resources()
    finally:
        node.close()
    ends = [as_count(f"rooms {name}", [tally[name]]) for name in sorted(set(ENDS))]
    return [
        *ends,
        fraction("rooms that were sent and arrived whole", tally["whole"], tally["over well"], "all of them"),
        bound("pages written after their grant was quiet", sum(slot.touched for slot in slots), "slots", 0.5),
        bound("rooms left", left["rooms"], "rooms", 0.5),
        bound("grants left", left["grants"], "grants", 0.5),
        bound("threads", after[0] - before[0], "more", 0.5),
        bound("file descriptors", after[1] - before[1], "more", 0.5),
    ]


def _rooms(node: Node, slots: list[Slot], rooms: range, generator: np.random.Generator, tally: Counter[str]) -> None:
    before: tuple[int, Sending, str] | None = None  # two rooms are always on their way together
    for room in (*rooms, None):
        now = None
        if room is not None:
            how = ENDS[generator.integers(0, len(ENDS))]
            tally[how] += 1
            now = (room, slots[room % WIDTH].begin(room, generator.permutation(PAGES).tolist()), how)
        if before is not None:
            _end(node, slots[before[0] % WIDTH], *before, generator, tally)
        before = now


def _end(
    node: Node, slot: Slot, room: int, sending: Sending, how: str, generator: np.random.Generator, tally: Counter[str]
) -> None:
    if how == "sent":
        well = node.wait(room) == [None]  # else the connection was lost under it
        tally["over well"] += well
        tally["whole"] += well and slot.is_whole()
    else:
        time.sleep(float(generator.uniform(0, 0.004)))
        if how == "lost":
            for info in node.readers[0].peers():
                node.readers[0].disconnect(info["id"])
        if how in ("revoked", "both"):
            node.grants[0].revoke(room)
        if how in ("dropped", "both"):
            node.couriers[0].drop(sending)
    slot.end(room, int(generator.integers(0, 256)))


def _settle(node: Node, slot: Slot, room: int) -> None:
    """One connection, and no other on its way or on its way out: as before, as after."""
    until = time.monotonic() + TIMEOUT_S
    while True:  # what was lost a moment ago may still fail a room
        room -= 1
        slot.begin(room, list(range(PAGES)))
        well = node.wait(room) == [None]
        slot.end(room, 0)
        if well:
            break
    files: list[int] = []  # until twenty looks in a row see the same number, and no look sees another connection
    while files[-20:].count(files[-1] if files else -1) < 20 or node.couriers[0].num_active:
        if time.monotonic() > until:
            return
        time.sleep(0.02)
        one = all(len(end.peers()) == 1 for end in (node.writers[0], node.readers[0]))
        files.append(_resources()[1] if one else -len(files))


def _resources() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


if __name__ == "__main__":
    main("abort_transfer", run, runs=10_000)
