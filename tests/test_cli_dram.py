"""DRAM regions as the commands on a store show, check and clear them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from store_pages import Pages
from test_cli_store import run, run_json
from test_host_region import NAMESPACE, open_region, page_of, put

PAGE_BYTES = 12288


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with Pages(tmp_path / "store"):
        pass
    return tmp_path / "store"


def of_dram(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [report for report in document["regions"] if report["base_path"].endswith(".region")]


def test_inspect_shows_regions_with_and_without_a_writer(store: Path, tmp_path: Path) -> None:
    region = open_region(tmp_path / "dram")
    put(region, 1, 2, 3)
    document = run_json("inspect", store, "--dram-path", tmp_path / "dram")
    (shown,) = document["dram"]["regions"]
    assert (shown["num_pages"], shown["num_slots"], shown["page_bytes"]) == (3, 8, PAGE_BYTES)
    assert (shown["has_writer"], shown["process_id"], shown["namespace"]) == (True, os.getpid(), NAMESPACE.hex())
    assert shown["memory_bytes"] >= 3 * PAGE_BYTES
    code, text = run("inspect", store, "--dram-path", tmp_path / "dram")
    assert code == 0
    for part in (f"written by process {os.getpid()}", "3 of 8 slots hold a page of 12.3 kB", "of memory"):
        assert part in text, part
    del region
    assert "no writer, last process" in run("inspect", store, "--dram-path", tmp_path / "dram")[1]


def test_no_directory_is_no_region(store: Path, tmp_path: Path) -> None:
    document = run_json("inspect", store, "--dram-path", tmp_path / "nowhere")
    assert document["dram"]["regions"] == []
    assert not (tmp_path / "nowhere").exists()


def test_verify_finds_a_flipped_byte_beside_the_writer(store: Path, tmp_path: Path) -> None:
    region = open_region(tmp_path / "dram")
    slots = put(region, 1, 2, 3)
    clean = run_json("verify", store, "--dram-path", tmp_path / "dram")
    (report,) = of_dram(clean)
    assert (clean["exit_code"], report["num_intact"], report["findings"]) == (0, 3, [])
    page_of(region, int(slots[1]))[1][100] ^= 1
    code, text = run("verify", store, "--dram-path", tmp_path / "dram")
    assert code == 1
    assert f"slot {slots[1]}: its page is not what was sealed" in text
    assert "1 damages, 2 pages are whole" in text


def test_a_file_that_is_no_region_is_damage(store: Path, tmp_path: Path) -> None:
    region = open_region(tmp_path / "dram")
    put(region, 1)
    (tmp_path / "dram" / f"{'ab' * 32}-0.region").write_bytes(b"x" * 100)
    assert run("inspect", store, "--dram-path", tmp_path / "dram")[0] == 1
    document = run_json("verify", store, "--dram-path", tmp_path / "dram")
    assert document["exit_code"] == 1
    assert sorted(report["num_intact"] for report in of_dram(document)) == [0, 1]


def test_clear_of_dram_leaves_the_store(store: Path, tmp_path: Path) -> None:
    dram = tmp_path / "dram"
    dead, live = open_region(dram), open_region(dram)
    path = live.path
    del dead
    assert run("clear", "--dram", "--dram-path", dram, "--all", "--dry-run")[0] == 1
    assert len(list(dram.iterdir())) == 2
    document = run_json("clear", "--dram", "--dram-path", dram, "--namespace", NAMESPACE.hex()[:8])
    assert document["exit_code"] == 1
    assert [bool(removal["refused"]) for removal in document["regions"]] == [False, True]
    assert [str(file) for file in dram.iterdir()] == [path]
    assert run("clear", store, "--dram", "--all")[0] == 2
    assert "no namespace begins with it" in run("clear", "--dram", "--dram-path", dram, "--namespace", "ff")[1]


def test_a_directory_that_others_may_read_is_refused(store: Path, tmp_path: Path) -> None:
    (tmp_path / "dram").mkdir()
    (tmp_path / "dram").chmod(0o755)
    code, text = run("inspect", store, "--dram-path", tmp_path / "dram")
    assert code == 2
    assert "chmod it to 700" in text
