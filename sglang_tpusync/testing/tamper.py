"""Damage on purpose, for controls: edits a store directory that no process has open (docs/formats/flash-v1.md).

A changed payload gets checksums that are right again, so that the store has no way to notice: only a comparison of
answers can. It decodes the format on its own, not through the native module.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from sglang_tpusync.errors import StorageError

__all__ = [
    "ClosedRegion",
    "flip_payload_byte",
    "flip_record_byte",
    "page_keys",
    "regions_of",
    "replace_page",
    "swap_pages",
]

_HEADER_BLOCK_BYTES = 4096
_RECORD_BYTES = 64
_MAGIC = b"TPUSYNCT"
_GENERATION_MASK = (1 << 48) - 1


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What the slot table says of one slot. Immutable."""

    slot: int
    key: bytes
    length_bytes: int
    payload_checksum: int
    generation: int
    raw: bytes


class ClosedRegion:
    """One `.table` and its `.slots`. Thread-compatible; the caller sees to it that no store has the region open."""

    def __init__(self, table: Path) -> None:
        self.table = table
        self.slots = table.with_suffix(".slots")
        header = table.read_bytes()[:88]
        if header[:8] != _MAGIC:
            raise StorageError(f"{table.name} is no slot table")
        self.namespace = header[16:48]
        self._seed = _checksum(self.namespace)
        self.page_bytes, self.slot_bytes = struct.unpack_from("<QQ", header, 48)

    def records(self) -> dict[bytes, Record]:
        """The records whose checksum is right, by key."""
        found = {}
        raw = self.table.read_bytes()[_HEADER_BLOCK_BYTES:]
        for slot in range(len(raw) // _RECORD_BYTES):
            record = self._decode(slot, raw[slot * _RECORD_BYTES : (slot + 1) * _RECORD_BYTES])
            if record is not None:
                found[record.key] = record
        return found

    def read(self, record: Record) -> bytes:
        with open(self.slots, "rb") as file:
            file.seek(record.slot * self.slot_bytes)
            return file.read(record.length_bytes)

    def write(self, record: Record, payload: bytes) -> None:
        """Puts another payload of the same length under the record's key, with checksums to match."""
        with open(self.slots, "r+b") as file:
            file.seek(record.slot * self.slot_bytes)
            file.write(payload)
        raw = bytearray(record.raw)
        payload_seed = _checksum(record.key, record.generation)
        struct.pack_into("<Q", raw, 40, _checksum(payload, payload_seed))
        struct.pack_into("<I", raw, 0, self._record_checksum(bytes(raw), record.slot))
        with open(self.table, "r+b") as file:
            file.seek(_HEADER_BLOCK_BYTES + record.slot * _RECORD_BYTES)
            file.write(raw)

    def verify(self, record: Record) -> bool:
        """Whether the payload has the checksum that the record says."""
        return _checksum(self.read(record), _checksum(record.key, record.generation)) == record.payload_checksum

    def _decode(self, slot: int, raw: bytes) -> Record | None:
        if not any(raw) or struct.unpack_from("<I", raw)[0] != self._record_checksum(raw, slot):
            return None
        length, key, payload_checksum, generation = struct.unpack_from("<I32sQQ", raw, 4)
        return Record(
            slot=slot,
            key=key,
            length_bytes=length,
            payload_checksum=payload_checksum,
            generation=generation & _GENERATION_MASK,
            raw=raw,
        )

    def flip_payload_byte(self, record: Record, at: int) -> None:
        """Inverts one byte of a payload, and leaves its checksum alone."""
        _flip(self.slots, record.slot * self.slot_bytes + at)

    def _record_checksum(self, raw: bytes, slot: int) -> int:
        return _checksum(raw[4:], self._seed + slot) & 0xFFFFFFFF


def regions_of(store: Path) -> Iterator[ClosedRegion]:
    """Every region of a store directory, all namespaces."""
    for table in sorted(store.glob("v1/*/region-*.table")):
        yield ClosedRegion(table)


def page_keys(token_ids: Sequence[int], page_tokens: int) -> list[bytes]:
    """The keys of the whole pages of a prompt without salt, as SGLang chains them (mem_cache/utils.py of 0.5.23)."""
    import hashlib

    keys: list[bytes] = []
    for start in range(0, len(token_ids) - page_tokens + 1, page_tokens):
        hasher = hashlib.sha256(keys[-1] if keys else b"")
        hasher.update(b"".join(token.to_bytes(4, "little") for token in token_ids[start : start + page_tokens]))
        keys.append(hasher.digest())
    return keys


def swap_pages(store: Path, first: bytes, second: bytes) -> None:
    """Exchanges the payloads of two keys. Raises StorageError if a region does not hold both."""
    region, a, b = _find(store, first, second)
    payload_a, payload_b = region.read(a), region.read(b)
    region.write(a, payload_b)
    region.write(b, payload_a)


def replace_page(store: Path, key: bytes, by: bytes) -> None:
    """Puts the payload of key `by` under `key`, too."""
    region, record, other = _find(store, key, by)
    region.write(record, region.read(other))


def flip_payload_byte(store: Path, key: bytes, at: int) -> None:
    """Inverts one byte of a payload, and leaves its checksum alone."""
    region, record, _ = _find(store, key, key)
    region.flip_payload_byte(record, at)


def flip_record_byte(store: Path, key: bytes, at: int) -> None:
    """Inverts one byte of a key's record in the slot table."""
    region, record, _ = _find(store, key, key)
    _flip(region.table, _HEADER_BLOCK_BYTES + record.slot * _RECORD_BYTES + at)


def _flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))


def _find(store: Path, first: bytes, second: bytes) -> tuple[ClosedRegion, Record, Record]:
    for region in regions_of(store):
        records = region.records()
        if first in records and second in records:
            return region, records[first], records[second]
    raise StorageError(f"no region of the store holds both {first.hex()[:16]} and {second.hex()[:16]}")


def _checksum(payload: bytes, seed: int = 0) -> int:
    import xxhash

    return xxhash.xxh3_64_intdigest(payload, seed=seed & 0xFFFFFFFFFFFFFFFF)
