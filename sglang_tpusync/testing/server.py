"""A real SGLang server as a test or a benchmark sees it: start it, ask it, kill it."""

from __future__ import annotations

__all__ = ["Generation", "Server", "ServerError"]

import contextlib
import http.client
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sglang_tpusync.testing import cpu_engine
from sglang_tpusync.testing.processes import MarkedProcess, free_port

_HOST = "127.0.0.1"
_POLL_S = 0.1
_LOG_TAIL_LINES = 60


class ServerError(RuntimeError):
    """The server did not start, died, or refused a request; the message ends with the tail of its log."""


@dataclass(frozen=True)
class Generation:
    """The answer to one request.

    logprobs: of each output token, natural logarithm, float32 as SGLang sends it.
    ttft_s: from sending the request to the first token; e2e_s: to the last.
    cached_tokens: of the prompt; cached_details: the same by tier (device, host, storage) as SGLang reports it.
    """

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    ttft_s: float
    e2e_s: float
    prompt_tokens: int
    cached_tokens: int
    cached_details: Mapping[str, int | str] = field(default_factory=dict)


class Server:
    """One SGLang server on the CPU engine, with all its processes. Not reusable once stopped.

    `args` follow, and so win over, the common arguments (cpu_engine.launch_arguments); `env` likewise. The
    constructor returns when the server is ready and raises ServerError if it dies or takes longer than
    `timeout_s`. However this process ends, no process of the server is left.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        port: int = 0,
        log_path: str | Path | None = None,
        omp_threads: int | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self.port = port or free_port(_HOST)
        self.log_path = Path(log_path) if log_path else Path(tempfile.mkdtemp(prefix="sglang-")) / "server.log"
        tensor_parallel = _last_value(args, ("--tp", "--tp-size", "--tensor-parallel-size"))
        common = cpu_engine.environment(omp_threads=omp_threads, tensor_parallel=tensor_parallel)
        command = [*cpu_engine.launch_arguments(model_path, host=_HOST, port=self.port), *args]
        self._start(command, {**common, **(env or {})}, timeout_s)

    def _start(self, command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> None:
        begin = time.monotonic()
        self._process = MarkedProcess(command, env=env, log_path=self.log_path)
        try:
            self._wait_ready(begin + timeout_s, timeout_s)
        except BaseException:
            self._process.kill()
            raise
        self.startup_s = time.monotonic() - begin

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 16,
        timeout_s: float = 300.0,
        ignore_eos: bool = True,
    ) -> Generation:
        """Greedy continuation of a text or of token ids, streamed."""
        given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos}
        body = {**given, "sampling_params": sampling, "stream": True, "return_logprob": True, "logprob_start_len": -1}
        return _generation(self._stream("/generate", body, timeout_s))

    def chat(self, messages: Sequence[Mapping[str, str]], *, max_tokens: int = 64, timeout_s: float = 300.0) -> str:
        """The answer of the model to a conversation, through the OpenAI endpoint, greedy."""
        body = {"model": "default", "messages": list(messages), "max_tokens": max_tokens, "temperature": 0.0}
        answer = json.loads(self.request("POST", "/v1/chat/completions", body, timeout_s=timeout_s))
        return str(answer["choices"][0]["message"]["content"])

    def flush_cache(self, *, timeout_s: float = 60.0) -> None:
        """Empties the device and host tiers. Waits while requests or copies are still running."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.request("POST", "/flush_cache", timeout_s=timeout_s)
                return
            except ServerError:
                if time.monotonic() > deadline or not self.alive():
                    raise
            time.sleep(_POLL_S)

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics by `name{labels}`; empty unless --enable-metrics was given."""
        samples = {}
        for line in self.request("GET", "/metrics").decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def request(
        self, method: str, path: str, body: object = None, *, timeout_s: float = 60.0, headers: Mapping[str, str] = {}
    ) -> bytes:
        """One HTTP request; the body of the answer. Raises ServerError unless the status is 200."""
        with self._response(method, path, body, timeout_s, headers) as response:
            return response.read()

    def pids(self) -> list[int]:
        """Every living process of the server."""
        return self._process.pids()

    def alive(self) -> bool:
        return self._process.returncode() is None

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL to every process of the server at once; returns when all are gone."""
        self._process.kill()

    def stop(self, *, timeout_s: float = 20.0) -> None:
        """SIGTERM, then SIGKILL to what is left after `timeout_s`."""
        if self.alive():
            self._process.interrupt(timeout_s)
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait_ready(self, deadline: float, timeout_s: float) -> None:
        while True:
            if not self.alive():
                raise self._failure(f"the server ended with code {self._process.returncode()} while starting")
            if time.monotonic() > deadline:
                raise self._failure(f"the server was not ready after {timeout_s:.0f} s")
            with contextlib.suppress(OSError, http.client.HTTPException, ServerError):
                self.request("GET", "/health", timeout_s=5.0)
                return
            time.sleep(_POLL_S)

    def _stream(self, path: str, body: object, timeout_s: float) -> Iterator[tuple[float, dict[str, Any]]]:
        """(seconds since sending, event) for every server-sent event."""
        begin = time.perf_counter()
        with self._response("POST", path, body, timeout_s, {}) as response:
            for line in response:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    event = json.loads(line[len(b"data: ") :])
                    if "error" in event:
                        raise self._failure(f"{path} answered {event['error']}")
                    yield time.perf_counter() - begin, event

    @contextlib.contextmanager
    def _response(
        self, method: str, path: str, body: object, timeout_s: float, headers: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(_HOST, self.port, timeout=timeout_s)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            if response.status != 200:
                message = response.read().decode(errors="replace")
                raise self._failure(f"{method} {path} answered {response.status}: {message[:500]}")
            yield response
        finally:
            connection.close()

    def _failure(self, what: str) -> ServerError:
        tail = "\n".join(self.log().splitlines()[-_LOG_TAIL_LINES:])
        return ServerError(f"{what}\n--- the last lines of {self.log_path}\n{tail}")


def _last_value(args: Sequence[str], names: tuple[str, ...]) -> int:
    """The number given to the last of these options; 1 if there is none."""
    value = 1
    for i, argument in enumerate(args):
        name, _, attached = argument.partition("=")
        if name in names:
            value = int(attached or args[i + 1])
    return value


def _generation(events: Iterator[tuple[float, dict[str, Any]]]) -> Generation:
    ttft_s, elapsed_s, event = 0.0, 0.0, None
    for elapsed_s, event in events:
        if not ttft_s and event["output_ids"]:
            ttft_s = elapsed_s
    if event is None:
        raise ServerError("the server closed the stream without an answer")
    meta = event["meta_info"]
    end = meta.get("finish_reason") or {}
    if end.get("type") == "abort":
        raise ServerError(f"the server gave the request up: {end.get('message')}")
    return Generation(
        output_ids=tuple(event["output_ids"]),
        logprobs=tuple(float(logprob) for logprob, *_ in meta["output_token_logprobs"]),
        text=event.get("text") or "",
        ttft_s=ttft_s,
        e2e_s=elapsed_s,
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        cached_details=meta.get("cached_tokens_details") or {},
    )
