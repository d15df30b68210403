"""The measurement of `bench serving` on an engine that is played, so that every failure can be staged."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from sglang_tpusync.bench.report import Source
from sglang_tpusync.bench.serving.answer import Answer, first_difference, unproven_source
from sglang_tpusync.bench.serving.plan import Plan
from sglang_tpusync.bench.serving.prompts import prompt_ids
from sglang_tpusync.bench.serving.render import TABLE_WIDTH, markdown_table, rich_table, write_chart
from sglang_tpusync.bench.serving.rows import differences, make_rows, verdict
from sglang_tpusync.bench.serving.session import Session, UnprovenSourceError
from sglang_tpusync.errors import ConfigError

PAGE = 64
SECONDS = {"cold": 10.0, "device": 0.1, "host": 0.2, "storage": 0.3}


class PlayedServer:
    """A server of three tiers in a dictionary: a device pool in LRU order, a host pool, a store that survives."""

    def __init__(self, backend: str, device_tokens: int) -> None:
        self.backend = backend
        self.device_tokens = device_tokens
        self.device: dict[tuple[int, ...], None] = {}
        self.host: set[tuple[int, ...]] = set()
        self.store: set[tuple[int, ...]] = set()
        self.tampered = False
        self.forgets_the_store = False
        self.wrong_from: str | None = None
        self.slowdown = 1.0

    def ask(self, prompt: Sequence[int]) -> Answer:
        key = tuple(prompt)
        tier = next((t for t in ("device", "host", "storage") if key in self._places()[t]), "cold")
        if self.backend == "none":
            tier = "cold"
        self._keep(key)
        hit = len(key) - PAGE if tier != "cold" else 0
        first = sum(key) % 1000 + (1 if self.tampered and tier == "storage" else 0)
        return Answer(
            ids=(first, 7),
            logprobs=(-0.5, -0.25 if self.wrong_from != tier else -0.26),
            ttft_s=SECONDS[tier] * (self.slowdown if tier == "storage" else 1.0),
            prompt_tokens=len(key),
            cached_tokens=hit,
            by_tier={tier: hit} if hit else {},
        )

    def settle(self) -> None:
        self.device.clear()
        self.host.clear()
        if self.forgets_the_store:
            self.store.clear()

    def crash(self) -> None:
        self.settle()

    def restart(self) -> None: ...

    def stop(self) -> None: ...

    def _places(self) -> dict[str, object]:
        return {"device": self.device, "host": self.host, "storage": self.store}

    def _keep(self, key: tuple[int, ...]) -> None:
        self.device.pop(key, None)
        self.device[key] = None
        while sum(map(len, self.device)) > self.device_tokens:
            del self.device[next(iter(self.device))]
        self.host.add(key)
        self.store.add(key)


PLAN = Plan(prompt_tokens=(512, 1024, 2048), num_rounds=3, backends=("tpusync", "file"), restart_goal=0.06)


def play(plan: Plan = PLAN, **faults: object) -> tuple[Session, list[PlayedServer]]:
    servers = [PlayedServer(backend, plan.device_tokens) for backend in ("none", *plan.backends)]
    for name, value in faults.items():
        setattr(servers[1], name, value)
    session = Session(plan, servers)
    session.run_rounds()
    session.store_control(servers[1])
    for server in servers[1:]:
        server.crash()
        server.restart()
    session.run_restarted()
    servers[1].tampered = True
    session.run_control(servers[1])
    return session, servers


def reasons(session: Session, plan: Plan = PLAN) -> list[str]:
    return verdict(plan, make_rows(plan, session.samples, 8192), differences(plan, session.samples))


def test_a_sound_server_gives_every_row_and_passes() -> None:
    session, _ = play()
    rows = make_rows(PLAN, session.samples, 8192)
    cases = {(row.prompt_tokens, row.source, row.backend) for row in rows}
    sources: tuple[Source, ...] = ("cold", "l1", "l2", "l3", "restart")
    expected = {(n, s, b) for n in PLAN.prompt_tokens for s in sources for b in PLAN.backends}
    expected |= {(n, "nocache", "none") for n in PLAN.prompt_tokens} | {(512, "control", "tpusync")}
    assert cases == expected
    assert reasons(session) == []
    restart = next(row for row in rows if row.source == "restart" and row.prompt_tokens == 2048)
    assert (restart.backend, restart.ratio, restart.goal) == ("tpusync", pytest.approx(0.03), 0.06)
    assert restart.cached_by_tier == {"device": 0, "host": 0, "storage": 2048 - PAGE}
    assert restart.loaded_bytes == (2048 - PAGE) * 8192
    assert restart.peers == {"file": pytest.approx(0.3)}


def test_every_round_has_prompts_of_its_own() -> None:
    session, _ = play()
    keys = {(s.round_index, s.prompt_tokens) for s in session.samples if s.source == "cold" and s.backend == "file"}
    assert len(keys) == PLAN.num_rounds * len(PLAN.prompt_tokens)


@pytest.mark.parametrize("tier", ["device", "host", "storage"])
def test_one_wrong_log_probability_is_reported(tier: str) -> None:
    session, _ = play(wrong_from=tier)
    assert any("log probability 1 differs" in reason for reason in reasons(session))


def test_a_store_that_forgets_gives_an_error_instead_of_a_row() -> None:
    with pytest.raises(UnprovenSourceError, match="l3 needs 448 of 512 tokens from storage"):
        play(forgets_the_store=True)


def test_a_control_that_changes_nothing_fails_the_run() -> None:
    session, servers = play()
    servers[1].tampered = False
    session.samples = [sample for sample in session.samples if sample.source != "control"]
    servers[1].settle()
    session.run_control(servers[1])
    assert any("the check cannot fail" in reason for reason in reasons(session))


def test_a_slow_restart_misses_the_goal_and_the_peer() -> None:
    session, _ = play(slowdown=3.0)
    found = reasons(session)
    assert any("of cold, the goal is at most 0.06" in reason for reason in found)
    assert any("behind file" in reason for reason in found)


def test_tolerance_forgives_log_probabilities_but_not_ids() -> None:
    right = Answer(ids=(1, 2), logprobs=(-1.0, -2.0), ttft_s=1, prompt_tokens=3, cached_tokens=0, by_tier={})
    near = msgspec.structs.replace(right, logprobs=(-1.0, -2.008))
    assert first_difference(right, right) is None
    assert first_difference(right, near) is not None
    assert first_difference(right, near, tolerance=0.01) is None
    assert first_difference(right, msgspec.structs.replace(right, ids=(1, 3)), tolerance=0.01) is not None
    assert first_difference(right, msgspec.structs.replace(right, ids=(1,), logprobs=(-1.0,)), tolerance=9) is not None
    assert first_difference(right, msgspec.structs.replace(right, logprobs=()), tolerance=9) is not None
    nan = msgspec.structs.replace(right, logprobs=(-1.0, float("nan")))
    assert first_difference(nan, nan, tolerance=9) is not None


def test_a_cold_run_with_a_hit_proves_nothing() -> None:
    hit = Answer(ids=(), logprobs=(), ttft_s=1, prompt_tokens=128, cached_tokens=64, by_tier={"device": 64})
    assert unproven_source(hit, "cold", PAGE) is not None
    assert unproven_source(hit, "l1", PAGE) is None
    assert unproven_source(hit, "l2", PAGE) is not None


def test_prompts_are_the_same_everywhere_and_share_no_first_token_run() -> None:
    assert prompt_ids(0, "prompt", 0, 2048, num_tokens=4)[:4] == prompt_ids(0, "prompt", 0, 2048, num_tokens=9)[:4]
    first_pages = [tuple(prompt_ids(s, "prompt", r, 99, num_tokens=64)) for s in range(3) for r in range(-1, 4)]
    assert len(set(first_pages)) == len(first_pages)


def test_pushes_leave_nothing_older_in_the_device_pool() -> None:
    for lengths in ((512,), (2048, 8192, 16384), (700, 1000)):
        plan = Plan(prompt_tokens=lengths)
        assert sum(plan.push_tokens) >= plan.device_tokens
        assert plan.device_tokens % plan.page_tokens == 0
        assert plan.longest + plan.output_tokens < plan.device_tokens < 2 * plan.longest


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"prompt_tokens": ()}, "--prompt-tokens"),
        ({"prompt_tokens": (100,)}, "--prompt-tokens 100: allowed are 512 to 65519"),
        ({"model": "smollm2", "prompt_tokens": (9000,)}, "512 to 8175 with smollm2"),
        ({"num_rounds": 0}, "--rounds 0"),
        ({"tolerance": -1.0}, "--tolerance -1.0"),
    ],
)
def test_a_plan_out_of_range_names_the_option_the_value_and_the_range(option: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Plan(**option).validate()  # type: ignore[arg-type]


def test_the_table_and_the_picture_are_made(tmp_path: Path) -> None:
    session, _ = play()
    rows = make_rows(PLAN, session.samples, 8192)
    console = Console(width=TABLE_WIDTH, record=True, file=io.StringIO())
    console.print(rich_table(rows, "title"))
    assert "\N{HORIZONTAL ELLIPSIS}" not in console.export_text()
    assert markdown_table(rows).count("\n") == len(rows) + 2
    write_chart(rows, tmp_path / "x" / "ttft.png", "title")
    assert (tmp_path / "x" / "ttft.png").read_bytes().startswith(b"\x89PNG")
