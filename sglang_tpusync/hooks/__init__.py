"""Every change that this package makes to SGLang, as data. docs/upstream.md lists the same hooks; a test keeps both
in step.
"""

from __future__ import annotations

from sglang_tpusync.hooks import copies, name, transfer, weights
from sglang_tpusync.hooks.hook import Hook, Hooks, Need, sglang_version

__all__ = ["ALL", "VERSIONS_TESTED", "Hook", "Hooks", "Need", "hooks", "sglang_version"]

VERSIONS_TESTED = ("0.5.23",)

ALL: tuple[Hook, ...] = (*name.HOOKS, *copies.HOOKS, *weights.HOOKS, *transfer.HOOKS)

hooks = Hooks(ALL, versions_tested=VERSIONS_TESTED)  # of this process: what is loaded is the process's
