"""Real servers whose host pools are DRAM regions: what one has computed the others read, and a crash loses none."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest
from test_hicache_server import (
    PAGE,
    START_TIMEOUT_S,
    ask,
    ask_until_stored,
    by_name,
    from_store,
    last_summary,
    prompt,
    same,
)

from sglang_tpusync.testing.models import build_model
from sglang_tpusync.testing.server import Generation, Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(1500)]

NUM_TOKENS = 24 * PAGE


@pytest.fixture(scope="module")
def model() -> Path:
    return build_model("long-llama")


@pytest.fixture
def dram(tmp_path: Path) -> str:
    """DRAM only: a hit cannot have come from anywhere else."""
    options = {
        "path": str(tmp_path / "store"), "capacity": "1GB", "floor": 0, "host_pool": "shared",
        "host_pool_path": str(tmp_path / "dram"), "host_pool_reserve": 0, "spill": "never",
    }  # fmt: skip
    return json.dumps(options)


def test_servers_of_a_node_share_dram_and_outlive_each_other(model: Path, dram: str) -> None:
    prompts = [prompt(seed) for seed in (21, 22, 23)]
    with Server(model, args=by_name(dram), timeout_s=START_TIMEOUT_S) as first:
        cold = [ask(first, tokens) for tokens in prompts]
        for tokens, answer in zip(prompts, cold, strict=True):
            assert answer.cached_tokens == 0
            assert same(answer, ask_until_stored(first, tokens, NUM_TOKENS))
        with Server(model, args=by_name(dram), timeout_s=START_TIMEOUT_S) as second:
            assert same(hit(second, prompts[0]), cold[0])
            load = Load(second)  # other requests in a batch change bits of the logarithms, not tokens
            for pid in first.pids():
                os.kill(pid, signal.SIGSTOP)
            assert hit(second, prompts[1]).output_ids == cold[1].output_ids
            first.kill()
            assert hit(second, prompts[2]).output_ids == cold[2].output_ids
            assert load.stop() > 0
            second.kill()
    with Server(model, args=by_name(dram), timeout_s=START_TIMEOUT_S) as third:
        for tokens, answer in zip(prompts, cold, strict=True):
            assert same(hit(third, tokens), answer)
        assert " 0 pages adopted" not in third.log()
        third.stop()
        summary = last_summary(third)
        assert "faults 0" in summary
        assert "on disk 0.000 GB" in summary


def hit(server: Server, tokens: list[int]) -> Generation:
    answer = ask(server, tokens)
    assert from_store(answer) == NUM_TOKENS
    return answer


class Load:
    """Requests that nobody has seen before, one after the other, until it is stopped."""

    def __init__(self, server: Server) -> None:
        self._stopped = threading.Event()
        self._answers: list[Generation] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(server,))
        self._thread.start()

    def stop(self) -> int:
        """The number of answers; raises what a request raised."""
        self._stopped.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return len(self._answers)

    def _run(self, server: Server) -> None:
        try:
            while not self._stopped.is_set():
                self._answers.append(ask(server, prompt(1000 + len(self._answers), 4)))
        except BaseException as error:
            self._error = error
