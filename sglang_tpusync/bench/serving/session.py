"""The run itself: every arm in every round, each answer proven to come from where its row says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from sglang_tpusync.bench.report import Source
from sglang_tpusync.bench.rounds import interleaved
from sglang_tpusync.bench.serving.answer import Answer, unproven_source
from sglang_tpusync.bench.serving.engines import Engine
from sglang_tpusync.bench.serving.plan import Plan
from sglang_tpusync.bench.serving.prompts import prompt_ids
from sglang_tpusync.errors import TpuSyncError

__all__ = ["CONTROL_ROUND", "Sample", "Session", "UnprovenSourceError", "control_prompt"]

CONTROL_ROUND = -1  # the round of the prompt that is tampered with: it takes no part in the medians


class UnprovenSourceError(TpuSyncError):
    """The server's own details contradict what a row would claim: then there is no such row."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One measured answer. Immutable."""

    round_index: int
    prompt_tokens: int
    source: Source
    backend: str
    answer: Answer


class Session:
    """Asks the engines in rounds and keeps what they said in `samples`. Confined to one thread."""

    def __init__(self, plan: Plan, engines: Sequence[Engine], say: Callable[[str], None] = lambda _: None) -> None:
        self._plan = plan
        self._engines = list(engines)
        self._cached = [engine for engine in engines if engine.backend != "none"]
        self._say = say
        self.samples: list[Sample] = []

    def run_rounds(self) -> None:
        """Without cache; then cold, L3, L2 and L1 of every length and backend; `num_rounds` times, interleaved."""
        for engine in self._engines:
            self._say(f"warming up: {engine.backend}")
            self._warm_up(engine)
        for engine in self._cached:
            self._push(engine)
        last = None
        for index, engine in interleaved(self._engines, self._plan.num_rounds):
            if index != last:
                self._say(f"round {index + 1} of {self._plan.num_rounds}")
                last = index
            self._round_of(engine, index)

    def run_reduced(self) -> None:
        """Cold, L1 and, after a flush, L3: what can be had from a server whose sizes and life are not ours."""
        for index, engine in interleaved(self._engines, self._plan.num_rounds):
            for length in self._plan.prompt_tokens:
                self._measure(engine, index, length, "cold")
                self._measure(engine, index, length, "l1")
            engine.settle()
            for length in self._plan.prompt_tokens:
                self._measure(engine, index, length, "l3")

    def run_restarted(self) -> None:
        """Every prompt of every round once more, from servers that were killed and started again."""
        for engine in self._cached:
            self._warm_up(engine)
        for index, engine in interleaved(self._cached, self._plan.num_rounds):
            for length in self._plan.prompt_tokens:
                self._measure(engine, index, length, "restart")

    def store_control(self, engine: Engine) -> None:
        """Puts the prompt whose pages will be tampered with into the store; the reference engine answers it too."""
        for one in (*(e for e in self._engines if e.backend == "none"), engine):
            self._measure(one, CONTROL_ROUND, self._plan.control_tokens, "nocache" if one.backend == "none" else "cold")
        engine.settle()

    def run_control(self, engine: Engine) -> None:
        """Asks for the tampered prefix."""
        self._measure(engine, CONTROL_ROUND, self._plan.control_tokens, "control")

    def _round_of(self, engine: Engine, index: int) -> None:
        lengths = self._plan.prompt_tokens
        if engine.backend == "none":
            for length in lengths:
                self._measure(engine, index, length, "nocache")
            return
        for length in lengths:
            self._measure(engine, index, length, "cold")
        engine.settle()
        for length in lengths:
            self._measure(engine, index, length, "l3")
        self._push(engine)
        for length in lengths:
            self._measure(engine, index, length, "l2")
            self._measure(engine, index, length, "l1")

    def _warm_up(self, engine: Engine) -> None:
        engine.ask(self._push_prompt(0))

    def _push(self, engine: Engine) -> None:
        """Fills the device pool with prompts of no interest: what was there before is then in host DRAM only."""
        for number in range(len(self._plan.push_tokens)):
            engine.ask(self._push_prompt(number))

    def _push_prompt(self, number: int) -> list[int]:
        return prompt_ids(self._plan.seed, "push", number, num_tokens=self._plan.push_tokens[number])

    def _measure(self, engine: Engine, index: int, length: int, source: Source) -> None:
        answer = engine.ask(_prompt(self._plan, index, length))
        if problem := unproven_source(answer, source, self._plan.page_tokens):
            raise UnprovenSourceError(f"{engine.backend}, round {index + 1}: {problem}")
        self.samples.append(
            Sample(round_index=index, prompt_tokens=length, source=source, backend=engine.backend, answer=answer)
        )


def control_prompt(plan: Plan) -> list[int]:
    """The prompt that `store_control` stores."""
    return _prompt(plan, CONTROL_ROUND, plan.control_tokens)


def _prompt(plan: Plan, index: int, length: int) -> list[int]:
    return prompt_ids(plan.seed, "prompt", index, length, num_tokens=length)
