"""The journal of what a backend acknowledged (journal_storage.py writes it): a key in hexadecimal per line."""

from __future__ import annotations

from pathlib import Path

__all__ = ["LINE_BYTES", "journal_of", "num_acknowledged", "read_journal"]

LINE_BYTES = 65


def journal_of(store: Path) -> Path:
    """Beside the store's directory."""
    return store.with_name(store.name + ".journal")


def num_acknowledged(store: Path) -> int:
    journal = journal_of(store)
    return journal.stat().st_size // LINE_BYTES if journal.exists() else 0


def read_journal(store: Path) -> list[bytes]:
    """Every acknowledged key; a half line at the end is none."""
    path = journal_of(store)
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [bytes.fromhex(line.decode()) for line in lines]
