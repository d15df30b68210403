"""The transport across the language and the process boundary: numpy memory, exceptions, peers that die or stop."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from sglang_tpusync._core import Endpoint, Ticket
from sglang_tpusync.bench.report import Row, read_report
from sglang_tpusync.bench.transfer import TransferBench
from sglang_tpusync.cli.main import app
from sglang_tpusync.errors import ConfigError, TransferError

WAYS = [False, True]  # same_host


def arrays(**values: Any) -> dict[str, NDArray[Any]]:
    return {name: np.asarray(v, np.uint32 if name == "regions" else np.uint64) for name, v in values.items()}


def finish(ticket: Ticket) -> None:
    assert ticket.wait(30)
    assert ticket.error() is None


class Pair:
    def __init__(self, length: int, **options: Any) -> None:
        self.source = np.random.default_rng(1).integers(0, 256, length, np.uint8)
        self.target = np.zeros(length, np.uint8)
        self.writer, self.reader = Endpoint(bind=(), **options), Endpoint(**options)
        self.writer.register_region(self.source.ctypes.data, length)
        self.region = self.reader.register_region(self.target.ctypes.data, length)
        self.peer = self.writer.connect(self.reader.addresses, 10)

    def grant_all(self, holder: bytes | None = None) -> int:
        whole = arrays(regions=[self.region], offsets=[0], lengths=[len(self.target)])
        return self.reader.open_grant(**whole, holder=holder)

    def write(self, grant: int, places: list[tuple[int, int, int]], **options: Any) -> Ticket:
        base = self.source.ctypes.data
        return self.writer.submit_write(
            self.peer,
            grant,
            **arrays(
                addresses=[base + source for source, _, _ in places],
                regions=[self.region] * len(places),
                offsets=[target for _, target, _ in places],
                lengths=[length for _, _, length in places],
            ),
            **options,
        )

    def close(self) -> None:
        self.writer.close()
        self.reader.close()


@pytest.fixture(params=WAYS, ids=["tcp", "same_host"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(1 << 20, same_host=request.param)
    yield made
    made.close()


def test_bytes_arrive_where_they_belong(pair: Pair) -> None:
    grant = pair.grant_all(holder=pair.writer.id)
    finish(pair.write(grant, [(0, 4096, 1000), (5000, 100, 3000)]))
    expected = np.zeros_like(pair.target)
    expected[4096:5096] = pair.source[:1000]
    expected[100:3100] = pair.source[5000:8000]
    np.testing.assert_array_equal(pair.target, expected)
    assert pair.reader.stats()["landed_bytes"] == 4000


def test_messages_and_news(pair: Pair) -> None:
    finish(pair.writer.submit_message(pair.peer, b"hello"))
    (event,) = pair.reader.receive(timeout_s=10)
    assert (event.kind, event.message, event.reason) == ("message", b"hello", "")
    (info,) = pair.reader.peers()
    assert info["id"] == event.peer
    assert info["endpoint"] == pair.writer.id
    pair.writer.disconnect(pair.peer)
    (event,) = pair.reader.receive(timeout_s=10)
    assert event.kind == "lost"
    assert "closed" in event.reason
    assert pair.reader.receive(timeout_s=0) == []


def test_a_revoked_grant_is_worth_nothing(pair: Pair) -> None:
    grant = pair.grant_all()
    finish(pair.reader.revoke_grant(grant))
    ticket = pair.write(grant, [(0, 0, 10)])
    assert ticket.wait(30)
    assert str(ticket.error()).startswith("not_found")
    pair.reader.release_region(pair.region)
    assert not pair.target.any()


def test_errors_have_their_exceptions(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="num_streams"):
        Endpoint(num_streams=0)
    with pytest.raises(TypeError, match="no option 'stream'"):
        Endpoint(stream=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="num_peers_max: -1 is no value"):
        Endpoint(num_peers_max=-1)
    with pytest.raises(ConfigError, match="heartbeat_s: nan"):
        Endpoint(heartbeat_s=math.nan)
    with pytest.raises(ConfigError, match="secret_file"):
        Endpoint(bind=("0.0.0.0:0",))
    with pytest.raises(ConfigError, match="not in one registered region"):
        pair.writer.submit_write(
            pair.peer, 1, **arrays(addresses=[pair.target.ctypes.data], regions=[1], offsets=[0], lengths=[1])
        )
    pair.grant_all()
    with pytest.raises(TransferError, match="is in use"):
        pair.reader.release_region(pair.region)
    with pytest.raises(TransferError):
        pair.writer.submit_message(pair.peer + 1, b"x")
    with pytest.raises(TypeError):
        pair.reader.open_grant([1], [0], [1])  # type: ignore[arg-type]


def test_another_secret_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"a secret of sixteen bytes or more: {name}")
    reader = Endpoint(secret_file=str(tmp_path / "one"))
    with pytest.raises(TransferError):
        Endpoint(secret_file=str(tmp_path / "two")).connect(reader.addresses, 10)
    assert Endpoint(secret_file=str(tmp_path / "one")).connect(reader.addresses, 10) > 0
    assert reader.stats()["handshakes_refused"] > 0


@pytest.fixture
def other_process() -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    command = [sys.executable, "-m", "sglang_tpusync.bench.transfer_reader", str(64 << 20), "4"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.parametrize("way", ["tcp", "same-host"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stopped_peer_fails_its_writes_in_time(
    other_process: tuple[subprocess.Popen[str], dict[str, Any]], way: str, number: signal.Signals
) -> None:
    process, hello = other_process
    source = np.ones(64 << 20, np.uint8)
    endpoint = Endpoint(bind=(), same_host=way == "same-host", rate_bytes_per_s_max=32 << 20)
    region = endpoint.register_region(source.ctypes.data, len(source))
    peer = endpoint.connect(hello[way]["addresses"], 30)
    places = arrays(addresses=[source.ctypes.data], regions=[hello[way]["region"]], offsets=[0], lengths=[len(source)])
    ticket = endpoint.submit_write(peer, hello[way]["grant"], **places)
    assert not ticket.wait(0.2)
    begin = time.monotonic()
    os.kill(process.pid, number)
    assert ticket.wait(30)
    assert str(ticket.error()).startswith("disconnected")
    limit_s = 1 if number == signal.SIGKILL else 3  # silence_s is 2
    assert time.monotonic() - begin < limit_s + 3  # of a busy machine
    (event,) = endpoint.receive(timeout_s=10)
    assert (event.kind, event.peer) == ("lost", peer)
    endpoint.release_region(region)
    endpoint.close()


def test_the_command_writes_its_report(tmp_path: Path) -> None:
    path = tmp_path / "transfer.json"
    options = ["--streams", "3", "--rounds", "1", "--sample-mib", "16", "--set-mib", "16", "--json", str(path)]
    done = CliRunner().invoke(app, ["bench", "transfer", *options])
    assert done.exit_code in (0, 1), done.output  # 1: a goal is missed, which is no matter of this test
    report = read_report(path)
    assert report.bench == "transfer"
    assert len(report.rows) == 2 * 2 * 2 * 3  # way, mode, speed and CPU, piece
    assert {row.unit for row in report.rows} == {"GB/s", "CPU s/GB"}


def test_the_benchmark_measures_every_case_and_checks_the_bytes() -> None:
    with TransferBench(num_streams=2, set_bytes=16 << 20) as bench:
        rows = bench.rows(num_rounds=1, sample_bytes=16 << 20, pieces=["64 KiB", "1 MiB"])
    assert all(isinstance(row, Row) and row.value > 0 for row in rows if row.unit == "GB/s")
    assert {row.case for row in rows if row.goal is not None} == {
        f"{way}, {piece}, batched" for way in ("tcp", "same-host") for piece in ("64 KiB", "1 MiB")
    }
    assert {row.case for row in rows if row.ratio is not None} == {
        f"{way}, {piece}, {mode}"
        for way in ("tcp", "same-host")
        for piece in ("64 KiB", "1 MiB")
        for mode in ("batched", "single")
    }
