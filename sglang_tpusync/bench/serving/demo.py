"""`tpusync demo`: long prompts and a real conversation across a crash, a report, a picture, a verdict."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sglang_tpusync.bench.report import ServingRow, write_report
from sglang_tpusync.bench.serving.command import Outcome, measure, print_progress, require_packages, scratch_parent
from sglang_tpusync.bench.serving.conversation import measure_conversation
from sglang_tpusync.bench.serving.plan import Plan
from sglang_tpusync.bench.serving.render import TABLE_WIDTH, markdown_table, rich_table, write_chart

__all__ = ["run_demo"]

_LONG = Plan(prompt_tokens=(2048, 8192, 16384), backends=("tpusync", "file"), restart_goal=0.06)
_CHART_TITLE = "Time to the first token, by where the KV cache comes from (4-layer model on a CPU)"


def run_demo(*, out: Path, rounds: int) -> int:
    """Writes report.json, report.md and ttft.png into `out`, prints tables and a verdict. Answers 0: PASS, 1: FAIL."""
    plan = msgspec.structs.replace(_LONG, num_rounds=rounds).validate()
    require_packages("matplotlib", "sglang", "torch", "transformers")
    long = measure(plan)
    print_progress("a conversation with SmolLM2")
    with tempfile.TemporaryDirectory(prefix="tpusync-demo-", dir=scratch_parent()) as directory:
        chat = measure_conversation(Path(directory), print_progress)
    rows = [*long.rows, *chat.rows]
    reasons = [*long.reasons, *chat.reasons]
    out.mkdir(parents=True, exist_ok=True)
    write_report(out / "report.json", "serving", long.host, rows)
    write_chart(long.rows, out / "ttft.png", _CHART_TITLE)
    (out / "report.md").write_text(_markdown(plan, long, chat.rows, chat.transcript, reasons))
    _show(plan, long.rows, chat.rows, reasons, out)
    return 1 if reasons else 0


def _markdown(
    plan: Plan, long: Outcome, chat: Sequence[ServingRow], transcript: Sequence[tuple[str, str]], reasons: Sequence[str]
) -> str:
    talk = "\n\n".join(f"**{role}:** {text}" for role, text in transcript)
    met = "\n".join(f"* {reason}" for reason in reasons) or "Every answer is identical and every goal is met."
    return f"""# Demo report: {"FAIL" if reasons else "PASS"}

{met}

## Long prompts

Random-weight Llama with 4 layers and a 64K context on a CPU; medians of {plan.num_rounds} interleaved rounds, with new
prompts in every round. *of cold*: relative to the prefill of the same prompts. *GB/s*: bytes of KV over the whole time
to the first token. *same*: greedy token ids and their log probabilities equal those of a server without any cache. In
the control two pages of a stored prefix were swapped: there, *same* must be NO.

![time to the first token](ttft.png)

{markdown_table(long.rows)}
## A conversation with SmolLM2-135M, killed between two turns

{markdown_table(chat)}
{talk}
"""


def _show(
    plan: Plan, long: Sequence[ServingRow], chat: Sequence[ServingRow], reasons: Sequence[str], out: Path
) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(rich_table(long, f"Time to the first token, medians of {plan.num_rounds} rounds"))
    console.print(rich_table(chat, "A conversation with SmolLM2, killed (-9) between its two turns"))
    console.print(f"picture: {out / 'ttft.png'}", soft_wrap=True, highlight=False)
    for reason in reasons:
        console.print(f"[red]not met:[/] {escape(reason)}", soft_wrap=True, highlight=False)
    console.print("[bold red]FAIL[/]" if reasons else "[bold green]PASS[/]: all identical, every goal met")
