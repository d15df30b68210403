"""Engines that are real server processes, started here with the same sizes in every arm."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_tpusync.bench.serving.answer import Answer
from sglang_tpusync.bench.serving.plan import Backend, Plan
from sglang_tpusync.errors import TpuSyncError

if TYPE_CHECKING:
    from sglang_tpusync.testing.server import Generation, Server

__all__ = ["ServerEngine", "answer_of", "model_directory"]

_TIERS = ("device", "host", "storage")
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
        self._server = Server(
            model_directory(self._plan.model),
            args=self._arguments(),
            env=self._environment(),
            log_path=self._directory / f"{self._backend}-{self._lives}.log",
            omp_threads=self._plan.omp_threads,
            timeout_s=_START_TIMEOUT_S,
        )

    def ask(self, prompt: Sequence[int]) -> Answer:
        return answer_of(self._running.generate(prompt, max_new_tokens=self._plan.output_tokens, timeout_s=1800.0))

    def settle(self) -> None:
        self._running.flush_cache(timeout_s=120.0)

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
        options = {"path": str(self.store), "write_budget_per_day": "unlimited", **self._options}
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


def model_directory(name: str) -> Path:
    """The directory of a model that is built here by name, else of the one at that path."""
    from sglang_tpusync.testing.models import NAMES, build_model

    return build_model(name) if name in NAMES else Path(name)
