"""`tpusync bench store`: the volume, the arms and the command; peers where an index has them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sglang_tpusync.bench.peers import LMCACHE, NIXL, Peer, interpreter_of
from sglang_tpusync.bench.report import read_report
from sglang_tpusync.bench.store.arms import Ours, open_peer
from sglang_tpusync.bench.store.volume import BATCH_PAGES, Volume, aligned
from sglang_tpusync.cli.main import app
from sglang_tpusync.errors import ConfigError, StorageError, UnsupportedError

runner = CliRunner()


def test_a_volume_is_whole_batches_of_bytes_that_do_not_repeat() -> None:
    volume = Volume.of(4096, 3 << 20)
    assert volume.num_bytes == 6 * BATCH_PAGES * 4096
    pages = volume.payload().reshape(volume.num_pages, 4096)
    assert len({page.tobytes() for page in pages}) == volume.num_pages
    assert pages.ctypes.data % 4096 == 0
    keys = {volume.keys(number, batch) for number in (0, 1) for batch in range(volume.num_batches)}
    assert len(keys) == 2 * volume.num_batches
    assert Volume.of(1 << 20, 1).num_pages == BATCH_PAGES


def test_our_arm_refuses_to_count_pages_that_are_not_there(tmp_path: Path) -> None:
    arm = Ours(Volume.of(4096, 1), tmp_path / "store", "threads")
    assert arm.write(1) > 0
    assert arm.read(1) > 0
    with pytest.raises(StorageError, match="128 of 128 pages"):
        arm.read(2)
    arm.drop(1)
    with pytest.raises(StorageError):
        arm.read(1)
    arm.close()


def test_the_command_writes_two_rows_a_size(tmp_path: Path) -> None:
    options = ["--pages", "64KiB", "--rounds", "1", "--peer", "none", "--path", str(tmp_path / "disk")]
    done = runner.invoke(app, ["bench", "store", *options, "--json", str(tmp_path / "rows.json")])
    assert done.exit_code in (0, 1), done.output  # whether this disk is quiet just now is not what is tested
    report = read_report(tmp_path / "rows.json")
    assert [row.case.split(" (")[0] for row in report.rows] == ["write 64 KiB pages", "read 64 KiB pages"]
    assert all(row.goal == 0.8 and row.limit_value and not row.peers for row in report.rows)
    assert not list((tmp_path / "disk").iterdir())
    assert str(tmp_path) not in json.dumps(report.host)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pages", "5000"], "--pages '5000': allowed are multiples of 4 KiB"),
        (["--pages", "128MiB"], "from 4 KiB to 64 MiB"),
        (["--peer", "redis"], "--peer 'redis': allowed are file, lmcache, nixl, none"),
        (["--io", "fast"], "--io 'fast': allowed are auto, uring, threads, buffered"),
    ],
)
def test_wrong_options_are_named(options: list[str], words: str) -> None:
    done = runner.invoke(app, ["bench", "store", *options])
    assert isinstance(done.exception, ConfigError)
    assert words in str(done.exception)


def test_a_peer_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    nothing = Peer(name="nothing", requirements=("sglang-tpusync-no-such-package==0",), probe="pass")
    with pytest.raises(UnsupportedError, match=r"nothing .*cannot be installed"):
        interpreter_of(nothing)
    broken = Peer(name="broken", requirements=(), probe="import no_such_module")
    monkeypatch.setattr(
        "sglang_tpusync.bench.peers._call", lambda peer, command: Path(command[-1]).mkdir(exist_ok=True)
    )
    with pytest.raises(UnsupportedError, match="does not run"):
        interpreter_of(broken)


@pytest.mark.peers
@pytest.mark.parametrize("name", ["file", "lmcache", "nixl"])
def test_a_peer_stores_what_it_is_given(name: str, tmp_path: Path) -> None:
    for peer in (NIXL, LMCACHE):
        if peer.name == name:
            try:
                interpreter_of(peer)
            except UnsupportedError as error:
                if "cannot be installed" not in str(error):  # what is there and does not run is a failure
                    raise
                pytest.skip(f"no index has it: {error}")
    arm = open_peer(name, Volume.of(4096, 1), tmp_path / name)
    assert arm.write(1) > 0
    assert arm.read(1) > 0
    arm.drop(1)
    arm.close()


def test_memory_is_aligned_for_direct_transfers() -> None:
    memory = aligned(5)
    assert (memory.ctypes.data % 4096, memory.nbytes, memory.dtype) == (0, 5, np.uint8)
