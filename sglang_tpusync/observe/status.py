"""Status files: one per store that a process has open, in memory, written anew once a second.

A file is whole or absent (written under another name first), and counts as long as its process lives. Nothing here
raises into the process that is described, and a reader believes nothing that it has not checked.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from sglang_tpusync.errors import StorageError

__all__ = ["Status", "StatusWriter", "Statuses", "read_statuses"]

logger = logging.getLogger("sglang_tpusync")

VERSION = 1
_PERIOD_S = 1.0
_BYTES_MAX = 1 << 16
_SUFFIX = ".status.json"
_numbers = itertools.count()


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """One open store of one process. Counters only grow; names end in their unit."""

    version: int
    process_id: int
    process_started: int  # clock ticks since the machine started: with the number it names a process
    unix_ns: int  # when this was written
    namespace: str  # hex
    store: str  # directory
    region: str | None  # file of the DRAM region
    stats: dict[str, int | float | str]


class Statuses(msgspec.Struct, frozen=True, kw_only=True):
    """What a directory holds: files of living processes, and names of files that are no status, with the reason."""

    path: str
    unix_ns: int
    found: list[Status]
    trouble: list[str]


class StatusWriter:
    """Keeps one file up to date from a daemon thread until close(). `describe` is called there; what it raises is
    logged once and ends the file.
    """

    def __init__(
        self, directory: Path, describe: Callable[[], tuple[str, str, str | None, dict[str, int | float | str]]]
    ):
        """`describe` answers namespace, store, region and counters."""
        self._directory = directory
        self._describe = describe
        self._file = directory / f"{os.getpid()}-{next(_numbers)}{_SUFFIX}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tpusync-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent. Returns when the file is gone."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            _make_private(self._directory)
            _remove_files_of_the_dead(self._directory)
            self._write()
            while not self._ended.wait(_PERIOD_S):
                self._write()
        except Exception as error:
            logger.warning("`tpusync top` does not show this store from here on: %s: %s", type(error).__name__, error)
        finally:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)

    def _write(self) -> None:
        namespace, store, region, stats = self._describe()
        started = _started(os.getpid())
        if started is None:
            raise OSError("/proc does not know this process")
        status = Status(
            version=VERSION, process_id=os.getpid(), process_started=started, unix_ns=time.time_ns(),
            namespace=namespace, store=store, region=region, stats=stats,
        )  # fmt: skip
        unfinished = self._file.with_suffix(".new")
        unfinished.write_bytes(msgspec.json.encode(status))
        unfinished.replace(self._file)


def read_statuses(directory: Path) -> Statuses:
    """Raises StorageError for a directory that others may write. One that is not there holds nothing."""
    found: list[Status] = []
    trouble: list[str] = []
    if directory.exists():
        _check_private(directory)
        for file in sorted(directory.glob(f"*{_SUFFIX}")):
            try:
                status = _read(file)
            except FileNotFoundError:  # its process has just ended
                continue
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                trouble.append(f"{file.name}: {error}")
                continue
            if _is_alive(status):
                found.append(status)
    return Statuses(path=str(directory), unix_ns=time.time_ns(), found=found, trouble=trouble)


def _read(file: Path) -> Status:
    with file.open("rb") as stream:
        data = stream.read(_BYTES_MAX + 1)
    if len(data) > _BYTES_MAX:
        raise ValueError(f"larger than {_BYTES_MAX} bytes")
    status = msgspec.json.decode(data, type=Status)
    if status.version != VERSION:
        raise ValueError(f"version {status.version}, this program reads {VERSION}")
    if not file.name.startswith(f"{status.process_id}-"):
        raise ValueError(f"says that it is of process {status.process_id}")
    return status


def _is_alive(status: Status) -> bool:
    return status.process_id > 0 and _started(status.process_id) == status.process_started


def _started(process_id: int) -> int | None:
    """None: there is no such process, or it has ended and waits for its parent."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, exist_ok=True)
    _check_private(directory)


def _check_private(directory: Path) -> None:
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise StorageError(
            f"{directory}: allowed is a directory that belongs to user {os.getuid()} and only they write"
        )


def _remove_files_of_the_dead(directory: Path) -> None:
    for file in directory.iterdir():
        number = file.name.partition("-")[0]
        if number.isdecimal() and _started(int(number)) is None:
            file.unlink(missing_ok=True)
