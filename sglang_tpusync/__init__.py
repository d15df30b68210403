"""A memory hierarchy for SGLang: KV caches and weights in HBM, host DRAM, SSD and on other hosts."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
