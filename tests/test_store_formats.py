"""Directories of each format version, kept as they were written: an old one opens and reads, a newer one is left alone.

    python tests/test_store_formats.py      writes the archives of the version of this program, once per version

Pages and their number are those of `write_v1`; what it wrote is never written again.
"""

from __future__ import annotations

import io
import json
import struct
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
from store_pages import Pages, key_of, region_path

from sglang_tpusync import _core
from sglang_tpusync.config import Options
from sglang_tpusync.errors import StorageError
from sglang_tpusync.store import check_region, read_store

GOLDEN = Path(__file__).parent / "golden"
PAGE_BYTES = 5000  # no multiple of the alignment of slots
IDENTITY = {"format": 1, "model": {"fingerprint": "golden"}, "page_size": 16}


def write_v1(path: Path) -> None:
    with Pages(path, page_bytes=PAGE_BYTES, identity=IDENTITY) as pages:
        pages.put(0, 6)
        pages.put(10, 14, prefix=(0, 1))
        pages.put(20, 22)
        pages.store.remove(key_of(12))


def write_newer(path: Path) -> None:
    """An invented version: the header of the table says 2, everything else is unknown."""
    import xxhash

    write_v1(path)
    with open(region_path(path).with_suffix(".table"), "r+b") as table:
        header = bytearray(table.read(80))
        struct.pack_into("<I", header, 8, 2)
        table.seek(0)
        table.write(header + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(header))))


def unpack(name: str, path: Path) -> Path:
    with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
        archive.extractall(path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return path / "store"


def test_version_1_opens_and_every_page_reads(tmp_path: Path) -> None:
    store = unpack("flash-v1", tmp_path)
    with Pages(store, page_bytes=PAGE_BYTES, identity=IDENTITY) as pages:
        assert pages.store.stats()["recovered_entries"] == 11
        assert pages.get(0, 6) == list(range(6))
        assert pages.get(10, 14) == [10, 11, 13]
        assert pages.get(20, 22) == [20, 21]
        assert pages.store.match(b"".join(map(key_of, (0, 1, 10, 11, 12))), b"") == 4
        assert pages.put(30, 33) == 3


def test_version_1_is_whole_to_a_reader_that_writes_nothing(tmp_path: Path) -> None:
    store = unpack("flash-v1", tmp_path)
    before = {file: file.read_bytes() for file in store.rglob("*") if file.is_file()}
    view = read_store(store, Options(), num_trees=5)
    ((namespace, region),) = view.regions
    assert namespace.identity == IDENTITY
    assert (region.format_version, region.page_bytes, region.slot_bytes, region.num_entries) == (1, 5000, 8192, 11)
    # Page 13 continues a page that was removed: it stands alone.
    assert sorted(tree.num_pages for tree in region.largest) == [1, 2, 8]
    report = check_region(view.path, namespace, region)
    assert (report.num_intact, report.findings) == (11, ())
    assert {file: file.read_bytes() for file in store.rglob("*") if file.is_file()} == before


def test_a_newer_version_is_refused_and_untouched(tmp_path: Path) -> None:
    store = unpack("flash-newer", tmp_path)
    before = {file: file.read_bytes() for file in store.rglob("*") if file.is_file()}
    with pytest.raises(StorageError, match="format version 2, this program knows 1"):
        Pages(store, page_bytes=PAGE_BYTES, identity=IDENTITY)
    view = read_store(store, Options())
    ((namespace, region),) = view.regions
    assert region.is_newer
    assert "left alone" in check_region(view.path, namespace, region, repair=True).skipped
    with pytest.raises(Exception, match="format version 2"):
        _core.store.remove_region(view.path, region.base_path)
    _core.store.remove_orphans(view.path, dry_run=False)
    assert {file: file.read_bytes() for file in store.rglob("*") if file.is_file()} == before


def _write(name: str, data: bytes) -> None:
    target = GOLDEN / f"{name}.tar.xz"
    if target.exists():
        sys.exit(f"{target} is kept as it was written")
    target.write_bytes(data)
    print(f"{target}: {len(data)} bytes")


def _archive(store: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz", preset=9) as archive:
        for file in sorted(store.rglob("*")):
            entry = archive.gettarinfo(file, f"store/{file.relative_to(store)}")
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            with open(file, "rb") if file.is_file() else io.BytesIO() as stream:
                archive.addfile(entry, stream if entry.isfile() else None)
    return buffer.getvalue()


def main() -> None:
    for name, write in (("flash-v1", write_v1), ("flash-newer", write_newer)):
        with tempfile.TemporaryDirectory() as directory:
            store = Path(directory) / "store"
            write(store)
            assert json.loads((region_path(store).parent / "namespace.json").read_text()) == IDENTITY
            _write(name, _archive(store))


if __name__ == "__main__":
    main()
