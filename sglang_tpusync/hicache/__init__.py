"""SGLang's HiCache on this package: the storage backend, its identity, host pools with native copies.

`sglang_tpusync.hicache.TpuSyncStorage` is the name that users write into SGLang's options; it never moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_tpusync.hicache.storage import TpuSyncStorage

__all__ = ["TpuSyncStorage"]


def __getattr__(name: str) -> Any:
    """Loads the class, and with it torch and SGLang, when it is asked for."""
    if name == "TpuSyncStorage":
        from sglang_tpusync.hicache.storage import TpuSyncStorage

        return TpuSyncStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
