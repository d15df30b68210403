"""The CPU engine as a real server: it speaks, its bits do not depend on the cache, and it leaves no process."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_tpusync.testing.models import build_model
from sglang_tpusync.testing.server import Generation, Server, ServerError

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

PAGE = 64


@pytest.fixture(scope="module")
def long_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("long") / "server.log"
    args = ["--max-total-tokens", "16384", "--enable-metrics", "--enable-cache-report"]
    with Server(build_model("long-llama"), args=args, log_path=log, timeout_s=600) as server:
        yield server


def prompt(seed: int, num_tokens: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(100, 49_000) for _ in range(num_tokens)]


def bits(generation: Generation) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return generation.output_ids, generation.logprobs


def test_bits_of_an_answer_do_not_depend_on_the_cache(long_server: Server) -> None:
    """Over the edge of a chunk (2048), with a partial page, and with a prefix of which a part was decoded."""
    long_server.flush_cache()
    given = prompt(1, 2 * 2048 + 100)
    cold = long_server.generate(given)
    assert (cold.cached_tokens, cold.prompt_tokens, len(cold.output_ids)) == (0, len(given), 16)
    assert len(set(cold.output_ids)) >= 12
    hit = long_server.generate(given)
    assert hit.cached_tokens == len(given) // PAGE * PAGE
    assert bits(hit) == bits(cold)

    first_part = [*given[:2100]]
    answer = long_server.generate(first_part, max_new_tokens=PAGE + 40)
    conversation = [*first_part, *answer.output_ids, *prompt(2, 20)]
    continued = long_server.generate(conversation)
    assert continued.cached_tokens > len(first_part)
    long_server.flush_cache()
    assert bits(long_server.generate(conversation)) == bits(continued)


def test_an_answer_depends_on_every_page(long_server: Server) -> None:
    given = prompt(3, 6 * 1024)
    whole = long_server.generate(given)
    for page in (0, 10, 80):
        changed = [*given]
        changed[page * PAGE : (page + 1) * PAGE] = prompt(100 + page, PAGE)
        answer = long_server.generate(changed)
        equal = [a == b for a, b in zip(whole.output_ids, answer.output_ids, strict=True)]
        compared = equal.index(False) + 1 if False in equal else len(equal)
        assert max(abs(whole.logprobs[i] - answer.logprobs[i]) for i in range(compared)) > 0.05


def test_metrics_are_numbers_by_name(long_server: Server) -> None:
    samples = long_server.metrics()
    assert any(name.startswith("sglang:prompt_tokens_total") and value > 0 for name, value in samples.items())


def test_a_killed_server_is_gone(tmp_path: Path) -> None:
    """SmolLM2, so that the same start shows that it speaks."""
    with Server(build_model("smollm2"), log_path=tmp_path / "server.log", timeout_s=600) as server:
        answer = server.generate("The capital of France is", max_new_tokens=12)
        assert answer.text == " Paris.\n\nThe answer is: 201"
        assert 0 < answer.ttft_s < answer.e2e_s
        question = {"role": "user", "content": "Name the capital of France."}  # answered without a near tie
        assert server.chat([question]) == "The capital of France is Paris."
        assert len(server.pids()) >= 3
        server.kill()
        assert server.pids() == []
        assert not server.alive()
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", server.port)) != 0


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="unrecognized arguments: --no-such-option") as caught:
        Server(tmp_path, args=["--no-such-option"], log_path=tmp_path / "server.log", timeout_s=600)
    assert "ended with code 2 while starting" in str(caught.value)
