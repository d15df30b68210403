"""Process groups that leave nothing behind: every descendant carries a mark, and a guard outlives its maker.

maker ──pipe──▶ guard        on end of file (the maker closed it or died): SIGKILL to all that carry the mark
  └────────────▶ server ─▶ its workers, in sessions and groups of their own if they like
"""

from __future__ import annotations

__all__ = ["MarkedProcess", "free_port", "marked_pids"]

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

_MARK = "TPUSYNC_PROCESS_MARK"
_KILL_TIMEOUT_S = 30.0


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def marked_pids(mark: str) -> list[int]:
    """The living processes (no zombies) of this user whose environment carries the mark."""
    needle = f"{_MARK}={mark}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return sorted(found)


def kill_marked(mark: str, timeout_s: float = _KILL_TIMEOUT_S) -> None:
    """SIGKILL to every process with the mark, until there is none. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while pids := marked_pids(mark):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            _wait_gone(pid, deadline)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {pids} survived SIGKILL for {timeout_s:.0f} s")


def _wait_gone(pid: int, deadline: float) -> None:
    """Until the process has ended; a zombie has, whether or not anybody collects it."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(handle)


class MarkedProcess:
    """A command with its output in a file, its descendants, and the guard. Thread-compatible."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], log_path: Path) -> None:
        self._mark = uuid.uuid4().hex
        # The guard must be there first and must not carry the mark itself.
        guard = [sys.executable, "-S", "-E", __file__, self._mark]
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
        try:
            with open(log_path, "ab") as log:
                self._process = subprocess.Popen(
                    command,
                    env={**env, _MARK: self._mark},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except BaseException:
            self._release_guard()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def pids(self) -> list[int]:
        return marked_pids(self._mark)

    def returncode(self) -> int | None:
        """None while the command runs; negative: the signal that ended it."""
        return self._process.poll()

    def interrupt(self, timeout_s: float) -> bool:
        """Asks the command to end (SIGTERM); answers whether it did in time."""
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL to the command and every descendant; returns when all are gone. May be called twice."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)  # the whole session's group in one moment
        kill_marked(self._mark)
        self._process.wait(_KILL_TIMEOUT_S)
        self._release_guard()

    def _release_guard(self) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait(_KILL_TIMEOUT_S)


def _guard(mark: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    kill_marked(mark)


if __name__ == "__main__":
    _guard(sys.argv[1])
