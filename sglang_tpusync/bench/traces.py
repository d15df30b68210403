"""Requests as paths of pages: read from published traces, or generated from a seed.

A trace says which blocks of tokens each request had, as opaque numbers; a block here is a page of the store. Two
formats are read:

- Mooncake, `mooncake/*_trace.jsonl`: one JSON object per line with `timestamp` (never going back) and `hash_ids`,
  numbers that mean the same in the whole file.
- kv-cache-tester, `kv-cache-tester/trace_*.json`: one JSON object per conversation with `requests`, each with `t`
  (seconds) and `hash_ids` that mean something within their file only (`hash_id_scope` "local"). All files together are
  one workload: the requests by their `t`. Requests without `hash_ids` (those of sub-agents nest) are left out.

The page before a page is always the same: its number stands for the whole prefix. What breaks that, or the format, is a
ConfigError that names the file and the line.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglang_tpusync.errors import ConfigError

__all__ = ["Workload", "WorkloadBuilder", "generate", "read_traces"]

MOONCAKE_BLOCKS = (1000, 5000, 20_000, 50_000)
AGENTIC_BLOCKS = (10_000, 50_000)
GENERATED_BLOCKS = (1000, 5000, 20_000)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in their order, and the sizes of store, in blocks, to replay them against. Immutable."""

    name: str
    pages: NDArray[np.uint32]  # of all requests, one behind the other, head first
    ends: NDArray[np.uint64]  # [requests]: request i ends before ends[i]
    capacities: tuple[int, ...]


class WorkloadBuilder:
    """Numbers the blocks of requests. Raises ConfigError, naming `place`, for a request that is no path."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._parents: list[int] = []
        self._pages: list[int] = []
        self._ends: list[int] = []

    def add(self, blocks: Sequence[object], place: str) -> None:
        """Appends a request. `blocks` are hashable, equal where the block and all before it are."""
        parent = -1
        path: list[int] = []
        for block in blocks:
            number = self._numbers.setdefault(block, len(self._parents))
            if number == len(self._parents):
                self._parents.append(parent)
            elif self._parents[number] != parent:
                raise ConfigError(f"{place}: block {block} follows another block than before")
            path.append(number)
            parent = number
        if len(set(path)) != len(path):
            raise ConfigError(f"{place}: a block is in the request twice")
        self._pages += path
        self._ends.append(len(self._pages))

    def build(self, name: str, capacities: tuple[int, ...]) -> Workload:
        return Workload(
            name=name,
            pages=np.array(self._pages, dtype=np.uint32),
            ends=np.array(self._ends, dtype=np.uint64),
            capacities=capacities,
        )


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: float
    hash_ids: list[int]


class _AgenticRequest(msgspec.Struct, frozen=True):
    t: float
    hash_ids: list[int] | None = None


class _AgenticFile(msgspec.Struct, frozen=True):
    hash_id_scope: str
    requests: list[_AgenticRequest]


def read_traces(directory: Path) -> list[Workload]:
    """All workloads of a directory. Raises ConfigError if there is none, or if a file is not as it must be."""
    workloads = [_read_mooncake(path) for path in sorted((directory / "mooncake").glob("*_trace.jsonl"))]
    agentic = sorted((directory / "kv-cache-tester").glob("trace_*.json"))
    if agentic:
        workloads.append(_read_agentic(agentic))
    if not workloads:
        raise ConfigError(f"{directory}: neither mooncake/*_trace.jsonl nor kv-cache-tester/trace_*.json")
    return workloads


def _read_mooncake(path: Path) -> Workload:
    builder = WorkloadBuilder()
    last = float("-inf")
    for number, line in enumerate(_lines(path), start=1):
        place = f"{path}:{number}"
        try:
            request = msgspec.json.decode(line, type=_MooncakeLine)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{place}: {error}") from error
        if request.timestamp < last:
            raise ConfigError(f"{place}: timestamp {request.timestamp} after {last}")
        last = request.timestamp
        builder.add(request.hash_ids, place)
    return builder.build(path.name.removesuffix("_trace.jsonl"), MOONCAKE_BLOCKS)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _read_agentic(paths: Sequence[Path]) -> Workload:
    requests: list[tuple[float, int, int, list[int]]] = []
    for conversation, path in enumerate(paths):
        try:
            file = msgspec.json.decode(b"".join(_lines(path)), type=_AgenticFile)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}:1: {error}") from error
        if file.hash_id_scope != "local":
            raise ConfigError(f"{path}:1: hash_id_scope is '{file.hash_id_scope}', not 'local'")
        for number, request in enumerate(file.requests):
            if request.hash_ids is not None:
                requests.append((request.t, conversation, number, request.hash_ids))
    builder = WorkloadBuilder()
    for _, conversation, number, ids in sorted(requests, key=lambda request: request[:3]):
        builder.add([(conversation, block) for block in ids], f"{paths[conversation]}:1: request {number}")
    return builder.build("agentic", AGENTIC_BLOCKS)


def generate(seed: int, num_requests: int = 20_000, capacities: tuple[int, ...] = GENERATED_BLOCKS) -> Workload:
    """Conversations that begin with a shared prefix and come back, some of them, among scans that never do.

    Of all requests 15 % are scans of 20 to 60 blocks. Conversations begin with one of 200 prefixes (Zipf) of 2 to 16
    blocks; every turn adds 1 to 8; with a probability of 0.7 another turn follows, some 20 to 2000 requests later.
    """
    random = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, 201)
    popularity /= popularity.sum()
    lengths = random.integers(2, 17, size=200)
    waiting: list[tuple[float, int, list[tuple[int, int]]]] = []  # turns to come, by their time
    builder = WorkloadBuilder()
    for now in range(num_requests):
        if random.random() < 0.15:
            builder.add([(-1 - now, i) for i in range(int(random.integers(20, 61)))], "generated")
            continue
        if waiting and waiting[0][0] <= now:
            path = heapq.heappop(waiting)[2]
        else:
            prefix = int(random.choice(200, p=popularity))
            path = [(prefix, i) for i in range(int(lengths[prefix]))]
        path = path + [(1000 + now, i) for i in range(int(random.integers(1, 9)))]
        builder.add(path, "generated")
        if random.random() < 0.7:
            heapq.heappush(waiting, (now + 20 * 100 ** float(random.random()), now, path))
    return builder.build(f"generated, seed {seed}", capacities)
