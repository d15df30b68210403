"""An engine that somebody else started: asked over HTTP, never stopped or killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sglang_tpusync.bench.serving.answer import Answer
from sglang_tpusync.errors import TpuSyncError

__all__ = ["UrlEngine"]

_TIERS = ("device", "host", "storage")
_TIMEOUT_S = 1800.0
_SETTLE_S = 120.0


class UrlEngine:
    """The server at `url`, such as http://127.0.0.1:30000. Confined to one thread.

    What the server refuses is a TpuSyncError.
    """

    backend = "url"

    def __init__(self, url: str, output_tokens: int) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise TpuSyncError(f"--url {url!r}: allowed is http://host:port")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        host, port = parts.hostname, parts.port
        self._connect: Callable[[], http.client.HTTPConnection] = lambda: kind(host, port, timeout=_TIMEOUT_S)
        self._output_tokens = output_tokens

    def ask(self, prompt: Sequence[int]) -> Answer:
        sampling = {"temperature": 0.0, "max_new_tokens": self._output_tokens, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True, "return_logprob": True}
        started, first_s, last = time.perf_counter(), 0.0, None
        with self._answer("POST", "/generate", {**body, "logprob_start_len": -1}) as response:
            for line in response:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                last = json.loads(line[len(b"data: ") :])
                if "error" in last:
                    raise TpuSyncError(f"the server answered {last['error']}")
                first_s = first_s or time.perf_counter() - started
        if last is None:
            raise TpuSyncError("the server closed the stream without an answer")
        return _answer(last, first_s)

    def settle(self) -> None:
        """A flush is refused while backups are under way, so it is asked for again until they are done."""
        deadline = time.monotonic() + _SETTLE_S
        while True:
            try:
                with self._answer("POST", f"/flush_cache?timeout={_SETTLE_S:.0f}", None) as response:
                    response.read()
                return
            except TpuSyncError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def crash(self) -> None:
        raise TpuSyncError("a server that somebody else started is not killed")

    restart = crash

    def stop(self) -> None:
        """Leaves it running."""

    @contextlib.contextmanager
    def _answer(self, method: str, path: str, body: object) -> Iterator[http.client.HTTPResponse]:
        connection = self._connect()
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                text = response.read(500).decode(errors="replace")
                raise TpuSyncError(f"{method} {path} answered {response.status}: {text}")
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise TpuSyncError(f"{method} {path}: {error}") from error
        finally:
            connection.close()


def _answer(event: dict[str, Any], ttft_s: float) -> Answer:
    meta = event["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    return Answer(
        ids=tuple(event["output_ids"]),
        logprobs=tuple(float(logprob) for logprob, *_ in meta["output_token_logprobs"]),
        ttft_s=ttft_s,
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        by_tier={tier: int(details[tier]) for tier in _TIERS if details.get(tier)},
    )
