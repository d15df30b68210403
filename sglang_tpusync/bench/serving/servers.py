"""Engines that are real server processes, started here with the same sizes in every arm."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_tpusync.bench.serving.answer import Answer
from sglang_tpusync.bench.serving.plan import Backend, Plan
from sglang_tpusync.errors import TpuSyncError

if TYPE_CHECKING:
    from sglang_tpusync.testing.server import Generation, Server

__all__ = ["ServerEngine", "answer_of", "kv_bytes_per_token", "model_directory"]

_TIERS = ("device", "host", "storage")
_ASK_TIMEOUT_S = 1800.0
_SETTLE_TIMEOUT_S = 300.0
_CAPACITY_BYTES_MIN = 10**9
_START_TIMEOUT_S = 900.0  # half a minute on a quiet host, much more on a busy one


class ServerEngine:
    """One server process group and its arguments. Confined to one thread."""

    def __init__(self, plan: Plan, backend: Backend, directory: Path, **options: object) -> None:
        """`options` are further options of our store."""
        self._plan = plan
        self._options = options
        self._backend = backend
        self._directory = directory
        self._lives = 0
        self._server: Server | None = None
        self.store = directory / f"store-{backend}"

    @property
    def backend(self) -> str:
        return self._backend

    def start(self) -> None:
        from sglang_tpusync.testing.server import Server

        self._lives += 1
        with _as_our_error():
            self._server = self._new_server(Server)

    def _new_server(self, kind: type[Server]) -> Server:
        return kind(
            model_directory(self._plan.model),
            args=self._arguments(),
            env=self._environment(),
            log_path=self._directory / f"{self._backend}-{self._lives}.log",
            omp_threads=self._plan.omp_threads,
            timeout_s=_START_TIMEOUT_S,
        )

    def ask(self, prompt: Sequence[int]) -> Answer:
        with _as_our_error():
            generation = self._running.generate(
                prompt, max_new_tokens=self._plan.output_tokens, timeout_s=_ASK_TIMEOUT_S
            )
        return answer_of(generation)

    def settle(self) -> None:
        with _as_our_error():
            self._running.flush_cache(timeout_s=_SETTLE_TIMEOUT_S)

    def crash(self) -> None:
        self._running.kill()
        self._server = None

    def restart(self) -> None:
        self.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def log(self) -> str:
        """What the running server has logged."""
        return self._running.log()

    @property
    def _running(self) -> Server:
        if self._server is None:
            raise TpuSyncError(f"the server with backend {self._backend} does not run")
        return self._server

    def _environment(self) -> dict[str, str]:
        return {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self.store)} if self._backend == "file" else {}

    def _arguments(self) -> list[str]:
        plan = self._plan
        common = ["--max-total-tokens", str(plan.device_tokens), "--page-size", str(plan.page_tokens)]
        common += ["--tp", str(plan.tp_size)]
        if self._backend == "none":
            return [*common, "--disable-radix-cache"]
        common += ["--enable-hierarchical-cache", "--hicache-ratio", str(plan.host_ratio)]
        common += ["--hicache-storage-prefetch-policy", "wait_complete", "--hicache-storage-backend", self._backend]
        if self._backend == "file":
            self.store.mkdir(exist_ok=True)
            return common
        options = {
            "path": str(self.store),
            "capacity": max(_CAPACITY_BYTES_MIN, 2 * plan.stored_tokens * kv_bytes_per_token(plan.model)),
            "floor": 0,
            "write_budget_per_day": "unlimited",
            **self._options,
        }
        return [*common, "--hicache-storage-backend-extra-config", json.dumps(options)]


def answer_of(generation: Generation) -> Answer:
    """A generation of the server harness in the words of the measurement."""
    details = generation.cached_details
    return Answer(
        ids=generation.output_ids,
        logprobs=generation.logprobs,
        ttft_s=generation.ttft_s,
        prompt_tokens=generation.prompt_tokens,
        cached_tokens=generation.cached_tokens,
        by_tier={tier: int(details[tier]) for tier in _TIERS if details.get(tier)},
    )


def kv_bytes_per_token(model: str) -> int:
    """Bytes of K and V of one token in all layers, bf16, out of the model's config.json."""
    config = json.loads((model_directory(model) / "config.json").read_text())
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * heads * head_dim * 2)


@contextlib.contextmanager
def _as_our_error() -> Iterator[None]:
    """What a server did wrong ends the run with its message, and no traceback of ours."""
    from sglang_tpusync.testing.server import ServerError

    try:
        yield
    except (ServerError, OSError, http.client.HTTPException) as error:
        raise TpuSyncError(str(error)) from error


def model_directory(name: str) -> Path:
    """The directory of a model that is built here by name, else of the one at that path."""
    from sglang_tpusync.testing.models import NAMES, build_model

    return build_model(name) if name in NAMES else Path(name)
