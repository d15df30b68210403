"""The identity check of the benchmarks can fail, and damage on disk cannot change an answer: with a real server.

`bench serving` runs whole, and passes. Beside it five prompts are answered cold and stored, four of the stored prefixes
are tampered with after the kill, and the new server answers all five out of the store.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglang_tpusync.bench.serving.answer import Answer, first_difference, unproven_source
from sglang_tpusync.bench.serving.plan import Plan
from sglang_tpusync.bench.serving.prompts import prompt_ids
from sglang_tpusync.bench.serving.rows import differences, make_rows, verdict
from sglang_tpusync.bench.serving.run import started, tamper_with_control
from sglang_tpusync.bench.serving.servers import kv_bytes_per_token
from sglang_tpusync.bench.serving.session import Session
from sglang_tpusync.testing import tamper

pytestmark = [pytest.mark.server, pytest.mark.sglang, pytest.mark.timeout(1500)]

PLAN = Plan(prompt_tokens=(2048,), num_rounds=1)
TOKENS = 2048
DAMAGES = ("nothing", "swapped pages", "replaced page", "byte of a slot", "byte of the table")


class Outcome:
    """The rows of the measurement and its verdict; the cold answers, those after the damage, and the second log."""

    def __init__(self, session: Session, cold: dict[str, Answer], after: dict[str, Answer], log: str) -> None:
        self.rows = make_rows(PLAN, session.samples, kv_bytes_per_token(PLAN.model))
        self.verdict = verdict(PLAN, self.rows, differences(PLAN, session.samples))
        self.cold, self.after, self.log = cold, after, log


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    directory = tmp_path_factory.mktemp("identity")
    with started(PLAN, directory, print, summary_interval_s=0.001) as (reference, ours):
        session = Session(PLAN, [reference, ours])
        session.run_rounds()
        session.store_control(ours)
        reference.stop()
        cold = {damage: ours.ask(prompt(damage)) for damage in DAMAGES}
        ours.settle()
        ours.crash()
        tamper_with_control(PLAN, ours.store)
        for damage in DAMAGES:
            do_damage(damage, ours.store)
        ours.restart()
        session.run_restarted()
        session.run_control(ours)
        after = {damage: ours.ask(prompt(damage)) for damage in DAMAGES}
        return Outcome(session, cold, after, ours.log())


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


def test_the_benchmark_passes_with_a_row_for_every_tier(outcome: Outcome) -> None:
    assert outcome.verdict == []
    tiers = {row.source: row.cached_by_tier for row in outcome.rows if row.backend == "tpusync"}
    whole = TOKENS - PLAN.page_tokens
    assert tiers["cold"] == {"device": 0, "host": 0, "storage": 0}
    assert [tiers["l1"]["device"], tiers["l2"]["host"], tiers["l3"]["storage"], tiers["restart"]["storage"]] == [
        whole
    ] * 4
    assert {row.source: row.identical for row in outcome.rows} == {
        **dict.fromkeys(("nocache", "cold", "l1", "l2", "l3", "restart"), True),
        "control": False,
    }


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
