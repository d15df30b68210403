"""kill -9 of every process of a real server during a burst of backups, at random moments.

After each kill: every page that the store reports reads back, every page that the backend had acknowledged is there,
no file is left that belongs to nothing, and the next server gives the same answer from the store as the first one cold.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import select
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from sglang_tpusync._core import FlashStore
from sglang_tpusync.bench.report import Row
from sglang_tpusync.bench.serving.prompts import prompt_ids
from sglang_tpusync.testing.models import build_model
from sglang_tpusync.testing.server import Generation, Server, ServerError
from sglang_tpusync.testing.tamper import ClosedRegion, regions_of
from tests.campaigns.campaign import as_count, fraction, main
from tests.campaigns.journal import num_acknowledged, read_journal
from tests.campaigns.pages import num_files, stored_keys

ROOT = Path(__file__).parents[2]
DEVICE_TOKENS = 16_384
PROMPT_TOKENS = 2048
PROMPTS_IN_BURST = 24
CLIENTS = 3
KILL_AFTER_PAGES_MAX = 500
BURST_TIMEOUT_S = 300.0


def run(seed: int, runs: int) -> list[Row]:
    choice = random.Random(seed)
    tally = dict.fromkeys(("acknowledged", "found", "reported", "right", "files", "known", "same"), 0)
    first_answer: Generation | None = None
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as directory:
        store = Path(directory) / "store"
        for number in range(runs):
            with _start(store, Path(directory) / f"{number}.log") as server:
                answer = server.generate(prompt_ids(seed, "first", num_tokens=PROMPT_TOKENS))
                server.flush_cache()
                first_answer = first_answer or answer
                tally["same"] += _is_same(first_answer, answer, from_store=number > 0)
                _kill_in_burst(server, store, choice, seed=seed, number=number)
            _check(store, tally)
    return [
        as_count("SIGKILLs", [runs]),
        fraction("acknowledged pages that are there", tally["found"], tally["acknowledged"], "all of them"),
        fraction("reported pages that read back", tally["right"], tally["reported"], "all of them"),
        fraction("files that belong to the store", tally["known"], tally["files"], "no orphans"),
        fraction("servers that give the first one's answer, from the store", tally["same"], runs, "all of them"),
    ]


def _start(store: Path, log: Path) -> Server:
    options = {
        "backend_name": "journal",
        "module_path": "tests.campaigns.journal_storage",
        "class_name": "JournalStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "path": str(store),
        "capacity": "16GB",
        "floor": 0,
        "write_budget_per_day": "unlimited",
    }
    arguments = ["--enable-hierarchical-cache", "--hicache-ratio", "4", "--max-total-tokens", str(DEVICE_TOKENS)]
    arguments += ["--hicache-storage-prefetch-policy", "wait_complete", "--hicache-storage-backend", "dynamic"]
    arguments += ["--hicache-storage-backend-extra-config", json.dumps(options)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return Server(build_model("long-llama"), args=arguments, env=_with_shims(path), log_path=log, timeout_s=900.0)


def _with_shims(path: str) -> dict[str, str]:
    """The search path of the server with this checkout on it, after the shims."""
    from sglang_tpusync.testing import cpu_engine

    return {"PYTHONPATH": cpu_engine.environment(base={**os.environ, "PYTHONPATH": path})["PYTHONPATH"]}


def _is_same(first: Generation, answer: Generation, *, from_store: bool) -> bool:
    if (first.output_ids, first.logprobs) != (answer.output_ids, answer.logprobs):
        return False
    return not from_store or int(answer.cached_details.get("storage", 0)) >= PROMPT_TOKENS - 64


def _kill_in_burst(server: Server, store: Path, choice: random.Random, *, seed: int, number: int) -> None:
    """Clients ask new prompts one after the other; the kill comes once a random number of pages is acknowledged."""
    prompts = [prompt_ids(seed, "burst", number, i, num_tokens=PROMPT_TOKENS) for i in range(PROMPTS_IN_BURST)]
    clients = [threading.Thread(target=_ask, args=(server, prompts[i::CLIENTS])) for i in range(CLIENTS)]
    wanted = num_acknowledged(store) + choice.randrange(KILL_AFTER_PAGES_MAX)
    for client in clients:
        client.start()
    deadline = time.monotonic() + BURST_TIMEOUT_S
    while num_acknowledged(store) < wanted and time.monotonic() < deadline and any(c.is_alive() for c in clients):
        time.sleep(0.002)
    _kill(server)
    for client in clients:
        client.join()


def _kill(server: Server) -> None:
    """Returns when the last thread of the last process is gone, and with it every lock on the store's regions."""
    with contextlib.ExitStack() as stack:
        handles = []
        for pid in server.pids():
            with contextlib.suppress(ProcessLookupError):
                handles.append(os.pidfd_open(pid))
                stack.callback(os.close, handles[-1])
        server.kill()
        for handle in handles:
            if not select.select([handle], [], [], 60.0)[0]:
                raise TimeoutError("a process survived SIGKILL for a minute")


def _ask(server: Server, prompts: list[list[int]]) -> None:
    """Until the server dies."""
    with contextlib.suppress(ServerError, OSError, http.client.HTTPException, ValueError):
        for prompt in prompts:
            server.generate(prompt, max_new_tokens=1, timeout_s=BURST_TIMEOUT_S)


def _check(store: Path, tally: dict[str, int]) -> None:
    files, known = num_files(store)
    tally["files"] += files
    tally["known"] += known
    acknowledged = read_journal(store)
    (region,) = regions_of(store)
    opened = _open(store, region)
    try:
        present = opened.contains(b"".join(acknowledged))
        tally["acknowledged"] += len(acknowledged)
        tally["found"] += int(present.sum())
        reported = stored_keys(opened)
        tally["reported"] += len(reported)
        tally["right"] += _num_readable(opened, reported, region.page_bytes)
    finally:
        opened.close()


def _open(store: Path, region: ClosedRegion) -> FlashStore:
    """The store of the dead server, opened under the same namespace, as the next server will."""
    return FlashStore(
        path=str(store),
        namespace=region.namespace,
        namespace_json=(region.table.parent / "namespace.json").read_text(),
        page_bytes=region.page_bytes,
        capacity_bytes=16 * 10**9,
        floor_bytes=0,
        write_budget_bytes_per_day=2**62,
        allow_tmpfs=True,
    )


def _num_readable(opened: FlashStore, keys: list[bytes], page_bytes: int) -> int:
    """How many pages read back with the checksum they were stored with."""
    readable = 0
    buffer = np.zeros((64, page_bytes), np.uint8)
    for start in range(0, len(keys), len(buffer)):
        batch = keys[start : start + len(buffer)]
        rows = np.arange(len(batch), dtype=np.uint64)[:, None] * np.uint64(page_bytes)
        addresses = np.ascontiguousarray(np.uint64(buffer.ctypes.data) + rows)
        ticket = opened.submit_get(b"".join(batch), b"", addresses, np.array([page_bytes], np.uint64), 60.0)
        if not ticket.wait(120.0):
            raise TimeoutError("a get hangs")
        readable += int((ticket.outcomes() == 0).sum())
    return readable


if __name__ == "__main__":
    main("crash_server", run, runs=20)
