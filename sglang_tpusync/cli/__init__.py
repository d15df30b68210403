"""The `tpusync` command. Modules here are light: each command imports what it needs when it runs."""

from __future__ import annotations

__all__: list[str] = []
