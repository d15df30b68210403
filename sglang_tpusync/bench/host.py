"""What a number depends on: the machine and the software, without names of hosts, users or directories."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from pathlib import Path

__all__ = ["describe_host", "file_system_of", "last_level_cache_bytes", "num_usable_cores"]

_PACKAGES = ("sglang-tpusync", "sglang", "torch", "numpy")


def describe_host(directory: Path | None = None, **settings: object) -> dict[str, object]:
    """The machine, the versions and, with a directory, its file system; `settings` are those of the run."""
    host: dict[str, object] = {
        "cpu": _cpu_model(),
        "cores": num_usable_cores(),
        "memory_bytes": _memory_bytes(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "kernel": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "versions": versions(),
    }
    if directory is not None:
        host["file_system"] = file_system_of(directory)
    if settings:
        host["settings"] = settings
    return host


def versions() -> dict[str, str]:
    """Versions of the packages that decide a result, those that are installed."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def num_usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def last_level_cache_bytes() -> int:
    """Size of the largest cache of core 0, 0 where the kernel does not say."""
    sizes = [_size_of(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=0)


def file_system_of(directory: Path) -> str:
    """Type of the file system that holds the directory (or its nearest existing parent), such as ext4."""
    place = directory.resolve()
    while not place.exists():
        place = place.parent
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        mount, mounted_kind = line.split()[1:3]
        mount = mount.replace("\\040", " ")
        if place.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, mounted_kind
    return kind


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _size_of(path: Path) -> int:
    text = path.read_text().strip()
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
    return int(text.rstrip("KMG") or 0) * unit
