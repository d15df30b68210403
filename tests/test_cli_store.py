"""The commands on a store directory as an operator meets them: beside a server, without one, on damage, on no store."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from store_pages import IDENTITY, Pages, flip, key_of, region_path
from typer.testing import CliRunner

from sglang_tpusync.cli.main import app

runner = CliRunner()
PAGE_BYTES = 8192


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store of 12 pages in two prefixes, without a writer."""
    place = tmp_path / "store"
    with Pages(place) as pages:
        assert pages.put(0, 8) == 8
        assert pages.put(100, 104, prefix=(0, 1)) == 4
    return place


def run(*arguments: object) -> tuple[int, str]:
    done = runner.invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200", "TERM": "dumb"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return 2, str(done.exception)  # what main() prints
    return done.exit_code, done.output


def run_json(*arguments: object) -> dict[str, Any]:
    code, output = run(*arguments, "--json")
    document: dict[str, Any] = json.loads(output)
    assert document["exit_code"] == code
    return document


def files_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


# ---------------------------------------------------------------- inspect


def test_inspect_shows_identity_entries_prefixes_and_limits(path: Path) -> None:
    document = run_json("inspect", path)
    assert document["exit_code"] == 0
    (namespace,) = document["namespaces"]
    assert namespace["identity"] == IDENTITY
    assert namespace["digest"].startswith(namespace["name"])
    (region,) = namespace["regions"]
    assert (region["num_entries"], region["num_trees"], region["page_bytes"]) == (12, 1, PAGE_BYTES)
    assert (region["writer"], region["process_id"]) == ("none", os.getpid())
    assert 0 < region["created_unix_ns"] <= region["modified_unix_ns"] <= document["unix_ns"]
    assert region["created_unix_ns"] - 10**9 < region["oldest_unix_ns"] <= region["newest_unix_ns"]
    tree = {"root": key_of(0).hex(), "root_depth": 0, "num_pages": 12, "num_pages_longest": 8}
    assert region["largest"] == [tree]
    du = sum(file.stat().st_blocks * 512 for file in (path / "v1", *(path / "v1").rglob("*")))
    assert document["used_bytes"] == du
    assert document["handed_out_bytes"] >= 12 * PAGE_BYTES
    assert 0 < document["limits"]["capacity_bytes"] <= 200e9
    code, text = run("inspect", path)
    assert code == 0
    for part in ("test-model", "page_size 64", "12 entries", "12 pages", "no writer", "hits of an entry", "handed out"):
        assert part in text, part


def test_inspect_changes_nothing_and_takes_the_configured_path(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files_of(path)
    config = path.parent / "store.toml"
    config.write_text(f'path = "{path}"\ncapacity = "1GB"\n')
    monkeypatch.setenv("TPUSYNC_CONFIG", str(config))
    document = run_json("inspect")
    assert (document["path"], document["limits"]["capacity_bytes"]) == (str(path), 10**9)
    assert files_of(path) == before


def test_inspect_names_a_living_writer_and_sees_what_it_writes(path: Path) -> None:
    with Pages(path) as pages:
        pages.put(200, 203)
        (namespace,) = run_json("inspect", path)["namespaces"]
        (region,) = namespace["regions"]
        assert (region["writer"], region["process_id"], region["num_entries"]) == ("live", os.getpid(), 15)
        assert f"written by process {os.getpid()}" in run("inspect", path)[1]
    assert run_json("inspect", path)["namespaces"][0]["regions"][0]["writer"] == "none"


def test_inspect_shows_what_it_cannot_read_and_goes_on(path: Path) -> None:
    with Pages(path, identity={"model": "other"}) as pages:
        pages.put(0, 3)
    (first, second) = sorted(path.glob("v1/*/region-000.table"))
    first.unlink()
    first.mkdir()  # unreadable for any user
    (path / "v1" / "notes.txt").touch()
    (second.parent / "namespace.json").write_text("{")
    code, text = run("inspect", path)
    assert code == 1
    for part in ("cannot be read", "Is a directory", "notes.txt: no part", "identity unknown", "writer unknown"):
        assert part in text, part
    assert run("verify", path)[0] == 1


# ---------------------------------------------------------------- what is no store


@pytest.mark.parametrize("command", ["inspect", "verify", "repair", "export-metrics", "clear"])
def test_no_store_is_exit_code_2_and_stays_none(command: str, tmp_path: Path) -> None:
    arguments = ["--all"] if command == "clear" else []
    missing, empty, file = tmp_path / "missing", tmp_path / "empty", tmp_path / "file"
    empty.mkdir()
    file.touch()
    for path, text in [(missing, "there is nothing"), (empty, "holds no store"), (file, "is not a directory")]:
        code, output = run(command, path, *arguments)
        assert code == 2
        assert str(path) in output
        assert text in output
    assert not missing.exists()
    assert list(empty.iterdir()) == []


def test_a_newer_version_is_named_and_left_alone(path: Path) -> None:
    newer = path.parent / "newer"
    (newer / "v2" / "ab").mkdir(parents=True)
    (newer / "v2" / "ab" / "region-000.slots").write_bytes(b"x" * 100)
    before = files_of(newer)
    for command in (["inspect"], ["verify"], ["repair"], ["clear", "--all"]):
        code, output = run(command[0], newer, *command[1:])
        assert code == 2
        assert "format version 2, this program knows 1" in output
    assert files_of(newer) == before
    (path / "v2").mkdir()
    code, text = run("inspect", path)
    assert code == 0
    assert "another format version: left alone" in text


# ---------------------------------------------------------------- verify


def test_verify_of_a_whole_store_is_clean(path: Path) -> None:
    document = run_json("verify", path)
    (region,) = document["regions"]
    assert document["exit_code"] == 0
    assert (region["num_intact"], region["num_bytes"], region["findings"]) == (12, 12 * PAGE_BYTES, [])
    code, text = run("verify", path)
    assert code == 0
    assert "12 pages are whole" in text


def test_verify_names_each_damage_up_to_a_limit(path: Path) -> None:
    region = region_path(path)
    flip(region.with_suffix(".slots"), 3 * PAGE_BYTES + 5)
    flip(region.with_suffix(".slots"), 7 * PAGE_BYTES)
    flip(region.with_suffix(".table"), 4096 + 64 * 5 + 20)
    document = run_json("verify", path)
    assert document["exit_code"] == 1
    findings = document["regions"][0]["findings"]
    assert {(entry["kind"], entry["slot"]) for entry in findings} == {("payload", 3), ("payload", 7), ("record", 5)}
    assert document["regions"][0]["num_intact"] == 9
    code, text = run("verify", path, "--lines", "2")
    assert code == 1
    assert len(re.findall(r"slot \d", text)) == 2
    assert "1 more damages are not printed" in text


def test_verify_of_a_truncated_table(path: Path) -> None:
    os.truncate(region_path(path).with_suffix(".table"), 4096 + 64 * 4 + 10)
    document = run_json("verify", path)
    assert document["exit_code"] == 1
    assert [finding["kind"] for finding in document["regions"][0]["findings"]] == ["short_table"]
    assert document["regions"][0]["num_intact"] == 4
    os.truncate(region_path(path).with_suffix(".table"), 0)
    code, text = run("verify", path)
    assert code == 1
    assert "neither a header nor a record holds" in text


def test_verify_reads_entries_under_a_damaged_header(path: Path) -> None:
    flip(region_path(path).with_suffix(".table"), 50)
    document = run_json("verify", path)
    assert document["exit_code"] == 1
    assert [finding["kind"] for finding in document["regions"][0]["findings"]] == ["header"]
    assert document["regions"][0]["num_intact"] == 12
    assert run_json("repair", path)["exit_code"] == 0
    assert run_json("verify", path)["exit_code"] == 0


def test_verify_keeps_to_its_rate(path: Path) -> None:
    begin = time.monotonic()
    assert run("verify", path, "--rate", "200kB")[0] == 0
    assert time.monotonic() - begin >= 12 * PAGE_BYTES / 200e3


@pytest.mark.parametrize("rate", ["0", "20%", "-5", "fast", "5 parsecs"])
def test_a_bad_rate_names_what_is_allowed(rate: str, path: Path) -> None:
    code, output = run("verify", path, f"--rate={rate}")
    assert code == 2
    assert f"--rate {rate!r}: allowed are bytes per second from 1 on" in output


WRITER = """
import sys
from pathlib import Path
from store_pages import Pages
pages = Pages(Path(sys.argv[1]))
print("ready", flush=True)
first = 1000
while True:
    pages.put(first, first + 10)
    first += 10
"""


def test_verify_beside_a_process_that_overwrites_slots_is_clean(path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        num_moved, num_rounds = 0, 0
        while num_moved == 0 or num_rounds < 20:
            num_rounds += 1
            document = run_json("verify", path)
            assert document["exit_code"] == 0, document
            num_moved += document["regions"][0]["num_moved"]
        assert run_json("inspect", path)["namespaces"][0]["regions"][0]["process_id"] == writer.pid
    finally:
        writer.kill()
        writer.communicate()
    assert run_json("verify", path)["exit_code"] == 0, "a writer that was killed leaves nothing damaged"


# ---------------------------------------------------------------- repair


def test_repair_drops_what_is_damaged_and_nothing_else(path: Path) -> None:
    region = region_path(path)
    flip(region.with_suffix(".slots"), 3 * PAGE_BYTES + 5)
    flip(region.with_suffix(".table"), 4096 + 64 * 5 + 20)
    before = files_of(path)
    document = run_json("repair", path, "--dry-run")
    assert document["exit_code"] == 1
    assert files_of(path) == before
    document = run_json("repair", path)
    assert (document["exit_code"], document["regions"][0]["num_repaired"]) == (0, 2)
    assert run_json("verify", path)["exit_code"] == 0
    with Pages(path) as pages:
        assert pages.get(0, 8) == [0, 1, 2, 4, 6, 7]
        assert pages.get(100, 104) == [100, 101, 102, 103]


def test_repair_refuses_a_region_with_a_writer_by_its_process(path: Path) -> None:
    with Pages(path):
        flip(region_path(path).with_suffix(".slots"), 5)
        before = files_of(region_path(path).parent)
        code, text = run("repair", path)
        assert code == 1
        assert f"not repaired: process {os.getpid()} writes it" in text
        assert files_of(region_path(path).parent) == before


def test_repair_removes_orphans_only(path: Path) -> None:
    directory = region_path(path).parent
    kept = files_of(path)
    for name in ("region-007.slots", "region-008.table", "namespace.json.tmp"):
        (directory / name).touch()
    (path / "v1" / ("a" * 32)).mkdir()
    code, text = run("repair", path, "--dry-run")
    assert code == 1
    assert text.count("would be removed") == 4
    document = run_json("repair", path)
    assert (document["exit_code"], len(document["orphans"])) == (0, 4)
    assert files_of(path) == kept
    assert not (path / "v1" / ("a" * 32)).exists()


# ---------------------------------------------------------------- clear


def test_clear_by_namespace(path: Path) -> None:
    with Pages(path, identity={"model": "other"}) as pages:
        pages.put(0, 3)
        other = pages.namespace.hex()[:32]
    assert run("clear", path, "--namespace", other[:6], "--dry-run")[0] == 0
    assert len(run_json("inspect", path)["namespaces"]) == 2
    document = run_json("clear", path, "--namespace", other[:6])
    assert (document["exit_code"], len(document["regions"])) == (0, 1)
    (left,) = run_json("inspect", path)["namespaces"]
    assert left["identity"] == IDENTITY
    assert not (path / "v1" / other).exists()


def test_clear_by_age(path: Path) -> None:
    assert run_json("clear", path, "--older-than", "1h")["regions"] == []
    for file in region_path(path).parent.glob("region-000.*"):
        os.utime(file, (time.time() - 7300,) * 2)
    assert len(run_json("clear", path, "--older-than", "2h")["regions"]) == 1
    assert run_json("inspect", path)["namespaces"] == []
    with Pages(path) as pages:
        assert pages.put(0, 3) == 3


def test_clear_leaves_a_region_with_a_writer_and_names_the_way(path: Path) -> None:
    with Pages(path) as pages:
        code, text = run("clear", path, "--all")
        assert code == 1
        assert f"process {os.getpid()} writes it: the way there is POST /hicache/storage-backend/clear" in text
        assert pages.get(0, 8) == list(range(8))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "allowed is either --all"),
        (["--all", "--namespace", "ab"], "allowed is either --all"),
        (["--older-than", "7"], "--older-than '7': allowed is a number with a unit"),
        (["--namespace", "xyz"], "--namespace 'xyz': allowed are 1 to 32 hex digits"),
        (["--namespace", "0" * 32], "no namespace begins with it"),
    ],
)
def test_clear_wants_to_know_exactly_what(arguments: list[str], text: str, path: Path) -> None:
    before = files_of(path)
    code, output = run("clear", path, *arguments)
    assert code == 2
    assert text in output
    assert files_of(path) == before


# ---------------------------------------------------------------- metrics


def test_export_metrics_is_the_text_format_of_prometheus(path: Path) -> None:
    code, text = run("export-metrics", path)
    assert code == 0
    names = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            names.add(line.split()[2])
        elif not line.startswith("# HELP "):
            found = re.fullmatch(r'(tpusync_store_[a-z_]+)\{([a-z_]+="[^"]*",?)+\} (-?[0-9.e+-]+)', line)
            assert found, line
            assert found[1] in names, "a sample comes after its type"
    assert 'tpusync_store_region_entries{namespace="' in text
    assert re.search(r"^tpusync_store_region_entries\{.*\} 12$", text, re.MULTILINE)
    assert re.search(r"^tpusync_store_region_writers\{.*\} 0$", text, re.MULTILINE)
    used = json.loads(run("inspect", path, "--json")[1])["used_bytes"]
    assert f"}} {used}\n" in text
