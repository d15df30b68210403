"""From samples to rows and a verdict."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from sglang_tpusync.bench.report import ServingRow, Source, is_ahead, meets_goal, spread_of
from sglang_tpusync.bench.serving.answer import Answer, first_difference
from sglang_tpusync.bench.serving.plan import Plan
from sglang_tpusync.bench.serving.session import CONTROL_ROUND, Sample

__all__ = ["differences", "make_rows", "verdict"]

_ORDER: tuple[Source, ...] = ("nocache", "cold", "l1", "l2", "l3", "restart", "control")
_CACHED: tuple[Source, ...] = ("l1", "l2", "l3", "restart", "control")

Case = tuple[int, Source, str]


def differences(plan: Plan, samples: Iterable[Sample]) -> dict[Case, list[str]]:
    """What is not identical, by case. The reference of a prompt: the server without cache, else its first cold run."""
    listed = list(samples)
    references: dict[tuple[int, int], Answer] = {}
    for wanted in ("nocache", "cold"):
        for sample in listed:
            if sample.source == wanted:
                references.setdefault((sample.round_index, sample.prompt_tokens), sample.answer)
    found: dict[Case, list[str]] = {}
    for sample in listed:
        reference = references[sample.round_index, sample.prompt_tokens]
        difference = first_difference(reference, sample.answer, plan.tolerance)
        if difference:
            case = (sample.prompt_tokens, sample.source, sample.backend)
            found.setdefault(case, []).append(f"round {sample.round_index + 1}: {difference}")
    return found


def make_rows(plan: Plan, samples: Iterable[Sample], bytes_per_token: int) -> list[ServingRow]:
    """One row per length, source and backend, in that order; the limit of a cached row is the cold run beside it."""
    listed = list(samples)
    by_case: dict[Case, list[Answer]] = {}
    for sample in listed:
        if sample.round_index != CONTROL_ROUND or sample.source == "control":
            by_case.setdefault((sample.prompt_tokens, sample.source, sample.backend), []).append(sample.answer)
    different = differences(plan, listed)
    cases = sorted(by_case, key=lambda case: (case[0], _ORDER.index(case[1]), case[2] != "tpusync", case[2]))
    return [
        _row(plan, case, by_case, identical=case not in different, bytes_per_token=bytes_per_token) for case in cases
    ]


def _row(
    plan: Plan, case: Case, by_case: dict[Case, list[Answer]], *, identical: bool, bytes_per_token: int
) -> ServingRow:
    length, source, backend = case
    answers = by_case[case]
    times = [answer.ttft_s for answer in answers]
    value = statistics.median(times)
    cold = by_case.get((length, "cold", backend)) if source in _CACHED else None
    cold_s = statistics.median(answer.ttft_s for answer in cold) if cold else None
    by_tier = {tier: min(a.by_tier.get(tier, 0) for a in answers) for tier in ("device", "host", "storage")}
    peers = {
        other: statistics.median(answer.ttft_s for answer in theirs)
        for (other_length, other_source, other), theirs in by_case.items()
        if (other_length, other_source) == (length, source) and other != backend
    }
    goal = plan.restart_goal if source == "restart" and length == plan.longest and backend == "tpusync" else None
    return ServingRow(
        case=f"{length} tokens, {source}, {backend}",
        value=value,
        unit="s",
        better="lower",
        spread=spread_of(times),
        limit="the cold prefill of the same prompts" if cold_s else None,
        limit_value=cold_s,
        ratio=value / cold_s if cold_s else None,
        goal=goal,
        peers=peers,
        prompt_tokens=length,
        source=source,
        backend=backend,
        ttft_s=value,
        cached_tokens=min(answer.cached_tokens for answer in answers),
        identical=identical,
        cached_by_tier=by_tier,
        loaded_bytes=(by_tier["host"] + by_tier["storage"]) * bytes_per_token,
    )


def verdict(plan: Plan, rows: Sequence[ServingRow], found: dict[Case, list[str]]) -> list[str]:
    """Every reason why the run does not pass; empty if it does. Speed is judged at the longest prompts only."""
    reasons = []
    for row in rows:
        case = (row.prompt_tokens, row.source, row.backend)
        if row.source == "control":
            if row.identical:
                reasons.append(f"{row.case}: the answer from swapped pages is identical, so the check cannot fail")
            continue
        if not row.identical:
            reasons.append(f"{row.case}: not identical, {found[case][0]}")
        if meets_goal(row) is False:
            reasons.append(f"{row.case}: {row.ratio:.3f} of cold, the goal is at most {row.goal}")
        if row.source == "restart" and row.backend == "tpusync" and row.prompt_tokens == plan.longest:
            reasons += [
                f"{row.case}: {row.value:.3f} s, behind {peer} with {row.peers[peer]:.3f} s by more than the spread"
                for peer in row.peers
                if not is_ahead(_with_wider_spread(row, peer, rows), peer)
            ]
    return reasons


def _with_wider_spread(row: ServingRow, peer: str, rows: Sequence[ServingRow]) -> ServingRow:
    """The row with the larger of its own spread and that of the peer's row beside it."""
    beside = (r.spread for r in rows if (r.prompt_tokens, r.source, r.backend) == (row.prompt_tokens, row.source, peer))
    return msgspec.structs.replace(row, spread=max(row.spread, *beside))
