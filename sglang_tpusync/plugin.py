"""The entry point of this package in SGLang's plugin group `sglang.srt.plugins`.

SGLang calls `activate` once in each of its processes, before it parses arguments. It arms the hooks (hooks/), which
wait for their modules: a process that does not use the name `tpusync` imports no module of SGLang because of this
package.
"""

from __future__ import annotations

import functools
import itertools
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_tpusync.config import BACKEND_NAME, read_environment, read_options, store_path
from sglang_tpusync.errors import HookError
from sglang_tpusync.hooks import VERSIONS_TESTED, hooks, sglang_version

__all__ = ["activate", "check_transfer", "check_use", "named_on", "warn_if_untested"]

logger = logging.getLogger("sglang_tpusync")

_FLAGS = ("--hicache-storage-backend", "--disaggregation-transfer-backend")


def activate() -> None:
    """Arms the hooks of this process, and those of the CPU engine support where TPUSYNC_CPU_ENGINE=1.

    SGLang swallows what a plugin raises. So a command line that uses our name, and hooks that do not let it be
    used, end the process here with a SystemExit that says which.
    """
    hooks.arm()
    if read_environment().cpu_engine:
        from sglang_tpusync.testing import cpu_engine

        cpu_engine.activate()
    if named_on(sys.argv):
        try:
            hooks.require("cli")
        except HookError as error:
            raise SystemExit(f"sglang_tpusync: {error}") from error


def named_on(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for a backend of ours by name."""
    pairs = list(itertools.pairwise(arguments))
    return any(f"{flag}={BACKEND_NAME}" in arguments or (flag, BACKEND_NAME) in pairs for flag in _FLAGS)


def check_use(options: Mapping[str, Any] | str | None) -> None:
    """To be called where the name is used: raises ConfigError for wrong options, warns of an SGLang that is not
    tested.
    """
    store_path(read_options(options))
    warn_if_untested()


def check_transfer() -> None:
    """To be called where the name is used for KV transfer: raises HookError, ConfigError."""
    hooks.require("transfer")
    read_options(None)
    warn_if_untested()


@functools.cache
def warn_if_untested() -> None:
    """Says once in a process that its SGLang is of a version that this package was not tested with."""
    version = sglang_version()
    if version not in VERSIONS_TESTED:
        logger.warning(
            "SGLang %s is no version that sglang-tpusync was tested with (%s); each hook is checked as it applies",
            version,
            ", ".join(VERSIONS_TESTED),
        )
