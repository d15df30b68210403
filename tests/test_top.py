"""Status files and `tpusync top`: of living processes only, believed only as far as they were checked."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from sglang_tpusync import errors
from sglang_tpusync.cli.main import app
from sglang_tpusync.observe import StatusWriter, read_statuses

runner = CliRunner()
STATS: dict[str, int | float | str] = {
    "pages_queried": 10, "pages_hit": 7, "pages_missed_corrupt": 2, "refused_budget": 3, "entries": 1234,
    "bytes_on_disk": 5_000_000, "capacity_bytes": 10_000_000, "io_engine": "uring", "breaker_open": 0,
}  # fmt: skip


def describe() -> tuple[str, str, str | None, dict[str, int | float | str]]:
    return "ab" * 32, "/the/store", None, dict(STATS)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.01)


def top(path: Path, *options: str) -> tuple[int, str]:
    done = runner.invoke(app, ["top", "--status-path", str(path), *options], env={"COLUMNS": "250", "TERM": "dumb"})
    return done.exit_code, done.output


def test_a_store_is_shown_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "status"
    writer = StatusWriter(path, describe)
    wait_for(lambda: bool(read_statuses(path).found))
    code, text = top(path, "--once", "--interval", "0.2")
    assert code == 0
    for part in (
        str(os.getpid()),
        "abababab",
        "1,234",
        "5.0 MB",
        "10.0 MB",
        "pages_missed_corrupt 2",
        "refused_budget 3",
    ):
        assert part in text, part
    document = json.loads(top(path, "--json")[1])
    assert document["found"][0]["stats"] == STATS
    writer.close()
    writer.close()
    assert list(path.iterdir()) == []
    assert "no process has a store open" in top(path, "--once", "--interval", "0.2")[1]


def test_rates_are_differences(tmp_path: Path) -> None:
    counted = 0

    def counting() -> tuple[str, str, str | None, dict[str, int | float | str]]:
        nonlocal counted
        counted += 4000
        return "cd" * 32, "/s", "/dev/shm/r", {"pages_queried": counted, "host_slots": 8, "host_pages_sealed": 5}

    writer = StatusWriter(tmp_path / "status", counting)
    wait_for(lambda: bool(read_statuses(tmp_path / "status").found))
    text = top(tmp_path / "status", "--once", "--interval", "2.2")[1]
    writer.close()
    (rate,) = [int(word.replace(",", "")) for word in re.findall(r"([0-9,]+)/s", text) if word != "0"]
    assert 1000 < rate < 4100  # one write a second, or fewer on a busy machine


def hold_open(path: Path) -> None:
    StatusWriter(path, describe)
    signal.pause()


def test_a_killed_process_is_not_shown_and_its_file_goes(tmp_path: Path) -> None:
    path = tmp_path / "status"
    process = multiprocessing.get_context("spawn").Process(target=hold_open, args=(path,), daemon=True)
    process.start()
    wait_for(lambda: bool(read_statuses(path).found))
    process.kill()
    process.join()
    assert read_statuses(path).found == []
    assert len(list(path.iterdir())) == 1
    writer = StatusWriter(path, describe)
    wait_for(lambda: [status.process_id for status in read_statuses(path).found] == [os.getpid()])
    assert len(list(path.glob("*.json"))) == 1
    writer.close()


def a_status(**changes: Any) -> bytes:
    fields = {
        "version": 1, "process_id": 1, "process_started": 0, "unix_ns": 0, "namespace": "ab", "store": "/s",
        "region": None, "stats": {},
    }  # fmt: skip
    return msgspec.json.encode({**fields, **changes})


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "truncated"),
        (b"{" * 100, "malformed"),
        (a_status()[:-1], "truncated"),
        (a_status(version=2), "version 2, this program reads 1"),
        (a_status(process_id=7), "says that it is of process 7"),
        (a_status(stats={"x": [1]}), "Expected"),
        (a_status(namespace="a" * 70000), "larger than 65536 bytes"),
        (b'{"version":1}', "missing required field"),
    ],
)
def test_what_is_no_status_is_named(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "1-0.status.json").write_bytes(data)
    code, text = top(tmp_path, "--json")
    assert code == 1
    (trouble,) = json.loads(text)["trouble"]
    assert "1-0.status.json" in trouble
    assert says in trouble
    assert "unreadable" in top(tmp_path, "--once", "--interval", "0.2")[1]


def test_a_directory_that_others_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(errors.StorageError, match="only they write"):
        read_statuses(tmp_path)
    writer = StatusWriter(tmp_path, describe)  # says so in the log, and is no trouble to its process
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_description_that_raises_ends_the_file_only_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> tuple[str, str, str | None, dict[str, int | float | str]]:
        raise RuntimeError("no")

    StatusWriter(tmp_path / "status", broken).close()
    assert read_statuses(tmp_path / "status").found == []
    (record,) = caplog.records
    assert (record.levelname, record.getMessage().rpartition(": R")[2]) == ("WARNING", "untimeError: no")


def test_nothing_is_made_by_looking(tmp_path: Path) -> None:
    assert top(tmp_path / "nowhere", "--once", "--interval", "0.2")[0] == 0
    assert not (tmp_path / "nowhere").exists()
    assert top(tmp_path, "--interval", "0.1")[0] == 2
