"""Real prefill and decode servers and SGLang's router before them, on the CPU engine."""

from __future__ import annotations

__all__ = ["Disaggregated", "Router"]

import contextlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, Self

from sglang_tpusync.testing import cpu_engine
from sglang_tpusync.testing.processes import free_port
from sglang_tpusync.testing.server import Server

_HOST = "127.0.0.1"
Role = Literal["prefill", "decode"]


class Router(Server):
    """SGLang's small load balancer in front of one prefill and one decode server; asked like a server."""

    def __init__(self, prefill_url: str, bootstrap_port: int, decode_url: str, *, log_path: Path) -> None:
        self.port = free_port(_HOST)
        self.log_path = log_path
        command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--mini-lb"]
        command += ["--prefill", prefill_url, str(bootstrap_port), "--decode", decode_url]
        command += ["--host", _HOST, "--port", str(self.port)]
        self._start(command, cpu_engine.environment(omp_threads=1), 300)


class Disaggregated:
    """A prefill server, a decode server and a router. `args` are of both servers. Leaving it ends all of them."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        args: Sequence[str] = (),
        prefill_args: Sequence[str] = (),
        decode_args: Sequence[str] = (),
        prefill_env: Mapping[str, str] | None = None,
        decode_env: Mapping[str, str] | None = None,
        backend: str = "tpusync",
        directory: Path | None = None,
        timeout_s: float = 900.0,
    ) -> None:
        self.bootstrap_port = free_port(_HOST)
        self._model_path, self._timeout_s = model_path, timeout_s
        self._directory = directory or Path(tempfile.mkdtemp(prefix="disaggregated-"))
        self._args: dict[Role, list[str]] = {
            "prefill": [*args, *prefill_args],
            "decode": [*args, *decode_args],
        }
        self._env: dict[Role, Mapping[str, str]] = {"prefill": prefill_env or {}, "decode": decode_env or {}}
        self._backend = backend
        self._lives = 0
        with contextlib.ExitStack() as started, ThreadPoolExecutor(2) as pool:
            both = [pool.submit(self.start, role) for role in ("prefill", "decode")]
            for server in both:
                with contextlib.suppress(Exception):
                    started.callback(server.result().stop)
            self.prefill, self.decode = (server.result() for server in both)
            log_path = self._directory / "router.log"
            self.router = Router(self.prefill.url, self.bootstrap_port, self.decode.url, log_path=log_path)
            started.pop_all()

    def start(self, role: Role, port: int = 0) -> Server:
        self._lives += 1
        arguments = ["--disaggregation-transfer-backend", self._backend, "--disaggregation-mode", role]
        if role == "prefill":
            arguments += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        return Server(
            self._model_path,
            args=[*arguments, *self._args[role]],
            env=self._env[role],
            port=port,
            log_path=self._directory / f"{role}-{self._lives}.log",
            omp_threads=1,
            timeout_s=self._timeout_s,
        )

    def replace(self, role: Role) -> None:
        """Another server of this role at the same address; the one before is dead."""
        server = self.start(role, getattr(self, role).port)
        setattr(self, role, server)

    def stop(self) -> None:
        for server in (self.router, self.prefill, self.decode):
            server.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
