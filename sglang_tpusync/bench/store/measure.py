"""Rounds over page sizes and arms, and the rows they make."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_tpusync.bench.host import last_level_cache_bytes
from sglang_tpusync.bench.report import Row, measured
from sglang_tpusync.bench.rounds import interleaved
from sglang_tpusync.bench.store.arms import DEPTH, Arm, Fio, Ours, open_peer
from sglang_tpusync.bench.store.volume import Volume

__all__ = ["PEERS", "behind", "measure"]

PEERS = ("file", "lmcache", "nixl")
_CACHES = 4  # the volume is at least so many last-level caches
_LLC_BYTES = 32 << 20  # where the kernel does not say
_LABELS = {"file": "SGLang file, synced", "lmcache": "LMCache fs_native, O_DIRECT", "nixl": "NIXL POSIX, O_DIRECT"}


def _goal(page_bytes: int) -> float:
    """Of fio's rate. Small pages lie side by side and move together, which fio's single transfers do not."""
    return 0.9 if page_bytes >= 1 << 20 else 0.8 if page_bytes >= 1 << 16 else 1.0


def measure(
    sizes: Sequence[int],
    *,
    num_rounds: int,
    peers: Sequence[str],
    parent: Path,
    io: str,
    say: Callable[[str], None],
) -> list[Row]:
    """Two rows a size: GB/s of writing and of reading cold, with checksums, beside fio's as the limit."""
    rows: list[Row] = []
    at_least = _CACHES * (last_level_cache_bytes() or _LLC_BYTES)
    for page_bytes in sizes:
        volume = Volume.of(page_bytes, at_least)
        with (
            tempfile.TemporaryDirectory(prefix="tpusync-store-", dir=parent) as scratch,
            contextlib.ExitStack() as stack,
        ):
            directory = Path(scratch)
            ours = Ours(volume, directory / "ours", io)
            arms: dict[str, Arm] = {"ours": ours, "fio": Fio(volume, directory / "fio")}
            arms |= {name: open_peer(name, volume, directory / name) for name in peers}
            for arm in arms.values():
                stack.callback(arm.close)
            rows += _rows_of(volume, arms, num_rounds, ours.engine, say)
    return rows


def _rows_of(
    volume: Volume, arms: dict[str, Arm], num_rounds: int, engine: str, say: Callable[[str], None]
) -> list[Row]:
    size = _text(volume.page_bytes)
    samples: dict[str, dict[str, list[float]]] = {"write": {n: [] for n in arms}, "read": {n: [] for n in arms}}
    # The first round is nobody's: files get their blocks in it.
    for number, name in interleaved(list(arms), num_rounds + 1):
        arm = arms[name]
        write_s, read_s = arm.write(number), arm.read(number)
        arm.drop(number)
        if number > 0:
            samples["write"][name].append(volume.num_bytes / write_s / 1e9)
            samples["read"][name].append(volume.num_bytes / read_s / 1e9)
        say(f"{size}, round {number} of {num_rounds}, {name}: write {write_s:.2f} s, read {read_s:.2f} s")
    return [
        measured(
            f"{operation} {size} pages ({engine})",
            values["ours"],
            unit="GB/s",
            better="higher",
            limit=f"fio, io_uring, O_DIRECT, transfers of {size}, depth {DEPTH}",
            limit_samples=values["fio"],
            goal=_goal(volume.page_bytes),
            peers={_LABELS[name]: values[name] for name in arms if name in _LABELS},
        )
        for operation, values in samples.items()
    ]


def behind(row: Row) -> list[str]:
    """The peers that are ahead of the row by more than its spread."""
    from sglang_tpusync.bench.report import is_ahead

    return [peer for peer in row.peers if not is_ahead(row, peer)]


def _text(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
