"""A real conversation with SmolLM2: its second turn, after a crash, reads the first one out of the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sglang_tpusync.bench.report import ServingRow, Source
from sglang_tpusync.bench.serving.answer import Answer, first_difference
from sglang_tpusync.bench.serving.plan import Plan
from sglang_tpusync.bench.serving.run import started
from sglang_tpusync.bench.serving.servers import kv_bytes_per_token, model_directory

__all__ = ["Conversation", "measure_conversation"]

_REPLY_TOKENS = 48

_SYSTEM = "You are a patient guide of a small museum of technology. Answer in two or three plain sentences."
_FIRST = """Please read this description of our newest exhibit and tell me what is special about it.

The exhibit is a tide-predicting machine from 1910. It stands two metres tall, weighs more than a ton, and is made of
brass and steel. Thirty-seven pulleys move up and down on it, each driven by its own crank, and every crank stands for
one cause of the tide: the moon, the sun, the tilt of their orbits, the shallow water of a bay. A single steel band runs
over all pulleys, so that it adds their motions together. At its end hangs a pen, which draws the height of the water
on a roll of paper. An operator turned a handle at an even speed. In one working day the machine drew the tides of one
harbour for one whole year, which would have taken a person with a pencil several months. Each harbour needed its own
settings: the length of every crank came from years of measurements at the quay, kept in a thick book beside the
machine. Pilots, dockers and fishermen used the printed tables every day without ever knowing about the pulleys. In the
second world war two such machines ran day and night in separate towns, because losing them would have meant that
nobody could tell when a beach would be dry. Their operators were never told which beach the numbers were for; they
only saw a code letter. Electronic computers replaced the machines around 1965, but the sums have stayed the same: we
still add up the same thirty-seven waves. Visitors may turn the handle themselves on Sundays, under the eyes of a
guardian, and take home the strip of paper with the tide of their own birthday."""
_SECOND = "Thank you. And why did the operators not know which beach their numbers were for?"


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, why it does not pass, and what was said. Immutable."""

    rows: list[ServingRow]
    reasons: list[str]
    transcript: list[tuple[str, str]]


def measure_conversation(directory: Path, say: Callable[[str], None]) -> Conversation:
    """Two turns, with a SIGKILL between them; the reference is a server without any cache."""
    plan = Plan(model="smollm2", prompt_tokens=(2048,), output_tokens=_REPLY_TOKENS, num_rounds=1).validate()
    tokenizer = _Tokenizer(model_directory("smollm2"))
    first = [("system", _SYSTEM), ("user", _FIRST)]
    with started(plan, directory, say) as engines:
        reference, ours = engines
        warm_up = tokenizer.encode([("system", _SYSTEM), ("user", "Good morning!")])  # shares no whole page with them
        reference.ask(warm_up)
        ours.ask(warm_up)
        cold_1 = ours.ask(tokenizer.encode(first))
        nocache_1 = reference.ask(tokenizer.encode(first))
        turns = [*first, ("assistant", tokenizer.decode(cold_1.ids)), ("user", _SECOND)]
        second = tokenizer.encode(turns)
        nocache_2 = reference.ask(second)
        reference.stop()
        ours.settle()
        say("kill -9 in the middle of the conversation")
        ours.crash()
        ours.restart()
        ours.ask(warm_up)
        restart_2 = ours.ask(second)
    transcript = [*turns, ("assistant", tokenizer.decode(restart_2.ids))]
    bytes_per_token = kv_bytes_per_token("smollm2")
    rows = [
        _row("turn 1", "nocache", "none", nocache_1, nocache_1, None, bytes_per_token),
        _row("turn 1", "cold", "tpusync", cold_1, nocache_1, None, bytes_per_token),
        _row("turn 2", "nocache", "none", nocache_2, nocache_2, None, bytes_per_token),
        _row("turn 2", "restart", "tpusync", restart_2, nocache_2, nocache_2, bytes_per_token),
    ]
    return Conversation(rows=rows, reasons=_reasons(rows, plan, cold_1), transcript=transcript)


class _Tokenizer:
    """The model's own tokenizer, and the turns of a conversation as the model was trained on them (ChatML)."""

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def encode(self, turns: Sequence[tuple[str, str]]) -> list[int]:
        """The prompt as token ids, ready for the next word of the assistant."""
        text = "".join(f"<|im_start|>{role}\n{words}<|im_end|>\n" for role, words in turns)
        ids: list[int] = self._tokenizer.encode(text + "<|im_start|>assistant\n", add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The words up to the end of the turn."""
        text = str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        return text.partition("<|im_end|>")[0].strip()


def _row(
    turn: str,
    source: Source,
    backend: str,
    answer: Answer,
    reference: Answer,
    limit: Answer | None,
    bytes_per_token: int,
) -> ServingRow:
    stored = answer.by_tier.get("storage", 0)
    return ServingRow(
        case=f"SmolLM2 conversation, {turn}, {source}, {backend}",
        value=answer.ttft_s,
        unit="s",
        better="lower",
        limit="the same turn without cache" if limit else None,
        limit_value=limit.ttft_s if limit else None,
        ratio=answer.ttft_s / limit.ttft_s if limit else None,
        prompt_tokens=answer.prompt_tokens,
        source=source,
        backend=backend,
        ttft_s=answer.ttft_s,
        cached_tokens=answer.cached_tokens,
        identical=first_difference(reference, answer) is None,
        cached_by_tier={tier: answer.by_tier.get(tier, 0) for tier in ("device", "host", "storage")},
        loaded_bytes=stored * bytes_per_token,
    )


def _reasons(rows: Sequence[ServingRow], plan: Plan, first: Answer) -> list[str]:
    """The second turn must be identical, and have the whole first turn, but its last page, from the store."""
    reasons = [f"{row.case}: not identical to the server without cache" for row in rows if not row.identical]
    needed = first.prompt_tokens - plan.page_tokens
    found = rows[-1].cached_by_tier["storage"]
    if found < needed:
        reasons.append(f"{rows[-1].case}: {found} tokens from the store, the first turn has {first.prompt_tokens}")
    return reasons
