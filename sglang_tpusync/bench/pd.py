"""`bench pd`: real prefill and decode servers behind SGLang's router, beside one server that does everything.

Each round asks prompts of its own, each length cold and once more (a prefix hit on both sides of the comparison). The
first token of a disaggregated request comes out of the decode server, after its KV has come: what it is later than
that of one server is the price of the way. All on one host, whose cores the servers share. Every answer is compared,
token ids and log probabilities, with the other arm's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_tpusync.bench.report import Row, measured
from sglang_tpusync.bench.rounds import interleaved
from sglang_tpusync.bench.serving.prompts import prompt_ids
from sglang_tpusync.bench.serving.servers import model_directory
from sglang_tpusync.errors import TpuSyncError

if TYPE_CHECKING:
    from sglang_tpusync.testing.server import Generation, Server

__all__ = ["pd_rows"]

_TOKENS = 8  # of an answer
_START_TIMEOUT_S = 900.0
_ARMS = ("one server", "prefill and decode")
_KINDS = ("cold", "prefix hit")


def pd_rows(
    directory: Path, *, model: str, lengths: Sequence[int], num_rounds: int, concurrency: int, seed: int = 0
) -> list[Row]:
    """Seconds to the first token, and requests per second of `concurrency` at once. Raises TpuSyncError for a server
    that fails or an answer that differs."""
    from sglang_tpusync.testing.disagg import Disaggregated
    from sglang_tpusync.testing.server import Server, ServerError

    path = model_directory(model)
    pool = ["--max-total-tokens", str(max(2 * max(lengths), concurrency * 2048) + 4096)]
    try:
        with (
            Server(path, args=pool, omp_threads=1, log_path=directory / "one.log", timeout_s=_START_TIMEOUT_S) as one,
            Disaggregated(path, args=pool, directory=directory, timeout_s=_START_TIMEOUT_S) as two,
        ):
            servers = {_ARMS[0]: one, _ARMS[1]: two.router}
            for server in servers.values():  # the first contact of the servers is nobody's time
                _ask(server, prompt_ids(seed, "warm", num_tokens=256))
            rows = _latency_rows(servers, lengths, num_rounds, seed)
            return [*rows, _throughput_row(servers, concurrency, num_rounds, seed)]
    except (ServerError, OSError) as error:
        raise TpuSyncError(str(error)) from error


def _latency_rows(servers: dict[str, Server], lengths: Sequence[int], num_rounds: int, seed: int) -> list[Row]:
    samples: dict[tuple[str, int, str], list[float]] = {}
    answers: dict[tuple[int, int, str], Generation] = {}
    for number, arm in interleaved(_ARMS, num_rounds):
        for length in lengths:
            for kind in _KINDS:
                answer = _ask(servers[arm], prompt_ids(seed, number, length, num_tokens=length))
                samples.setdefault((arm, length, kind), []).append(answer.ttft_s)
                other = answers.setdefault((number, length, kind), answer)
                if (answer.output_ids, answer.logprobs) != (other.output_ids, other.logprobs):
                    raise TpuSyncError(f"{length} tokens, {kind}, round {number}: the answers of the two arms differ")
    return [
        measured(
            f"{length} tokens, {kind}",
            samples[_ARMS[1], length, kind],
            unit="s to first token",
            better="lower",
            limit=_ARMS[0],
            limit_samples=samples[_ARMS[0], length, kind],
        )
        for length in lengths
        for kind in _KINDS
    ]


def _throughput_row(servers: dict[str, Server], concurrency: int, num_rounds: int, seed: int) -> Row:
    rates: dict[str, list[float]] = {arm: [] for arm in _ARMS}
    for number, arm in interleaved(_ARMS, num_rounds):
        prompts = [prompt_ids(seed, "at once", arm, number, i, num_tokens=1024) for i in range(concurrency)]
        with ThreadPoolExecutor(concurrency) as pool:
            begin = time.perf_counter()
            list(pool.map(lambda tokens, server=servers[arm]: _ask(server, tokens), prompts))
            rates[arm].append(concurrency / (time.perf_counter() - begin))
    return measured(
        f"{concurrency} requests of 1024 tokens at once",
        rates[_ARMS[1]],
        unit="requests/s",
        better="higher",
        limit=_ARMS[0],
        limit_samples=rates[_ARMS[0]],
    )


def _ask(server: Server, tokens: Sequence[int]) -> Generation:
    return server.generate(tokens, max_new_tokens=_TOKENS, timeout_s=600)
