"""Two processes that share a node's DRAM and disk against a dictionary of prefixes, with kills and stops at any moment.

Hypothesis chooses what happens, from the seed, and shrinks what fails. `runs` is the number of histories.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sglang_tpusync.bench.report import Row
from tests.campaigns.campaign import as_count, disk, fraction, main
from tests.campaigns.node_process import NUM_SLOTS, Node, Pages

NUM_CHAINS = 3
PAGES_PER_CHAIN = 6  # all chains together do not fit into one region
STEPS = 40
SEEN_WITHIN_S = (
    20.0  # what one process sealed is found by the other; the stack looks for new regions five times a second
)

nodes = st.integers(0, 1)
first_pages = st.one_of(st.just(0), st.integers(0, PAGES_PER_CHAIN - 1))  # mostly heads: a tail alone is no hit
pages = st.tuples(st.integers(0, NUM_CHAINS - 1), first_pages, st.integers(1, 5)).map(
    lambda t: Pages(t[0], t[1], min(t[1] + t[2], PAGES_PER_CHAIN))
)
picks = st.integers(0, NUM_CHAINS - 1)  # of the chains that something is known of


class Counts:
    def __init__(self) -> None:
        self.histories = self.whole = self.kills = self.stops = self.promised = 0
        self.matched = self.read = 0


counts = Counts()


class Holdings:
    """What the model knows of one process: pages that must be there, by why, and all that may be."""

    def __init__(self) -> None:
        self.in_use: set[tuple[int, int]] = set()  # sealed in slots that are in use: in DRAM, also after a kill
        self.on_flash: set[tuple[int, int]] = set()
        self.maybe: set[tuple[int, int]] = set()

    def must(self) -> set[tuple[int, int]]:
        return self.in_use | self.on_flash


def each(wanted: Pages) -> list[tuple[int, int]]:
    return [(wanted.chain, page) for page in range(wanted.first, wanted.end)]


def leading(wanted: Pages, held: set[tuple[int, int]]) -> int:
    return next((i for i, page in enumerate(each(wanted)) if page not in held), wanted.end - wanted.first)


class NodeMachine(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        counts.histories += 1
        self.directory = Path(tempfile.mkdtemp(dir=disk()))
        (self.directory / "dram").mkdir(mode=0o700)
        self.nodes = [Node(self.directory), Node(self.directory)]
        self.held = [Holdings(), Holdings()]
        for node in self.nodes:
            node.flush()  # both have their regions
        self.whole = True

    def teardown(self) -> None:
        if not hasattr(self, "nodes"):
            return
        for node in self.nodes:
            node.close()
        shutil.rmtree(self.directory)
        counts.whole += self.whole

    @invariant()
    def finds_what_it_must_and_may(self) -> None:
        for n in (0, 1):
            for chain in range(NUM_CHAINS if self.runs(n) else 0):
                wanted = Pages(chain, 0, PAGES_PER_CHAIN)
                found = self.checked(self.nodes[n].match, wanted)
                self.expect_match(n, wanted, found)
                counts.matched += found

    def runs(self, n: int) -> bool:
        return not self.nodes[n].stopped

    def knows_some(self) -> bool:
        return bool(self.held[0].maybe | self.held[1].maybe)

    def pick_chain(self, pick: int) -> Pages:
        known = sorted({chain for chain, _ in self.held[0].maybe | self.held[1].maybe})
        return Pages(known[pick % len(known)], 0, PAGES_PER_CHAIN)

    @rule(n=nodes, wanted=pages)
    def put(self, n: int, wanted: Pages) -> None:
        if self.runs(n) and self.checked(self.nodes[n].put, wanted):
            self.held[n].in_use.update(each(wanted))
            self.held[n].maybe.update(each(wanted))

    @precondition(knows_some)
    @rule(n=nodes, pick=picks)
    def read(self, n: int, pick: int) -> None:
        if not self.runs(n):
            return
        wanted = self.pick_chain(pick)
        answer = self.checked(self.nodes[n].read, wanted)
        if answer is None:
            return
        self.expect_match(n, wanted, answer.matched)
        # Slots in use are nobody else's, and flash has what was flushed: only the rest may go meanwhile.
        least = min(leading(wanted, self.held[n].must()), answer.matched)
        self.expect(answer.read >= least, f"{answer.read} pages were read, {least} are certain")
        self.held[n].maybe.update(each(wanted)[: answer.read])
        counts.read += answer.read

    @precondition(knows_some)
    @rule(n=nodes, pick=picks)
    def promise(self, n: int, pick: int) -> None:
        if self.runs(n):
            wanted = self.pick_chain(pick)
            promised = self.checked(self.nodes[n].promise, wanted)
            self.held[n].maybe.update(each(wanted)[:promised])
            counts.promised += promised

    @rule(n=nodes)
    def release(self, n: int) -> None:
        if self.runs(n):
            self.checked(self.nodes[n].release)
            self.held[n].in_use.clear()

    @rule(n=nodes)
    def flush(self, n: int) -> None:
        if self.runs(n):
            self.expect(self.checked(self.nodes[n].flush), "a flush that does not end")
            self.held[n].on_flash.update(self.held[n].in_use)

    @precondition(knows_some)
    @rule(n=nodes, pick=picks, first=first_pages)
    def remove(self, n: int, pick: int, first: int) -> None:
        wanted = self.pick_chain(pick)._replace(first=first)
        if self.runs(n):
            self.checked(self.nodes[n].flush)  # what is on its way to flash may arrive after it was removed
            self.checked(self.nodes[n].remove, wanted)
            for kind in (self.held[n].in_use, self.held[n].on_flash, self.held[n].maybe):
                kind.difference_update(each(wanted))

    @precondition(lambda self: len(self.held[0].maybe | self.held[1].maybe) > NUM_SLOTS)
    @rule(n=nodes)
    def clear(self, n: int) -> None:
        if self.runs(n):
            self.checked(self.nodes[n].clear)
            self.held[n] = Holdings()

    @precondition(knows_some)
    @rule(n=nodes, pick=picks)
    def find_what_the_other_has(self, n: int, pick: int) -> None:
        """Stopped or not: its slots in use are hits here."""
        if not self.runs(n):
            return
        wanted = self.pick_chain(pick)
        least = leading(wanted, self.held[1 - n].in_use)
        until = time.monotonic() + SEEN_WITHIN_S
        while (found := self.checked(self.nodes[n].match, wanted)) < least and time.monotonic() < until:
            time.sleep(0.05)
        self.expect(found >= least, f"{found} of {least} pages of the other process are found")
        self.expect_match(n, wanted, found)

    @rule(n=nodes)
    def stop(self, n: int) -> None:
        if self.runs(0) and self.runs(1):  # one goes on
            self.nodes[n].stop()
            counts.stops += 1

    @precondition(lambda self: any(node.stopped for node in self.nodes))
    @rule()
    def go_on(self) -> None:
        for node in self.nodes:
            if node.stopped:
                node.go_on()

    @precondition(knows_some)
    @rule(
        n=nodes,
        wanted=pages,
        command=st.sampled_from([None, "put", "read", "promise", "remove", "flush", "clear"]),
        after_ms=st.integers(0, 8),
    )
    def kill(self, n: int, wanted: Pages, command: str | None, after_ms: int) -> None:
        """The next process of that rank has what was sealed, in DRAM or on flash, and nothing that is half."""
        during = None if command is None or not self.runs(n) else (command, wanted)
        self.nodes[n].kill(during, after_ms / 1000)
        self.nodes[n].start_again()
        counts.kills += 1
        held = self.held[n]
        if during is not None and command in ("put", "read", "promise"):
            held.maybe.update(each(wanted))
        if during is not None and command == "remove":
            held.in_use.difference_update(each(wanted))
            held.on_flash.difference_update(each(wanted))
        if during is not None and command == "clear":
            held.in_use, held.on_flash = set(), set()
        # A command that was under way may have taken slots of pages that were not in use, and no others.
        self.finds_what_it_must_and_may()
        held.in_use.clear()  # its slots are free now

    def expect_match(self, n: int, wanted: Pages, found: int) -> None:
        least = leading(wanted, self.held[n].must())
        most = leading(wanted, self.held[0].maybe | self.held[1].maybe)
        self.expect(least <= found <= most, f"{found} pages are found of {wanted}, {least} to {most} are expected")

    def checked(self, call: Any, *args: Any) -> Any:
        try:
            return call(*args)
        except AssertionError:
            self.whole = False
            raise

    def expect(self, holds: bool, what: str) -> None:
        self.whole = self.whole and holds
        assert holds, what


def run(seed_: int, runs: int) -> list[Row]:
    machine = seed(seed_)(NodeMachine)
    chosen = settings(
        max_examples=runs, stateful_step_count=STEPS, deadline=None, database=None, print_blob=True,
        phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=chosen)  # type: ignore[no-untyped-call]
    return [
        fraction("histories that the dictionary agrees with", counts.whole, counts.histories, "all of them"),
        as_count(f"SIGKILLs, over {NUM_SLOTS} slots a process", [counts.kills]),
        as_count("SIGSTOPs", [counts.stops]),
        as_count("pages matched", [counts.matched]),
        as_count("pages read back right", [counts.read]),
        as_count("pages promised and kept", [counts.promised]),
    ]


if __name__ == "__main__":
    main("model_node", run, runs=200)
