"""SGLang's prefill/decode disaggregation on this package's transport: `--disaggregation-transfer-backend tpusync`."""

from __future__ import annotations

from typing import Any

__all__ = ["kv_class"]


def kv_class(kind: str) -> Any:
    """The class for SGLang's KVClassType `kind`: manager, sender, receiver or bootstrap_server; None for another."""
    from sglang_tpusync.disagg import conn

    return {
        "manager": conn.TpuSyncKVManager,
        "sender": conn.TpuSyncKVSender,
        "receiver": conn.TpuSyncKVReceiver,
        "bootstrap_server": conn.TpuSyncKVBootstrapServer,
    }.get(kind)
