"""`bench serving --url` against an HTTP server that is played: what it sends, what it makes of the answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from sglang_tpusync.bench.serving import url as url_module
from sglang_tpusync.bench.serving.command import measure
from sglang_tpusync.bench.serving.plan import Plan
from sglang_tpusync.bench.serving.url import UrlEngine
from sglang_tpusync.errors import TpuSyncError


class Played(BaseHTTPRequestHandler):
    """Remembers prompts as a server with a device pool and a store does; refuses the first flush."""

    device: ClassVar[set[str]] = set()
    store: ClassVar[set[str]] = set()
    refusals: ClassVar[list[int]] = [1]

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.startswith("/flush_cache"):
            refused = self.refusals[0] > 0
            self.refusals[0] -= 1
            self.device.clear()
            self.reply(400 if refused else 200, b"busy" if refused else b"done")
            return
        body = json.loads(raw)
        if body["input_ids"][0] == 7:
            self.reply(500, b"no such token")
            return
        events = [self.event(body, 1), self.event(body, body["sampling_params"]["max_new_tokens"])]
        self.reply(200, b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events) + b"data: [DONE]\n\n")

    def event(self, body: dict[str, Any], num: int) -> dict[str, Any]:
        key = json.dumps(body["input_ids"])
        tier = "device" if key in self.device else "storage" if key in self.store else None
        hit = len(body["input_ids"]) - 64 if tier else 0
        if num > 1:
            self.device.add(key)
            self.store.add(key)
        meta = {
            "prompt_tokens": len(body["input_ids"]),
            "cached_tokens": hit,
            "output_token_logprobs": [[-0.5, 3, None]] * num,
            "cached_tokens_details": {tier: hit, "storage_backend": "X"} if tier else None,
        }
        return {"output_ids": [3] * num, "meta_info": meta}

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    Played.device.clear()
    Played.store.clear()
    Played.refusals[0] = 1
    monkeypatch.setattr(url_module.time, "sleep", lambda _: None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Played)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_reduced_run_gives_cold_l1_and_l3(url: str) -> None:
    plan = Plan(prompt_tokens=(512, 1024), num_rounds=2, output_tokens=4)
    outcome = measure(plan, url=url)
    assert outcome.reasons == []
    assert {(r.prompt_tokens, r.source) for r in outcome.rows} == {
        (n, s) for n in (512, 1024) for s in ("cold", "l1", "l3")
    }
    assert all(row.identical and row.backend == "url" for row in outcome.rows)
    assert Played.refusals[0] < 0


def test_a_refusal_says_what_was_asked_and_answered(url: str) -> None:
    with pytest.raises(TpuSyncError, match="POST /generate answered 500: no such token"):
        UrlEngine(url, 4).ask([7] * 100)


def test_an_address_that_is_none_and_a_server_that_is_not_there_are_named() -> None:
    with pytest.raises(TpuSyncError, match="allowed is http://host:port"):
        UrlEngine("127.0.0.1:30000", 4)
    with pytest.raises(TpuSyncError, match="Connection refused"):
        UrlEngine("http://127.0.0.1:9", 4).ask([1] * 100)
    with pytest.raises(TpuSyncError, match="not killed"):
        UrlEngine("http://127.0.0.1:9", 4).crash()
