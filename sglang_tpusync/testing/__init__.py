"""Support for tests, shipped to users: a real SGLang server on a host without an accelerator.

    cpu_engine   the environment and the arguments of such a server; the part that runs inside it
    attention    prefix-aware attention for SGLang's torch_native backend
    models       two models that need no download
    server       a server process: start, ask, kill
    shims        a directory for PYTHONPATH: what SGLang's CPU engine imports and no index carries

Nothing here acts unless it is asked for by name, and nothing in production imports it.
"""

from __future__ import annotations

__all__: list[str] = []
