"""Real servers: every way in, a crash between, and weights that change while one runs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_tpusync.testing import cpu_engine
from sglang_tpusync.testing.models import build_model
from sglang_tpusync.testing.server import Generation, Server, ServerError

pytestmark = [pytest.mark.server, pytest.mark.timeout(1500)]

PAGE = 64
SGLANG = [sys.executable, "-c", "from sglang.cli.main import main; main()"]  # what the command `sglang` runs
POOL = ["--max-total-tokens", "8192", "--hicache-storage-prefetch-policy", "wait_complete"]
START_TIMEOUT_S = 900.0


@pytest.fixture(scope="module")
def model() -> Path:
    return build_model("long-llama")


@pytest.fixture
def extra(tmp_path: Path) -> str:
    return json.dumps({"path": str(tmp_path / "store"), "capacity": "1GB", "floor": 0})


def prompt(seed: int, num_pages: int = 24) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(1000, 40000) for _ in range(num_pages * PAGE + 1)]


def by_name(extra_config: str, *more: str) -> list[str]:
    chosen = ["--hicache-storage-backend", "tpusync", "--hicache-storage-backend-extra-config", extra_config]
    return [*POOL, *chosen, *more]


def by_dynamic(extra_config: str) -> list[str]:
    names = {"backend_name": "tpusync", "module_path": "sglang_tpusync.hicache", "class_name": "TpuSyncStorage"}
    options = json.dumps({**json.loads(extra_config), **names, "interface_v1": 1})
    chosen = ["--hicache-storage-backend", "dynamic", "--hicache-storage-backend-extra-config", options]
    return [*POOL, "--enable-hierarchical-cache", *chosen]


def ask(server: Server, tokens: Sequence[int]) -> Generation:
    return server.generate(list(tokens), max_new_tokens=6)


def from_store(generation: Generation) -> int:
    return int(generation.cached_details.get("storage", 0))


def same(left: Generation, right: Generation) -> bool:
    return left.output_ids == right.output_ids and left.logprobs == right.logprobs


def flush(server: Server, headers: Mapping[str, str] = {}) -> None:
    """Empties the tiers above the store; SGLang refuses that while backups are under way."""
    for _ in range(600):
        with contextlib.suppress(ServerError):
            server.request("POST", "/flush_cache", headers=headers)
            return
        time.sleep(0.1)
    server.request("POST", "/flush_cache", headers=headers)


def ask_until_stored(
    server: Server, tokens: Sequence[int], expected: int, headers: Mapping[str, str] = {}
) -> Generation:
    """Backups run behind the answer: flushes and asks until the whole prefix comes out of the store."""
    for _ in range(20):
        flush(server, headers)
        answer = ask(server, tokens)
        if from_store(answer) == expected:
            return answer
    raise AssertionError(f"{from_store(answer)} tokens came from the store, expected {expected}")


def test_a_prefix_outlives_a_crash_and_changed_weights_stop_the_store(model: Path, extra: str) -> None:
    first, second, third = prompt(1), prompt(2), prompt(3)
    with Server(model, args=by_name(extra), timeout_s=START_TIMEOUT_S) as server:
        assert "implies --enable-hierarchical-cache" in server.log()
        cold = ask(server, first)
        assert cold.cached_tokens == 0
        assert same(cold, ask(server, first))
        assert same(cold, ask_until_stored(server, first, 24 * PAGE))
        pids = server.pids()
        until = time.monotonic() + 60  # a status is written once a second
        while not any(status["stats"]["pages_hit"] >= 24 for status in shown_by_top(pids)):
            assert time.monotonic() < until, shown_by_top(pids)
            time.sleep(0.2)
        server.kill()
        assert shown_by_top(pids) == []
    with Server(model, args=by_dynamic(extra), timeout_s=START_TIMEOUT_S) as server:
        restarted = ask(server, first)
        assert from_store(restarted) == 24 * PAGE
        assert same(cold, restarted)
        cold_second = ask(server, second)
        assert same(cold_second, ask_until_stored(server, second, 24 * PAGE))
        answer = server.request("POST", "/update_weights_from_disk", {"model_path": str(model)}, timeout_s=300)
        assert json.loads(answer)["success"], answer
        assert "weights of this process change (update_weights_from_disk)" in server.log()
        flush(server)
        assert "a new epoch of weights begins" in server.log()
        for tokens, expected in ((first, cold), (second, cold_second)):
            after = ask(server, tokens)
            assert after.cached_tokens == 0, "pages of the weights before were served"
            assert same(after, expected)  # the weights are equal, and nobody may rely on it
        cold_third = ask(server, third)
        assert same(cold_third, ask_until_stored(server, third, 24 * PAGE))
        unflushed = {"model_path": str(model), "flush_cache": False}
        assert json.loads(server.request("POST", "/update_weights_from_disk", unflushed, timeout_s=300))["success"]
        ask(server, prompt(9))
        server.stop()
        assert "refused 0" not in last_summary(server)
    with Server(model, args=by_name(extra), timeout_s=START_TIMEOUT_S) as server:
        assert from_store(ask(server, third)) == 0, "nobody knows which weights these pages are of"
        again = ask(server, second)
        assert from_store(again) == 24 * PAGE
        assert same(cold_second, again)


def shown_by_top(pids: Sequence[int]) -> list[dict[str, Any]]:
    """What `tpusync top` says of these processes."""
    command = [sys.executable, "-c", "from sglang_tpusync.cli.main import main; main()", "top", "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["found"]
    return [status for status in found if status["process_id"] in pids]


def last_summary(server: Server) -> str:
    lines = [line for line in server.log().splitlines() if "store of KV pages at close" in line]
    assert lines, "no summary at close"
    return lines[-1]


def test_a_store_is_attached_to_a_server_that_runs(model: Path, extra: str) -> None:
    admin = {"Authorization": "Bearer secret"}
    args = [*POOL, "--enable-hierarchical-cache", "--admin-api-key", "secret"]

    def attach(server: Server, options: str) -> bytes:
        body = {
            "hicache_storage_backend": "tpusync",
            "hicache_storage_backend_extra_config_json": options,
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        return server.request("PUT", "/hicache/storage-backend", body, headers=admin, timeout_s=120)

    tokens = prompt(4)
    with Server(model, args=args, timeout_s=START_TIMEOUT_S) as server:
        with pytest.raises(ServerError, match="did you mean 'capacity'"):
            attach(server, '{"capcity": 1}')
        attach(server, extra)
        cold = ask(server, tokens)
        assert same(cold, ask_until_stored(server, tokens, 24 * PAGE, admin))
        server.request("DELETE", "/hicache/storage-backend", headers=admin)
        flush(server, admin)
        assert ask(server, tokens).cached_tokens == 0
        flush(server, admin)
        attach(server, extra)
        again = ask(server, tokens)
        assert from_store(again) == 24 * PAGE
        assert same(cold, again)


def test_ranks_of_a_server_share_a_directory(model: Path, extra: str) -> None:
    tokens = prompt(5)
    with Server(model, args=by_name(extra, "--tp", "2"), timeout_s=START_TIMEOUT_S) as server:
        cold = ask(server, tokens)
        stored = ask_until_stored(server, tokens, 24 * PAGE)
        assert stored.output_ids == cold.output_ids
        namespaces = {
            line.split("namespace ")[1].split(",")[0] for line in server.log().splitlines() if "namespace " in line
        }
        assert len(namespaces) == 2, "each rank holds other heads"


SLOW_COPIES = """
import os, threading, time

class Native:
    \"\"\"A copy stream whose first copy starts when a file appears.\"\"\"

    held = False

    def __init__(self, native):
        self.native = native

    def __getattr__(self, name):
        return getattr(self.native, name)

    def submit_copy(self, **arguments):
        if not Native.held:
            Native.held = True
            self.native.pause(3600)
            threading.Thread(target=self.release, daemon=True).start()
            print("COPY HELD", flush=True)
        return self.native.submit_copy(**arguments)

    def release(self):
        while not os.path.exists(os.environ["RELEASE_COPY"]):
            time.sleep(0.05)
        print("COPY RELEASED", flush=True)
        self.native.pause(0)

def activate():
    from sglang_tpusync.hicache import streams
    make = streams.Stream.__init__

    def init(self, name):
        make(self, name)
        self.native = Native(self.native)

    streams.Stream.__init__ = init
"""


def test_the_scheduler_of_a_server_never_waits_for_a_backup(model: Path, extra: str, tmp_path: Path) -> None:
    """The copy of the first prompt is held in the server while another prompt is answered."""
    (tmp_path / "slow_copies.py").write_text(SLOW_COPIES)
    info = tmp_path / "slow_copies-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-copies\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nslow_copies = slow_copies:activate\n")
    release = tmp_path / "release"
    path = os.pathsep.join([cpu_engine.environment()["PYTHONPATH"], str(tmp_path)])
    with Server(
        model, args=by_name(extra), env={"PYTHONPATH": path, "RELEASE_COPY": str(release)}, timeout_s=START_TIMEOUT_S
    ) as server:
        cold = ask(server, prompt(7))
        other = ask(server, prompt(8))
        assert other.output_ids
        assert same(cold, ask(server, prompt(7)))
        assert "COPY HELD" in server.log(), "the test holds nothing"
        assert "COPY RELEASED" not in server.log()
        release.touch()
        assert same(cold, ask_until_stored(server, prompt(7), 24 * PAGE))
        assert same(other, ask_until_stored(server, prompt(8), 24 * PAGE))
        assert "done again" not in server.log()


def run(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    environment = cpu_engine.environment()
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)


def test_the_engine_takes_the_name(model: Path, extra: str, tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(
        textwrap.dedent(f"""
        import json, sglang

        if __name__ == "__main__":
            engine = sglang.Engine(
                model_path={str(model)!r}, device="cpu", attention_backend="torch_native", page_size={PAGE},
                mem_fraction_static=0.3, max_total_tokens=8192, max_running_requests=8, log_level="error",
                hicache_storage_backend="tpusync", hicache_storage_backend_extra_config={extra!r},
                hicache_storage_prefetch_policy="wait_complete", chunked_prefill_size=2048,
            )
            tokens = {prompt(6)!r}
            ask = lambda: engine.generate(input_ids=tokens, sampling_params={{"temperature": 0, "max_new_tokens": 4}})
            cold = ask()
            for _ in range(20):
                engine.flush_cache()
                stored = ask()
                if stored["meta_info"]["cached_tokens_details"]["storage"]:
                    break
            print("RESULT", json.dumps([cold["output_ids"], stored["output_ids"], stored["meta_info"]]))
            engine.shutdown()
        """)
    )
    done = run([sys.executable, str(script)], START_TIMEOUT_S)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stdout[-3000:] + done.stderr[-3000:]
    cold_ids, stored_ids, meta = json.loads(results[0].removeprefix("RESULT "))
    assert stored_ids == cold_ids
    assert meta["cached_tokens_details"]["storage"] == 24 * PAGE


@pytest.mark.parametrize("program", [[sys.executable, "-m", "sglang.launch_server"], [*SGLANG, "serve"]])
def test_wrong_options_end_the_start_with_the_reason(program: list[str], model: Path) -> None:
    options = ["--hicache-storage-backend", "tpusync", "--hicache-storage-backend-extra-config", '{"fsync": "never"}']
    done = run([*program, "--model-path", str(model), "--device", "cpu", *options], 280)
    assert done.returncode != 0
    assert "option 'fsync' = 'never': allowed is 'none', 'interval', 'always'" in done.stderr + done.stdout
