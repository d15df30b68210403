"""What people most often take for a broken store, and is none."""

from __future__ import annotations

__all__ = ["REMINDERS"]

REMINDERS: tuple[str, ...] = (
    "--hicache-write-policy write_through_selective stores a prefix only at its second hit: one pass reaches no disk. "
    "The default, write_through, stores at once.",
    "A suffix shorter than prefetch_threshold (256 tokens) is never fetched from the store, and the last page of a "
    "prompt is always computed again.",
    "POST /flush_cache empties device and host DRAM, not the store: ask again afterwards to see a store hit in "
    "cached_tokens_details (needs --enable-cache-report for usage.cached_tokens).",
    "A host pool (--hicache-ratio, --hicache-size) smaller than the device pool starves the store: what cannot be "
    "staged is neither written nor read.",
    "Another model, revision, KV dtype, page size, layout or TP split is another namespace: its first pass misses.",
)
