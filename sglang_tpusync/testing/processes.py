"""Process groups that leave nothing behind: every descendant carries a mark, and a guard outlives its maker.

maker ──pipe──▶ guard        on end of file (the maker closed it or died): SIGKILL to all that carry the mark
  └────────────▶ server ─▶ its workers, in sessions and groups of their own if they like
"""

from __future__ import annotations

__all__ = ["MarkedProcess", "free_port", "marked_pids"]

import contextlib
import os
import random
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
_PORT_MIN = 20000
_PORT_TRIES = 64


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listened on a moment ago, and that no connection will be given before it is used.

    A server takes half a minute until it binds its port. Below the range of ports that the kernel hands out by itself
    nobody comes by chance meanwhile; where there is no room below it, any free one has to do.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    below = range(_PORT_MIN, lowest)
    tries = random.SystemRandom().sample(below, min(_PORT_TRIES, len(below))) if len(below) >= _PORT_TRIES else []
    for port in (*tries, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    raise OSError(f"no port of {host} is free")


def marked_pids(mark: str, session: int | None = None) -> list[int]:
    """The living processes (no zombies) of this user in the session, or with the mark in their environment."""
    needle = f"{_MARK}={mark}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if _is_living_member(entry.path, needle, session):
                    found.append(int(entry.name))
    return sorted(found)


def _is_living_member(folder: str, needle: bytes, session: int | None) -> bool:
    state, _, _, of_session = Path(folder, "stat").read_text().rpartition(")")[2].split()[:4]
    if state in "ZX":
        return False
    return int(of_session) == session or needle in Path(folder, "environ").read_bytes().split(b"\0")


def kill_marked(mark: str, session: int | None = None, timeout_s: float = _KILL_TIMEOUT_S) -> None:
    """SIGKILL to every process that marked_pids finds, until there is none. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while pids := marked_pids(mark, session):
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
                    env={**env, _MARK: self._mark, "SPT_NOENV": "1"},  # setproctitle may not overwrite it
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except BaseException:
            self._release_guard()
            raise
        self._killed = False
        self._tell_guard(str(self._process.pid))

    @property
    def pid(self) -> int:
        return self._process.pid

    def pids(self) -> list[int]:
        return [] if self._killed else marked_pids(self._mark, self._process.pid)

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
        if self._killed:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)  # the whole group in one moment
        kill_marked(self._mark, self._process.pid)
        self._process.wait(_KILL_TIMEOUT_S)
        self._killed = True
        self._tell_guard(" done")
        self._release_guard()

    def _tell_guard(self, words: str) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(words.encode())
            self._guard.stdin.flush()

    def _release_guard(self) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait(_KILL_TIMEOUT_S)


def _guard(mark: str) -> None:
    """Reads the session, perhaps that all is done, and the end of file."""
    words = sys.stdin.read().split()
    if words[1:] != ["done"]:
        kill_marked(mark, int(words[0]) if words else None)


if __name__ == "__main__":
    _guard(sys.argv[1])
