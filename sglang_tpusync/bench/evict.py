"""What the store's order of eviction hits, beside LRU, S3-FIFO and Belady's optimum, which knows the future.

Requests are replayed against the index of the store itself, without IO. A hit is a block of the longest leading part of
a request that is stored. With a front, a least recently used cache of so many blocks hides what it hits from the store;
then it counts what the store alone hits once the front is lost in a crash, and how many blocks were written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sglang_tpusync.bench.report import Row, measured
from sglang_tpusync.bench.traces import Workload

__all__ = ["GAP_GOALS", "measure"]

# Points of hit rate that a case may be behind the better of LRU and S3-FIFO.
_BEHIND_MAX = 0.5
# How far of the way from LRU to Belady a case has to get.
GAP_GOALS: Mapping[tuple[str, int], float] = {("conversation", 1000): 0.30, ("conversation", 5000): 0.30}
# A smaller gap, in points, is none.
_GAP_MIN = 0.05
# After a crash: so many requests find what the store alone has.
_REQUESTS_AFTER_CRASH = 500


def _replayed(work: Workload, policy: str, num_slots: int, front_blocks: int) -> dict[str, float]:
    from sglang_tpusync import _core

    result: dict[str, float] = _core.evict.replay(
        work.pages,
        work.ends,
        policy=policy,  # type: ignore[arg-type]
        num_slots=num_slots,
        front_pages=front_blocks,
        requests_after_crash=_REQUESTS_AFTER_CRASH if front_blocks else 0,
    )
    return result


def _percent(num_hits: float, num_pages: int) -> float:
    return 100 * num_hits / num_pages if num_pages else 0.0


def gap_closed(value: float, lru: float, optimum: float) -> float:
    """How far of the way from LRU to the optimum; 1 where there is nothing to gain."""
    return (value - lru) / (optimum - lru) if optimum - lru >= _GAP_MIN else 1.0


def _without_front(work: Workload, num_slots: int) -> list[Row]:
    from sglang_tpusync import _core

    rate = {
        policy: _percent(_replayed(work, policy, num_slots, 0)["hits"], work.pages.size)
        for policy in ("reuse", "lru", "s3_fifo")
    }
    optimum = _percent(_core.evict.optimum(work.pages, work.ends, num_slots=num_slots), work.pages.size)
    case = f"{work.name}, {num_slots} blocks"
    goal = GAP_GOALS.get((work.name, num_slots))
    return [
        measured(
            f"{case}: hit rate",
            [rate["reuse"]],
            unit="%",
            better="higher",
            limit="Belady's optimum",
            limit_samples=[optimum],
            goal=max(0.0, max(rate["lru"], rate["s3_fifo"]) - _BEHIND_MAX) / optimum if optimum else None,
            peers={"LRU": [rate["lru"]], "S3-FIFO": [rate["s3_fifo"]]},
        ),
        measured(
            f"{case}: gap_closed",
            [gap_closed(rate["reuse"], rate["lru"], optimum)],
            unit="of LRU to Belady",
            better="higher",
            limit="the goal" if goal else None,
            limit_samples=[goal] if goal else [],
            goal=1.0 if goal else None,
            peers={"S3-FIFO": [gap_closed(rate["s3_fifo"], rate["lru"], optimum)]},
        ),
    ]


def _with_front(work: Workload, num_slots: int, front_blocks: int) -> list[Row]:
    results = {name: _replayed(work, name, num_slots, front_blocks) for name in ("reuse", "lru", "leaf_lru")}
    names = {"lru": "LRU", "leaf_lru": "LRU, leaf first, ancestors touched"}
    case = f"{work.name}, {num_slots} blocks behind {front_blocks}"
    after = {name: 100 * result["hit_rate_after_crash"] for name, result in results.items()}
    return [
        measured(
            f"{case}: hit rate after a crash",
            [after["reuse"]],
            unit="%",
            better="higher",
            peers={names[name]: [after[name]] for name in names},
        ),
        measured(
            f"{case}: blocks written",
            [results["reuse"]["written"]],
            unit="blocks",
            better="lower",
            peers={names[name]: [results[name]["written"]] for name in names},
        ),
    ]


def measure(workloads: Iterable[Workload], front_blocks: int = 0) -> list[Row]:
    """Two rows per workload and capacity, `hit rate` and `gap_closed`; two more each with a front.

    Exact: the same workloads give the same rows.
    """
    rows: list[Row] = []
    for work in workloads:
        for num_slots in work.capacities:
            rows += _without_front(work, num_slots)
            if front_blocks:
                rows += _with_front(work, num_slots, front_blocks)
    return rows
