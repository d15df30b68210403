"""Real prefill and decode servers behind SGLang's router: answers, prefix hits, crashes, refusals, aborts."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sglang_tpusync.bench.report import read_report
from sglang_tpusync.cli.main import app
from sglang_tpusync.testing.disagg import Disaggregated
from sglang_tpusync.testing.models import build_model
from sglang_tpusync.testing.server import Generation, Server, ServerError
from sglang_tpusync.testing.tamper import flip_payload_byte, page_keys

pytestmark = [pytest.mark.server, pytest.mark.timeout(1500)]

PAGE = 64
POOL = ["--max-total-tokens", "20000"]
START_TIMEOUT_S = 900.0
TOLERANCE = 0.15  # of logprobs of ranks of another width: sums in another order, bf16


@pytest.fixture(scope="module")
def model() -> Path:
    return build_model("long-llama")


def prompt(seed: int, num_tokens: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(1000, 40000) for _ in range(num_tokens)]


def ask(server: Server, tokens: Sequence[int], num_new: int = 6, timeout_s: float = 120) -> Generation:
    return server.generate(list(tokens), max_new_tokens=num_new, timeout_s=timeout_s)


def healthy(server: Server) -> bool:
    server.request("GET", "/health", timeout_s=10)
    return True


@pytest.fixture(scope="module")
def expected(model: Path) -> Iterator[dict[int, Generation]]:
    """The answers of one server that does everything, cold; by seed."""
    with Server(model, args=[*POOL, "--disable-radix-cache"], omp_threads=1, timeout_s=START_TIMEOUT_S) as server:
        yield {seed: ask(server, prompt(seed, length)) for seed, length in LENGTHS.items()}


LENGTHS = {1: 2048, 2: 8192, 3: 500, 4: 64, 5: 1, 6: 2049, 7: 1000, 8: 1000}


def same(left: Generation, right: Generation) -> bool:
    return left.output_ids == right.output_ids and left.logprobs == right.logprobs


def alike(left: Generation, right: Generation) -> bool:
    """A prefix hit computes fewer rows at once, which rounds otherwise, on one server as on two."""
    return left.output_ids == right.output_ids and bool(np.allclose(left.logprobs, right.logprobs, atol=TOLERANCE))


def test_answers_are_those_of_one_server_across_a_crash_of_prefill(
    model: Path, expected: dict[int, Generation], tmp_path: Path
) -> None:
    """With HiCache on this store at the prefill side, and a shared secret, over TCP."""
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"transfer_secret_file": str(secret), "transfer_same_host": False}))
    store = json.dumps({"path": str(tmp_path / "store"), "capacity": "1GB", "floor": 0})
    cache = ["--hicache-storage-backend", "tpusync", "--hicache-storage-backend-extra-config", store]
    cache += ["--hicache-storage-prefetch-policy", "wait_complete"]
    env = {"TPUSYNC_CONFIG": str(config)}
    with Disaggregated(
        model, args=POOL, prefill_args=cache, prefill_env=env, decode_env=env, directory=tmp_path
    ) as servers:
        for seed, length in LENGTHS.items():
            assert same(ask(servers.router, prompt(seed, length)), expected[seed]), f"prompt {seed} of {length} tokens"
        again = ask(servers.router, prompt(2, 8192))
        assert same(again, expected[2])
        assert again.cached_tokens >= 8192 - 2 * PAGE
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda seed: ask(servers.router, prompt(seed, LENGTHS[seed])), LENGTHS))
        assert [answer.output_ids for answer in answers] == [answer.output_ids for answer in expected.values()]
        text = servers.prefill.log() + servers.decode.log()
        assert "with a shared secret" in text
        assert secret.read_text() not in text
        servers.prefill.flush_cache()  # waits for the backups
        servers.prefill.kill()
        begin = time.monotonic()
        with pytest.raises((ServerError, OSError)):
            ask(servers.router, prompt(9, 300), timeout_s=60)
        assert time.monotonic() - begin < 60
        assert healthy(servers.decode)
        servers.replace("prefill")
        after = ask(servers.router, prompt(2, 8192))
        assert same(after, expected[2])
        assert int(after.cached_details.get("storage", 0)) >= 8192 - 2 * PAGE
        assert healthy(servers.decode)


def test_a_request_that_is_given_up_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    """Aborted while it is computed and sent, killed and stopped peers: the others go on."""
    with Disaggregated(model, args=POOL, directory=tmp_path) as servers:
        cold = ask(servers.router, prompt(20, 2048))
        before = [resources(server) for server in (servers.prefill, servers.decode)]
        generator = random.Random(7)
        for number in range(12):
            with pytest.raises((ServerError, OSError)):
                ask(servers.router, prompt(100 + number, 3000), 64, timeout_s=generator.uniform(0.02, 0.6))
        settle(servers)
        assert alike(ask(servers.router, prompt(20, 2048)), cold)
        after = [resources(server) for server in (servers.prefill, servers.decode)]
        for (threads, files), (threads_now, files_now) in zip(before, after, strict=True):
            assert threads_now <= threads + 8, "threads of a pool that grows to its size"
            assert files_now <= files + 8, "idle HTTP connections of the router"

        pids = servers.prefill.pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises((ServerError, OSError)):
            ask(servers.router, prompt(30, 300), timeout_s=30)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert time.monotonic() - begin < 60
        assert healthy(servers.decode)
        settle(servers)
        assert alike(ask_until_served(servers.router, prompt(20, 2048)), cold)

        servers.decode.kill()
        with pytest.raises((ServerError, OSError)):
            ask(servers.router, prompt(31, 300), timeout_s=30)
        assert healthy(servers.prefill)
        servers.replace("decode")
        assert alike(ask_until_served(servers.router, prompt(20, 2048)), cold)


def ask_until_served(server: Server, tokens: Sequence[int], num_new: int = 6) -> Generation:
    """A peer that was away is found again within two heartbeats of SGLang's, 5 s each."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return ask(server, tokens, num_new, timeout_s=30)
        except (ServerError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def resources(server: Server) -> tuple[int, int]:
    """Threads and file descriptors of all processes."""
    threads = sum(len(os.listdir(f"/proc/{pid}/task")) for pid in server.pids())
    return threads, sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in server.pids())


def settle(servers: Disaggregated) -> None:
    """Until no server has a request: SGLang flushes then only."""
    servers.prefill.flush_cache(timeout_s=60)
    servers.decode.flush_cache(timeout_s=60)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
def test_ranks_of_another_width(model: Path, prefill: int, decode: int, tmp_path: Path) -> None:
    with Server(model, args=[*POOL, "--tp", str(prefill)], omp_threads=1, timeout_s=START_TIMEOUT_S) as server:
        wanted = [ask(server, prompt(seed, 2048), 1) for seed in range(40, 46)]
        long = [ask(server, prompt(seed, 2048), 6) for seed in range(40, 46)]
    with Disaggregated(
        model, args=POOL, prefill_args=["--tp", str(prefill)], decode_args=["--tp", str(decode)], directory=tmp_path
    ) as servers:
        for seed, one, six in zip(range(40, 46), wanted, long, strict=True):
            got = ask(servers.router, prompt(seed, 2048), 6)
            assert got.output_ids[0] == one.output_ids[0]
            assert got.logprobs[0] == one.logprobs[0], "the first token is the prefill server's"
            for ours, theirs, ours_logprob, theirs_logprob in zip(
                got.output_ids, six.output_ids, got.logprobs, six.logprobs, strict=True
            ):
                assert abs(ours_logprob - theirs_logprob) < TOLERANCE
                if ours != theirs:
                    break  # two tokens of nearly the same probability: what follows has another prompt


def ask_decode(servers: Disaggregated, tokens: list[int]) -> None:
    """Past the router: it waits for the prefill server too, which nobody can tell of the refusal."""
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": servers.bootstrap_port, "bootstrap_room": 77}
    body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 4}, **room}
    servers.decode.request("POST", "/generate", body, timeout_s=60)


def test_what_does_not_fit_is_refused_by_request(model: Path, expected: dict[int, Generation], tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef0123456789abcdef")
    (tmp_path / "other").write_text("fedcba9876543210fedcba9876543210")
    configs = {}
    for name in ("secret", "other"):
        configs[name] = tmp_path / f"{name}.json"
        configs[name].write_text(json.dumps({"transfer_secret_file": str(tmp_path / name)}))
    with Disaggregated(model, args=POOL, decode_args=["--page-size", "16"], directory=tmp_path) as servers:
        for _ in range(2):
            begin = time.monotonic()
            with pytest.raises(ServerError, match=r"page_size=64.*page_size=16"):
                ask(servers.router, prompt(50, 300), timeout_s=60)
            assert time.monotonic() - begin < 30
        assert healthy(servers.prefill)
        assert healthy(servers.decode)
        servers.decode.kill()
        servers._args["decode"] = [*POOL]
        servers._env["decode"] = {"TPUSYNC_CONFIG": str(configs["other"])}
        servers.replace("decode")
        begin = time.monotonic()
        with pytest.raises(ServerError, match="the secrets differ, or one side has none"):
            ask_decode(servers, prompt(51, 300))
        assert time.monotonic() - begin < 30
        assert healthy(servers.prefill)
        assert healthy(servers.decode)
        assert servers.decode.log().count("a control connection was refused") == 1
        assert (tmp_path / "other").read_text() not in servers.decode.log()


def test_decode_has_prefixes_in_a_store_of_its_own(model: Path, tmp_path: Path) -> None:
    """Decode's radix cache on this store: hits after a restart, and a byte that the disk changed is computed again."""
    store = tmp_path / "store"
    options = json.dumps({"path": str(store), "capacity": "1GB", "floor": 0})
    cache = ["--disaggregation-decode-enable-radix-cache", "--hicache-storage-prefetch-policy", "wait_complete"]
    cache += ["--hicache-storage-backend", "tpusync", "--hicache-storage-backend-extra-config", options]
    tokens = prompt(60, 2048)
    with Disaggregated(model, args=POOL, decode_args=cache, directory=tmp_path) as servers:
        cold = ask(servers.router, tokens, 70)
        servers.decode.flush_cache()  # waits for the backups
        servers.decode.stop()
        first, *_, damaged, last = page_keys(tokens, PAGE)
        assert first != last
        flip_payload_byte(store, damaged, 1000)
        servers.replace("decode")
        assert alike(ask_until_served(servers.router, tokens, 70), cold)
        servers.decode.stop()
        (summary,) = (line for line in servers.decode.log().splitlines() if "store of KV pages at close" in line)
        assert "read 30 pages" in summary, summary
        assert "faults 0" not in summary or "missed 0" not in summary, summary


def test_beyond_loopback_a_secret_is_needed(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="option 'transfer_secret_file' is needed"):
        Server(
            model,
            args=[*POOL, "--disaggregation-transfer-backend", "tpusync", "--disaggregation-mode", "decode"],
            env={"SGLANG_HOST_IP": "0.0.0.0"},
            omp_threads=1,
            timeout_s=START_TIMEOUT_S,
        )


def test_the_benchmark_compares_and_reports(tmp_path: Path) -> None:
    report = tmp_path / "pd.json"
    options = ["--prompt-tokens", "300,600", "--rounds", "1", "--concurrency", "2", "--json", str(report)]
    done = CliRunner().invoke(app, ["bench", "pd", *options, "--logs", str(tmp_path / "logs")])
    assert done.exit_code == 0, done.output
    found = read_report(report)
    assert found.bench == "pd"
    assert [row.case for row in found.rows] == [
        "300 tokens, cold",
        "300 tokens, prefix hit",
        "600 tokens, cold",
        "600 tokens, prefix hit",
        "2 requests of 1024 tokens at once",
    ]
    assert all(row.limit == "one server" and row.value > 0 for row in found.rows)
