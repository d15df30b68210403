"""Versions: ours, the native module's, and those of what we plug into."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform

from sglang_tpusync import __version__
from sglang_tpusync.cli.checks.result import Result

__all__ = ["check_software"]


def check_software() -> list[Result]:
    return [_python(), _core(), _sglang(), _torch()]


def _python() -> Result:
    details: dict[str, object] = {"python": platform.python_version(), "sglang_tpusync": __version__}
    return Result(
        name="package", status="ok", finding=f"{__version__} on Python {platform.python_version()}", details=details
    )


def _core() -> Result:
    try:
        core = importlib.import_module("sglang_tpusync._core")
    except ImportError as error:
        return Result(
            name="native core",
            status="failed",
            finding=f"does not load: {error}",
            remedy="install the wheel for this Python, or run scripts/build in a checkout",
        )
    return Result(name="native core", status="ok", finding=f"loads; keys of {core.KEY_BYTES} bytes")


def _sglang() -> Result:
    version = _version_of("sglang")
    if version is None:
        return Result(
            name="sglang",
            status="warning",
            finding="not installed: the store works, but there is nothing to plug into",
            remedy="pip install 'sglang-tpusync[sglang]'",
        )
    from sglang_tpusync.hooks import VERSIONS_TESTED

    details: dict[str, object] = {"version": version, "tested": list(VERSIONS_TESTED)}
    if version in VERSIONS_TESTED:
        return Result(name="sglang", status="ok", finding=f"{version}, a tested version", details=details)
    return Result(
        name="sglang",
        status="warning",
        finding=f"{version} was never tested; tested: {', '.join(VERSIONS_TESTED)}",
        details=details,
        remedy="it may well work: the hooks below are checked against what is installed",
    )


def _torch() -> Result:
    version = _version_of("torch")
    if version is None:
        return Result(name="torch", status="note", finding="not installed")
    return Result(name="torch", status="ok", finding=version, details={"version": version})


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
