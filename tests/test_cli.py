"""The command as a user meets it: help, exit codes, what doctor says of good and bad directories."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from typer.testing import CliRunner

from sglang_tpusync.bench.serving import command
from sglang_tpusync.cli.bench import BENCHES
from sglang_tpusync.cli.checks import disk, hooks, roundtrip, software
from sglang_tpusync.cli.checks.disk import check_disk
from sglang_tpusync.cli.checks.result import Result, exit_code
from sglang_tpusync.cli.main import app
from sglang_tpusync.config import Options
from sglang_tpusync.errors import UnsupportedError

runner = CliRunner()


def test_help_names_every_command_and_loads_no_engine() -> None:
    probe = (
        "import sys; from sglang_tpusync.cli.main import app; "
        "print(sorted({'torch', 'sglang', 'matplotlib', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    text = runner.invoke(app, ["--help"]).output
    assert all(name in text for name in ("doctor", "bench", "demo"))
    text = runner.invoke(app, ["bench", "--help"]).output
    assert all(name in text for name in BENCHES)


def test_every_bench_takes_a_file_for_its_rows() -> None:
    for name in BENCHES:
        done = runner.invoke(app, ["bench", name, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
        assert done.exit_code == 0
        assert "--json" in done.output


def test_an_error_of_ours_is_one_line_and_exit_code_2() -> None:
    command = [sys.executable, "-c", "from sglang_tpusync.cli.main import main; main()"]
    done = subprocess.run(
        [*command, "bench", "serving", "--prompt-tokens", "5"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--prompt-tokens 5: allowed are" in done.stderr


def test_sigterm_cleans_up() -> None:
    probe = """
import contextlib, os, signal, time
from sglang_tpusync.cli import main

@contextlib.contextmanager
def scratch():
    try:
        yield
    finally:
        print("cleaned")

def command():
    with scratch():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

main.app = command
main.main()
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "cleaned\n"), done.stderr


def test_a_package_that_the_end_needs_is_asked_for_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    done = runner.invoke(app, ["bench", "serving", "--png", "x.png"])
    assert isinstance(done.exception, UnsupportedError)
    assert "matplotlib" in str(done.exception)


def test_a_directory_that_is_not_empty_or_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    config = {"num_attention_heads": 8, "hidden_size": 256, "num_hidden_layers": 4}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    arguments = ["bench", "serving", "--model", str(tmp_path / "model")]
    monkeypatch.setattr(command, "require_packages", lambda *_: None)
    done = runner.invoke(app, [*arguments, "--keep", str(tmp_path)])
    assert "a new or an empty directory" in str(done.exception)
    monkeypatch.setattr(command.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    done = runner.invoke(app, [*arguments, "--keep", str(tmp_path / "new")])
    assert "the stores of this run take 0.6 GB" in str(done.exception)


def test_the_worst_result_decides_the_exit_code() -> None:
    def result(status: str) -> Result:
        return msgspec.convert({"name": "n", "status": status, "finding": "f"}, Result)

    assert exit_code([]) == 0
    assert exit_code([result("ok"), result("note")]) == 0
    assert exit_code([result("ok"), result("warning")]) == 1
    assert exit_code([result("failed"), result("warning")]) == 2


def _states(path: Path, options: Options | None = None) -> dict[str, Result]:
    return {result.name: result for result in check_disk(path, options or Options(allow_tmpfs=True))}


def test_a_good_directory_with_the_arithmetic_spelled_out(tmp_path: Path) -> None:
    store = tmp_path / "store"
    (store / "v1").mkdir(mode=0o700, parents=True)
    (store / "v1" / "held").write_bytes(b"x" * 8192)
    results = _states(store, Options(capacity="1GB", floor=0, allow_tmpfs=True))
    assert results["directory"].status == "ok"
    assert results["space"].status == "ok"
    details = results["space"].details
    assert (details["capacity_bytes"], details["floor_bytes"], details["held_bytes"]) == (10**9, 0, 8192)


def test_defaults_are_shares_of_the_disk_and_count_what_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = os.statvfs(tmp_path)
    fields = {"f_frsize": 4096, "f_blocks": 10**6, "f_bavail": 5 * 10**5}
    fake = type("Usage", (), {name: fields.get(name, getattr(usage, name)) for name in dir(usage) if name[0] == "f"})
    monkeypatch.setattr(disk.os, "statvfs", lambda _: fake)
    (tmp_path / "v1").mkdir(mode=0o700)
    (tmp_path / "v1" / "held").write_bytes(b"x" * 4096 * 100)
    details = _states(tmp_path)["space"].details
    assert details["capacity_bytes"] == 4096 * (5 * 10**5 + 100) // 5
    assert details["floor_bytes"] == 4096 * 10**6 // 5


def test_a_directory_to_be_made_is_no_fault_and_is_not_made(tmp_path: Path) -> None:
    results = _states(tmp_path / "a" / "b")
    assert results["directory"].status == "ok"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["capacity", "floor"])
def test_a_size_that_leaves_nothing_or_exceeds_the_disk_fails(tmp_path: Path, name: str) -> None:
    results = _states(tmp_path, msgspec.structs.replace(Options(allow_tmpfs=True), **{name: "1000TB"}))
    assert results["space"].status == "failed"


def test_bad_directories_are_named_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    open_to_all = tmp_path / "open"
    (open_to_all / "v1").mkdir(parents=True)
    (open_to_all / "v1").chmod(0o755)
    assert "is not a directory" in _states(file)["directory"].finding
    assert _states(open_to_all)["directory"].status == "warning"
    monkeypatch.setattr(disk, "file_system_of", lambda _: "tmpfs")
    refused = _states(tmp_path, Options())["directory"]
    assert refused.status == "failed"
    assert refused.remedy is not None
    monkeypatch.setattr(disk.os, "access", lambda *_: False)
    assert "cannot be written" in _states(tmp_path)["directory"].finding


def test_hooks_that_do_not_fit_are_named_with_their_target(monkeypatch: pytest.MonkeyPatch) -> None:
    state = hooks._State(name="zero-copy", target="sglang.x.y", need="name", does="d", state="y has no parameter 'z'")
    monkeypatch.setattr(hooks, "_probe", lambda _: [state])
    monkeypatch.setattr(hooks.importlib.util, "find_spec", lambda _: object())
    (result,) = hooks.check_hooks()
    assert result.status == "failed"
    assert "sglang.x.y" in result.finding
    assert "no parameter 'z'" in result.finding


def test_an_untested_sglang_is_a_warning_that_names_the_tested_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "_version_of", lambda _: "9.9.9")
    result = next(result for result in software.check_software() if result.name == "sglang")
    assert result.status == "warning"
    assert "0.5.23" in result.finding


def test_a_page_goes_through_the_store_and_nothing_is_left_behind(tmp_path: Path) -> None:
    result = roundtrip.check_roundtrip(tmp_path / "made" / "here", Options(allow_tmpfs=True))
    assert result.status == "ok", result.finding
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_cannot_open_fails_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(roundtrip, "_open", refuse)
    result = roundtrip.check_roundtrip(tmp_path / "store", Options())
    assert result.status == "failed"
    assert "Permission denied" in result.finding
    assert list(tmp_path.iterdir()) == []


def test_doctor_prints_one_document_with_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "check_hooks", list)
    done = runner.invoke(app, ["doctor", "--json", "--path", str(tmp_path), "--config", '{"allow_tmpfs": true}'])
    document = json.loads(done.stdout)
    assert document["exit_code"] == done.exit_code
    assert {"package", "native core", "directory", "space", "end to end"} <= {r["name"] for r in document["results"]}
    assert document["reminders"]


def test_doctor_names_an_unknown_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "check_hooks", list)
    done = runner.invoke(app, ["doctor", "--json", "--config", '{"capacitty": 1}'])
    document = json.loads(done.stdout)
    assert done.exit_code == 2
    assert any("capacitty" in result["finding"] and "capacity" in result["finding"] for result in document["results"])
