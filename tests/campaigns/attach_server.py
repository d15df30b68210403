"""A store is attached to a real server and detached from it again and again, with requests between.

Each attached store answers from what the first request stored. File descriptors, threads and resident memory of all
processes of the server stay what they were after the first cycles.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

from sglang_tpusync.bench.report import Row
from sglang_tpusync.bench.serving.prompts import prompt_ids
from sglang_tpusync.testing.models import build_model
from sglang_tpusync.testing.server import Generation, Server, ServerError
from tests.campaigns.campaign import bound, disk, fraction, main

PROMPT_TOKENS = 512
WARM_UP_CYCLES = 10
ADMIN_KEY = "campaign"
AUTHORIZATION = {"Authorization": f"Bearer {ADMIN_KEY}"}
GROWTH_MAX_MIB = 48.0  # of resident memory of all processes together: allocators keep some


def run(seed: int, runs: int) -> list[Row]:
    prompt = prompt_ids(seed, "again", num_tokens=PROMPT_TOKENS)
    same, first, usages = 0, None, []
    with tempfile.TemporaryDirectory(dir=disk()) as directory:
        arguments = ["--enable-hierarchical-cache", "--hicache-ratio", "2", "--max-total-tokens", "4096"]
        arguments += ["--admin-api-key", ADMIN_KEY]
        arguments += ["--hicache-storage-prefetch-policy", "wait_complete"]
        log = Path(directory) / "server.log"
        with Server(build_model("long-llama"), args=arguments, log_path=log, timeout_s=600.0) as server:
            for cycle in range(WARM_UP_CYCLES + runs):
                _ask_for_change(server, "PUT", Path(directory) / "store")
                answer = server.generate(prompt, max_new_tokens=4)
                first = first or answer
                same += _is_same(first, answer, from_store=cycle > 0)
                if cycle == 0:
                    _wait_until_stored(server, prompt)
                _flush(server)
                _ask_for_change(server, "DELETE")
                usages.append(_usage(server.pids()))
    before, after = usages[WARM_UP_CYCLES - 1], usages[-1]
    names = ("file descriptors", "threads", "MiB of resident memory")
    most = (0.5, 0.5, GROWTH_MAX_MIB)
    grown = [max(0.0, now - had) for now, had in zip(after, before, strict=True)]
    return [
        fraction("cycles with the first answer, from the store", same, WARM_UP_CYCLES + runs, "all of them"),
        *(bound(f"growth of {name} in {runs} cycles", value, "count", limit)
          for name, value, limit in zip(names, grown, most, strict=True)),
    ]  # fmt: skip


def _ask_for_change(server: Server, method: str, store: Path | None = None) -> None:
    options = {"path": str(store), "capacity": "1GB", "floor": 0, "prefetch_threshold": 1}
    body = None
    if store is not None:
        body = {
            "hicache_storage_backend": "tpusync",
            "hicache_storage_backend_extra_config_json": json.dumps(options),
            "hicache_storage_prefetch_policy": "wait_complete",
        }
    server.request(method, "/hicache/storage-backend", body, headers=AUTHORIZATION, timeout_s=120.0)


def _flush(server: Server) -> None:
    """Empties the device and host tiers; refused as long as copies run."""
    deadline = time.monotonic() + 60
    while True:
        try:
            server.request("POST", "/flush_cache", headers=AUTHORIZATION)
            return
        except ServerError:
            if time.monotonic() > deadline or not server.alive():
                raise
            time.sleep(0.05)


def _wait_until_stored(server: Server, prompt: list[int]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        _flush(server)
        if int(server.generate(prompt, max_new_tokens=1).cached_details.get("storage", 0)) >= PROMPT_TOKENS - 64:
            return
        time.sleep(0.2)
    raise TimeoutError("the first prompt did not reach the store in a minute")


def _is_same(first: Generation, answer: Generation, *, from_store: bool) -> bool:
    if (first.output_ids, first.logprobs) != (answer.output_ids, answer.logprobs):
        return False
    return not from_store or int(answer.cached_details.get("storage", 0)) >= PROMPT_TOKENS - 64


def _usage(pids: list[int]) -> tuple[float, float, float]:
    """File descriptors, threads, and MiB of resident memory of these processes together."""
    descriptors = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
    threads = sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids)
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return float(descriptors), float(threads), pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main("attach_server", run, runs=90)
