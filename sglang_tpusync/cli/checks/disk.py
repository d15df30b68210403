"""The directory of the store: what it lies on, how much may be used, and what the kernel offers there."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
import tempfile
from pathlib import Path

from sglang_tpusync.bench.host import file_system_of
from sglang_tpusync.cli.checks.result import Result
from sglang_tpusync.config import Options, size_in_bytes
from sglang_tpusync.errors import ConfigError

__all__ = ["check_disk", "nearest_existing"]

_STORE = "v1"  # what the store makes in its directory, see docs/formats/
_DEFAULT_SHARE = 5  # one part in five, of what is free and of the file system
_DEFAULT_CAPACITY_BYTES = 200 * 10**9
_ALIGNMENT_BYTES = 4096
_IO_URING_SETUP = 425  # the same number on every architecture


def check_disk(path: Path, options: Options) -> list[Result]:
    directory = _directory(path, options)
    if directory.status == "failed":
        return [directory]
    return [directory, _space(path, options), _direct_io(path), _io_uring()]


def nearest_existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    while not path.exists():
        path = path.parent
    return path


def _directory(path: Path, options: Options) -> Result:
    place = nearest_existing(path)
    kind = file_system_of(place)
    details: dict[str, object] = {"path": str(path), "exists": path == place, "file_system": kind}

    def failed(finding: str, remedy: str) -> Result:
        return Result(name="directory", status="failed", finding=f"{path}: {finding}", details=details, remedy=remedy)

    if not place.is_dir():
        return failed(f"{place} is not a directory", "name a directory with the option 'path'")
    if not os.access(place, os.W_OK | os.X_OK):
        return failed(f"{place} cannot be written by this user", "change its owner or mode, or choose another 'path'")
    if path == place and place.stat().st_uid != os.geteuid():
        return failed(f"belongs to user {place.stat().st_uid}", "choose another 'path'")
    if kind in ("tmpfs", "ramfs") and not options.allow_tmpfs:
        return failed(f"lies on {kind}, which is memory", "choose a 'path' on a disk, or set 'allow_tmpfs'")
    inner = path / _STORE
    if inner.is_dir() and (mode := stat.S_IMODE(inner.stat().st_mode)) & 0o077:
        finding = f"other users may enter {inner} (mode {mode:04o})"
        return Result(name="directory", status="warning", finding=finding, details=details, remedy=f"chmod 700 {inner}")
    finding = f"{path} on {kind}" + ("" if path == place else "; it will be made")
    return Result(name="directory", status="ok", finding=finding, details=details)


def _space(path: Path, options: Options) -> Result:
    """The arithmetic of cap and floor, spelled out."""
    usage = os.statvfs(nearest_existing(path))
    total, free, held = usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize, _held_bytes(path / _STORE)
    try:
        capacity = size_in_bytes("capacity", options.capacity, total)
        floor = size_in_bytes("floor", options.floor, total)
    except ConfigError as error:
        return Result(name="space", status="failed", finding=str(error))
    capacity_text = "as configured"
    if capacity is None:
        capacity = min((free + held) // _DEFAULT_SHARE, _DEFAULT_CAPACITY_BYTES)
        capacity_text = f"the smaller of 20 % of ({_gb(free)} free + {_gb(held)} held here) and 200 GB"
    floor_text = "as configured" if floor is not None else f"20 % of the file system's {_gb(total)}"
    floor = floor if floor is not None else total // _DEFAULT_SHARE
    usable = max(0, min(capacity, free + held - floor))
    details: dict[str, object] = {
        "file_system_bytes": total,
        "free_bytes": free,
        "held_bytes": held,
        "capacity_bytes": capacity,
        "capacity_is": capacity_text,
        "floor_bytes": floor,
        "floor_is": floor_text,
        "usable_bytes": usable,
    }
    finding = (
        f"{_gb(usable)} usable: capacity {_gb(capacity)} ({capacity_text}); "
        f"{_gb(free)} free + {_gb(held)} held - floor {_gb(floor)} ({floor_text}) = {_gb(free + held - floor)}"
    )
    if usable == 0:
        remedy = "free some space, or set 'floor' and 'capacity'"
        return Result(name="space", status="failed", finding=finding, details=details, remedy=remedy)
    if capacity > total:
        remedy = f"'capacity' is larger than the file system ({_gb(total)})"
        return Result(name="space", status="failed", finding=finding, details=details, remedy=remedy)
    short = usable < capacity
    remedy_text = "the floor leaves less than the capacity" if short else None
    return Result(
        name="space", status="warning" if short else "ok", finding=finding, details=details, remedy=remedy_text
    )


def _direct_io(path: Path) -> Result:
    place = nearest_existing(path)
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".tpusync-doctor-") as file:
            reader = os.open(file.name, os.O_RDWR | os.O_DIRECT)
            try:
                with mmap.mmap(-1, _ALIGNMENT_BYTES) as buffer:
                    os.pwritev(reader, [buffer], 0)
            finally:
                os.close(reader)
    except OSError as error:
        reason = errno.errorcode.get(error.errno or 0, str(error))
        finding = f"not here ({reason}): reads and writes go through the page cache"
        return Result(name="O_DIRECT", status="note", finding=finding, details={"available": False})
    return Result(name="O_DIRECT", status="ok", finding="works here", details={"available": True})


def _io_uring() -> Result:
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(120)
    descriptor = libc.syscall(_IO_URING_SETUP, 1, parameters)
    if descriptor < 0:
        reason = errno.errorcode.get(ctypes.get_errno(), "refused")
        finding = f"not available ({reason}): pread and pwrite on threads are used"
        return Result(name="io_uring", status="note", finding=finding, details={"available": False})
    os.close(descriptor)
    return Result(name="io_uring", status="ok", finding="available", details={"available": True})


def _held_bytes(path: Path) -> int:
    """Bytes that the files of the directory occupy now."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return total


def _gb(size: int) -> str:
    return f"{size / 10**9:.1f} GB"
