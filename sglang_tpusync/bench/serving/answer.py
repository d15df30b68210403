"""One answer of a server, and the two questions about it: where did its KV come from, and is it the right one."""

from __future__ import annotations

import math

import msgspec

from sglang_tpusync.bench.report import Source

__all__ = ["Answer", "first_difference", "unproven_source"]

_TIER_OF_SOURCE: dict[str, str] = {
    "l1": "device",
    "l2": "host",
    "l3": "storage",
    "restart": "storage",
    "control": "storage",
}


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the server said. Immutable. `by_tier`: cached tokens by tier as SGLang's cached_tokens_details has them."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    by_tier: dict[str, int]


def first_difference(reference: Answer, answer: Answer, tolerance: float = 0.0) -> str | None:
    """How the answer differs from the reference, None if it does not: ids equal, log probabilities within tolerance.

    A tolerance of 0 asks for the same bits (but NaN is never equal to anything).
    """
    if reference.ids != answer.ids:
        place = next((i for i, (a, b) in enumerate(zip(reference.ids, answer.ids, strict=False)) if a != b), None)
        where = f"token {place}" if place is not None else "the number of tokens"
        return f"{where} differs: {list(reference.ids)} became {list(answer.ids)}"
    if len(reference.logprobs) != len(answer.logprobs) or len(answer.logprobs) != len(answer.ids):
        return f"{len(answer.ids)} tokens, {len(reference.logprobs)} and {len(answer.logprobs)} log probabilities"
    for place, (expected, got) in enumerate(zip(reference.logprobs, answer.logprobs, strict=True)):
        if math.isnan(got) or not abs(expected - got) <= tolerance:
            return f"log probability {place} differs: {expected!r} became {got!r}"
    return None


def unproven_source(answer: Answer, source: Source, page_tokens: int) -> str | None:
    """Why SGLang's own details do not prove the source, None if they do.

    A hit of a tier covers all of the prompt but at most its last page, which SGLang always computes again.
    """
    cached = sum(answer.by_tier.values())
    if source in ("nocache", "cold"):
        return f"{cached} cached tokens in a {source} run" if cached or answer.cached_tokens else None
    tier = _TIER_OF_SOURCE[source]
    needed = answer.prompt_tokens - page_tokens
    found = answer.by_tier.get(tier, 0)
    if found < needed:
        return f"{source} needs {needed} of {answer.prompt_tokens} tokens from {tier}, the server says {answer.by_tier}"
    return None
