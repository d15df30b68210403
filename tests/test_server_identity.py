"""The identity check of the benchmarks can fail, and damage on disk cannot change an answer: with a real server.

Five prompts are answered cold and stored, the server is killed, four of the stored prefixes are tampered with, and a
new server answers all five out of the store.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_tpusync.bench.serving.answer import Answer, first_difference, unproven_source
from sglang_tpusync.bench.serving.plan import Plan
from sglang_tpusync.bench.serving.prompts import prompt_ids
from sglang_tpusync.bench.serving.servers import ServerEngine
from sglang_tpusync.testing import tamper

pytestmark = [pytest.mark.server, pytest.mark.sglang, pytest.mark.timeout(900)]

PLAN = Plan(prompt_tokens=(2048,), num_rounds=1)
TOKENS = 2048
DAMAGES = ("nothing", "swapped pages", "replaced page", "byte of a slot", "byte of the table")


class Outcome:
    """The cold answers, those after the damage, and what the second server logged."""

    def __init__(self, cold: dict[str, Answer], after: dict[str, Answer], log: str) -> None:
        self.cold, self.after, self.log = cold, after, log


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    directory = tmp_path_factory.mktemp("identity")
    engine = ServerEngine(PLAN, "tpusync", directory, summary_interval_s=0.001)
    engine.start()
    try:
        cold = {damage: engine.ask(prompt(damage)) for damage in DAMAGES}
        engine.settle()
        engine.crash()
        for damage in DAMAGES:
            do_damage(damage, engine.store)
        engine.restart()
        after = {damage: engine.ask(prompt(damage)) for damage in DAMAGES}
        yield Outcome(cold, after, engine.log())
    finally:
        engine.stop()


def prompt(damage: str) -> list[int]:
    return prompt_ids(0, "identity", damage, num_tokens=TOKENS)


def do_damage(damage: str, store: Path) -> None:
    keys = tamper.page_keys(prompt(damage), PLAN.page_tokens)
    middle = len(keys) // 2
    if damage == "swapped pages":
        tamper.swap_pages(store, keys[1], keys[middle])
    elif damage == "replaced page":
        tamper.replace_page(store, keys[middle], by=keys[1])
    elif damage == "byte of a slot":
        tamper.flip_payload_byte(store, keys[middle], at=12_345)
    elif damage == "byte of the table":
        tamper.flip_record_byte(store, keys[middle], at=20)


def test_an_untouched_prefix_gives_the_same_bits_from_the_store(outcome: Outcome) -> None:
    assert unproven_source(outcome.after["nothing"], "restart", PLAN.page_tokens) is None
    assert first_difference(outcome.cold["nothing"], outcome.after["nothing"]) is None


@pytest.mark.parametrize("damage", ["swapped pages", "replaced page"])
def test_the_check_reports_pages_that_are_wrong_under_right_checksums(outcome: Outcome, damage: str) -> None:
    assert unproven_source(outcome.after[damage], "control", PLAN.page_tokens) is None
    assert first_difference(outcome.cold[damage], outcome.after[damage]) is not None


def test_a_replaced_page_is_beyond_every_tolerance(outcome: Outcome) -> None:
    damage = "replaced page"
    assert first_difference(outcome.cold[damage], outcome.after[damage], tolerance=0.02) is not None


@pytest.mark.parametrize("damage", ["byte of a slot", "byte of the table"])
def test_a_flipped_byte_is_a_miss_and_the_answer_stays(outcome: Outcome, damage: str) -> None:
    stored = outcome.after[damage].by_tier.get("storage", 0)
    assert stored == TOKENS // 2, "the pages before the damage are hits, it and those after it are not"
    assert first_difference(outcome.cold[damage], outcome.after[damage]) is None


def test_each_damage_is_counted_and_logged_once(outcome: Outcome) -> None:
    assert len(re.findall(r"does not hold what was written to it", outcome.log)) == 1
    assert len(re.findall(r"damaged records? in a slot table", outcome.log)) == 1
    missed = [int(number) for number in re.findall(r"store of KV pages .* missed (\d+)", outcome.log)]
    assert missed, outcome.log[-2000:]
    assert missed[-1] == TOKENS // PLAN.page_tokens // 2 - 1  # of the batch of 31 pages, from the damaged one on
