"""Whether SGLang's settings name this package as the storage backend, by either route."""

from __future__ import annotations

import msgspec

from sglang_tpusync.config import BACKEND_NAME, as_mapping
from sglang_tpusync.errors import ConfigError

__all__ = ["Source", "options_source"]


class Source(msgspec.Struct, frozen=True):
    """The text that holds our options, as SGLang was given it."""

    text: str | None


def options_source(backend: str | None, extra_config: str | None) -> Source | None:
    """Where our options are if `backend` is this package, by name or through `dynamic`; else None."""
    if backend == BACKEND_NAME:
        return Source(extra_config)
    if backend == "dynamic" and extra_config and _module_path(extra_config).startswith("sglang_tpusync."):
        return Source(extra_config)
    return None


def _module_path(extra_config: str) -> str:
    try:
        return str(as_mapping(extra_config).get("module_path", ""))
    except ConfigError:
        return ""
