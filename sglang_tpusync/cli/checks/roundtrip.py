"""One page, end to end: written by the real store on the real disk, read back, compared, also after a reopen."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sglang_tpusync.cli.checks.result import Result
from sglang_tpusync.config import Options
from sglang_tpusync.errors import TpuSyncError

if TYPE_CHECKING:
    from sglang_tpusync._core import FlashStore, Ticket

__all__ = ["check_roundtrip"]

_PAGE_BYTES = 2 << 20
_CAPACITY_BYTES = 16 << 20
_TIMEOUT_S = 30.0


class _Mismatch(TpuSyncError):
    """What came back is not what was written."""


def check_roundtrip(path: Path, options: Options) -> Result:
    """Uses a store of its own in a scratch directory beside the regions of `path`, and removes it."""
    started = time.perf_counter()
    try:
        with _scratch(path) as directory:
            details = _write_and_read(directory, options)
    except (TpuSyncError, OSError, ImportError) as error:
        return Result(
            name="end to end",
            status="failed",
            finding=f"{type(error).__name__}: {error}",
            remedy="the store cannot be used here until this is resolved",
        )
    elapsed_ms = 1000 * (time.perf_counter() - started)
    finding = f"a page of {_PAGE_BYTES >> 20} MiB was written, read back and compared, twice, in {elapsed_ms:.0f} ms"
    return Result(name="end to end", status="ok", finding=finding, details=details)


@contextlib.contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """A directory on the same file system that leaves nothing behind, not even a `path` that was not there."""
    made = [parent for parent in (path, *path.parents) if not parent.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=".doctor-", dir=path))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()


def _write_and_read(directory: Path, options: Options) -> dict[str, object]:
    namespace, key = os.urandom(32), os.urandom(32)
    written = np.frombuffer(os.urandom(_PAGE_BYTES), dtype=np.uint8).copy()
    with contextlib.closing(_open(directory, namespace, options)) as store:
        write_s = _timed(lambda: _transfer(store.submit_put, key, written))
        if store.match(key, b"") != 1:
            raise _Mismatch("the page that was written is not found")
        read_s = _timed(lambda: _read_and_compare(store, key, written))
        io = store.stats()["io_engine"]
    with contextlib.closing(_open(directory, namespace, options)) as store:
        _read_and_compare(store, key, written)
    return {
        "page_bytes": _PAGE_BYTES,
        "write_ms": round(1000 * write_s, 3),
        "read_ms": round(1000 * read_s, 3),
        "io": io,
    }


def _open(directory: Path, namespace: bytes, options: Options) -> FlashStore:
    from sglang_tpusync._core import FlashStore

    return FlashStore(
        path=str(directory),
        namespace=namespace,
        namespace_json='{"scratch": "doctor"}',
        page_bytes=_PAGE_BYTES,
        capacity_bytes=_CAPACITY_BYTES,
        floor_bytes=0,
        write_budget_bytes_per_day=_CAPACITY_BYTES,
        fsync=options.fsync,
        io=options.io,
        num_threads=1,
        allow_tmpfs=options.allow_tmpfs,
    )


def _read_and_compare(store: FlashStore, key: bytes, written: NDArray[np.uint8]) -> None:
    read = np.zeros_like(written)
    _transfer(store.submit_get, key, read)
    if not np.array_equal(read, written):
        raise _Mismatch(f"{int((read != written).sum())} of {written.size} bytes came back different")


def _transfer(submit: Callable[..., Ticket], key: bytes, buffer: NDArray[np.uint8]) -> None:
    from sglang_tpusync._core import OUTCOME_NAMES

    addresses = np.array([[buffer.ctypes.data]], dtype=np.uint64)
    lengths = np.array([buffer.nbytes], dtype=np.uint64)
    ticket = submit(key, b"", addresses, lengths, _TIMEOUT_S)
    if not ticket.wait(2 * _TIMEOUT_S):
        raise _Mismatch(f"not done after {2 * _TIMEOUT_S:.0f} s")
    outcome = int(ticket.outcomes()[0])
    if outcome != 0:
        raise _Mismatch(
            f"outcome {OUTCOME_NAMES[outcome]!r} instead of 'ok'" + (f": {ticket.error()}" if ticket.error() else "")
        )


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
