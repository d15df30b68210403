"""A server whose host pools are DRAM regions, under the delays and failures that SGLang can inject, and kill -9.

`runs` prompts are asked of a TP-2 server with a small pool and a small disk, one after the other, some after a flush;
twice the server is killed on the way and started again. Every answer must be that of a server without any cache, and
at the end the ranks' regions must hold parts of the same pages: a page that only one rank has helps nobody.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

from sglang_tpusync import _core
from sglang_tpusync.bench.report import Row
from sglang_tpusync.bench.serving.prompts import prompt_ids
from sglang_tpusync.store import read_dram
from sglang_tpusync.testing.models import build_model
from sglang_tpusync.testing.server import Generation, Server
from tests.campaigns.campaign import ROOT, as_count, bound, fraction, main

PAGE = 64
NUM_HEADS, NUM_TAILS = 6, 4  # prompts that share their first half
HEAD_TOKENS, TAIL_TOKENS = 512, 512
NUM_KILLS = 2
STRANDED_MAX = 0.01
INJECTED = {
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",  # seconds, of each call of a rank
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.05",
}


def run(seed: int, runs: int) -> list[Row]:
    choice = random.Random(seed)
    prompts = [_prompt(seed, head, tail) for head in range(NUM_HEADS) for tail in range(NUM_TAILS)]
    tally = dict.fromkeys(("asked", "same", "hits", "tokens"), 0)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as directory:
        node = Path(directory)
        with Server(build_model("long-llama"), args=["--tp", "2"], log_path=node / "cold.log", timeout_s=900.0) as cold:
            wanted = [_ask(cold, tokens, flush=True).output_ids for tokens in prompts]
        for part in range(NUM_KILLS + 1):
            with _start(node, node / f"{part}.log") as server:
                for _ in range(runs // (NUM_KILLS + 1)):
                    number = choice.randrange(len(prompts))
                    answer = _ask(server, prompts[number], flush=choice.random() < 0.3)
                    tally["asked"] += 1
                    tally["same"] += answer.output_ids == wanted[number]
                    tally["hits"] += int(answer.cached_details.get("storage", 0)) > 0
                    tally["tokens"] += int(answer.cached_details.get("storage", 0))
                log = server.log()
                server.kill()
        assert "injector enabled" in log, "nothing was injected"
        both, either = _shared_pages(node / "dram")
    return [
        as_count("tokens from the store", [tally["tokens"]]),
        fraction("answers of a server without cache", tally["same"], tally["asked"], "all of them"),
        fraction("there were hits", int(tally["hits"] > 0), 1, "there were"),
        bound(
            f"pages that one rank has alone ({either - both} of {either})", 1 - both / either, "fraction", STRANDED_MAX
        ),
    ]


def _prompt(seed: int, head: int, tail: int) -> list[int]:
    begin = prompt_ids(seed, "head", head, num_tokens=HEAD_TOKENS)
    return begin + prompt_ids(seed, "tail", head, tail, num_tokens=TAIL_TOKENS + 1)


def _ask(server: Server, tokens: list[int], *, flush: bool) -> Generation:
    if flush:
        server.flush_cache()
    return server.generate(tokens, max_new_tokens=4, timeout_s=120.0)


def _start(node: Path, log: Path) -> Server:
    options = {
        "path": str(node / "store"),
        "capacity": "50MB",
        "floor": 0,
        "write_budget_per_day": "unlimited",
        "host_pool": "shared",
        "host_pool_path": str(node / "dram"),
        "host_pool_reserve": 0,
    }
    arguments = ["--tp", "2", "--hicache-storage-backend", "tpusync", "--hicache-ratio", "2"]
    arguments += ["--max-total-tokens", "4096", "--hicache-storage-prefetch-policy", "wait_complete"]
    arguments += ["--hicache-storage-backend-extra-config", json.dumps(options)]
    return Server(build_model("long-llama"), args=arguments, env=INJECTED, log_path=log, timeout_s=900.0)


def _shared_pages(dram: Path) -> tuple[int, int]:
    """How many pages are in the regions of both ranks, and how many in any."""
    held: dict[bytes, set[bytes]] = {}
    for region in read_dram(dram).regions:
        keys = _core.store.dram_keys(region.path, region.namespace)
        pages = {keys[i : i + 32] for i in range(0, len(keys), 32)}
        held.setdefault(region.namespace, set()).update(pages)
    assert len(held) == 2, "each rank has a namespace of its own"
    first, second = held.values()
    return len(first & second), len(first | second)


if __name__ == "__main__":
    main("soak_node", run, runs=300)
