"""Whoever stores pages: our store, fio (the limit), and peers behind a process of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sglang_tpusync.bench.peers import LMCACHE, NIXL, interpreter_of
from sglang_tpusync.bench.store.volume import BATCH_PAGES, Volume, aligned
from sglang_tpusync.errors import StorageError, UnsupportedError

__all__ = ["DEPTH", "Arm", "Fio", "Ours", "PeerArm", "open_peer"]

DEPTH = 32  # of fio's queue
_WORKER = Path(__file__).with_name("peer_worker.py")


class Arm(Protocol):
    """Every call is one round: the same volume under new keys. Times in seconds."""

    def write(self, round_number: int) -> float: ...
    def read(self, round_number: int) -> float: ...  # cold, and checked after the clock has stopped
    def drop(self, round_number: int) -> None: ...  # not timed
    def close(self) -> None: ...


class Ours:
    """Our store, one batch after the other as SGLang gives them."""

    def __init__(self, volume: Volume, directory: Path, io: str) -> None:
        from sglang_tpusync import _core

        room = 2 * volume.num_bytes + (64 << 20)
        self._volume = volume
        self._source, self._target = volume.payload(), aligned(volume.num_bytes)
        self._store: Any = _core.FlashStore(
            path=str(directory),
            namespace=bytes(32),
            namespace_json="{}",
            page_bytes=volume.page_bytes,
            capacity_bytes=room,
            floor_bytes=0,
            write_budget_bytes_per_day=1 << 60,
            io=io,  # type: ignore[arg-type]
            memory=[(memory.ctypes.data, memory.nbytes) for memory in (self._source, self._target)],
        )
        self._lengths = np.array([volume.page_bytes], dtype=np.uint64)

    @property
    def engine(self) -> str:
        return str(self._store.stats()["io_engine"])

    def _addresses(self, base: int, batch: int) -> Any:
        first = base + batch * BATCH_PAGES * self._volume.page_bytes
        pages = np.arange(BATCH_PAGES, dtype=np.uint64) * np.uint64(self._volume.page_bytes)
        return (pages + np.uint64(first)).reshape(BATCH_PAGES, 1)

    def _run(self, submit: Any, memory: Any, round_number: int) -> float:
        batches = [
            (self._volume.keys(round_number, batch), self._addresses(memory.ctypes.data, batch))
            for batch in range(self._volume.num_batches)
        ]
        failed = 0
        begin = time.perf_counter()
        for keys, addresses in batches:
            ticket = submit(keys, b"", addresses, self._lengths)
            ticket.wait()
            failed += int(np.count_nonzero(ticket.outcomes()))
        seconds = time.perf_counter() - begin
        if failed:
            raise StorageError(
                f"{failed} of {self._volume.num_pages} pages were refused or missed: {self._store.stats()}"
            )
        return seconds

    def write(self, round_number: int) -> float:
        return self._run(self._store.submit_put, self._source, round_number)

    def read(self, round_number: int) -> float:
        self._target.fill(0)
        seconds = self._run(self._store.submit_get, self._target, round_number)
        if not np.array_equal(self._source, self._target):
            raise StorageError("what was read is not what was written")
        return seconds

    def drop(self, round_number: int) -> None:
        self._store.clear()

    def close(self) -> None:
        self._store.close()


class Fio:
    """The disk's own speed: one file, transfers of one page each, O_DIRECT through io_uring."""

    def __init__(self, volume: Volume, directory: Path) -> None:
        if shutil.which("fio") is None:
            raise UnsupportedError("fio is needed: it measures the limit. apt-get install fio")
        directory.mkdir(parents=True)
        self._volume, self._file = volume, directory / "fio"

    def _run(self, operation: str) -> float:
        options = {
            "name": "limit", "filename": self._file, "rw": operation, "bs": self._volume.page_bytes,
            "size": self._volume.num_bytes, "iodepth": DEPTH, "ioengine": "io_uring", "direct": 1, "thread": 1,
            "output-format": "json", "fallocate": "posix", "randrepeat": 1,
        }  # fmt: skip
        done = subprocess.run(
            ["fio", *(f"--{name}={value}" for name, value in options.items())],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise UnsupportedError(f"fio failed: {done.stderr.strip().splitlines()[-1:]}")
        job = json.loads(done.stdout)["jobs"][0][operation]
        return float(self._volume.num_bytes) / float(job["bw_bytes"])

    def write(self, round_number: int) -> float:
        return self._run("write")

    def read(self, round_number: int) -> float:
        return self._run("read")

    def drop(self, round_number: int) -> None:
        """The next round writes over the file."""

    def close(self) -> None:
        self._file.unlink(missing_ok=True)


class PeerArm:
    """Somebody else's store in a process of its own (peer_worker.py), asked over its standard streams."""

    def __init__(self, kind: str, python: Path, volume: Volume, directory: Path, *, direct: bool) -> None:
        directory.mkdir(parents=True)
        self._directory, self._direct = directory, direct
        plan = {
            "kind": kind, "directory": str(directory), "page_bytes": volume.page_bytes, "num_pages": volume.num_pages,
            "batch_pages": BATCH_PAGES, "direct": direct,
        }  # fmt: skip
        self._log = (directory.parent / f"{directory.name}.log").open("w+")
        from sglang_tpusync.testing.cpu_engine import environment

        self._process = subprocess.Popen(
            [python, _WORKER, json.dumps(plan)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=environment() if kind == "file" else None,
        )  # fmt: skip
        self._answer()

    def _ask(self, what: str, round_number: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, "round": round_number}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return float(json.loads(line)["seconds"])
        self._log.seek(0)
        raise UnsupportedError(f"the peer ended: {self._log.read().strip().splitlines()[-1:]}")

    def write(self, round_number: int) -> float:
        """Until the bytes are on the disk, as they are for whoever writes with O_DIRECT."""
        seconds = self._ask("write", round_number)
        begin = time.perf_counter()
        if not self._direct:
            _sync(self._directory)
        return seconds + time.perf_counter() - begin

    def read(self, round_number: int) -> float:
        if not self._direct:
            _forget(self._directory)
        return self._ask("read", round_number)

    def drop(self, round_number: int) -> None:
        self._ask("drop", round_number)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=60)
        self._log.close()


def open_peer(name: str, volume: Volume, directory: Path) -> PeerArm:
    """`file` (SGLang's), `lmcache` or `nixl`. Raises UnsupportedError where it cannot be installed or started."""
    if name == "file":
        return PeerArm("file", Path(sys.executable), volume, directory, direct=False)
    if name == "lmcache":
        return PeerArm("lmcache", interpreter_of(LMCACHE), volume, directory, direct=True)
    return PeerArm("nixl", interpreter_of(NIXL), volume, directory, direct=True)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
        os.sync()
    finally:
        os.close(handle)


def _forget(directory: Path) -> None:
    """Puts every file out of the page cache."""
    for file in directory.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)
