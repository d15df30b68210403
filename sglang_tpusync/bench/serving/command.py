"""`tpusync bench serving`, behind its options."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sglang_tpusync.bench.report import ServingRow
from sglang_tpusync.bench.serving.plan import Backend, Plan
from sglang_tpusync.errors import ConfigError, UnsupportedError

__all__ = ["Outcome", "measure", "print_progress", "require_packages", "run_command", "scratch_parent"]

_TOLERANCE_OF_RANKS = 0.02  # log probabilities of several ranks were seen to differ by 0.008 with equal tokens
_STARTED_S = time.monotonic()
_RESTART_GOAL = {"long-llama": 0.06}


def print_progress(text: str) -> None:
    """One line on standard error, with the time since the first one."""
    print(f"[{time.monotonic() - _STARTED_S:6.1f} s] {text}", file=sys.stderr, flush=True)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a run found. Immutable."""

    host: dict[str, object]
    rows: list[ServingRow]
    reasons: list[str]  # why it does not pass


def run_command(
    *,
    model: str,
    prompt_tokens: str,
    rounds: int,
    output_tokens: int,
    seed: int,
    compare: Sequence[str],
    tp: int,
    tolerance: float | None,
    control: bool,
    url: str | None,
    json_file: Path | None,
    png: Path | None,
    keep: Path | None,
) -> int:
    """Measures, prints and writes. The exit code: 0 pass, 1 not; raises TpuSyncError where it could not be measured."""
    plan = Plan(
        model=model,
        prompt_tokens=_lengths(prompt_tokens),
        num_rounds=rounds,
        output_tokens=output_tokens,
        seed=seed,
        backends=_backends(compare),
        tp_size=tp,
        tolerance=tolerance if tolerance is not None else (0.0 if tp == 1 else _TOLERANCE_OF_RANKS),
        control=control,
        restart_goal=_RESTART_GOAL.get(model) if tp == 1 else None,
    ).validate()
    require_packages(*(["matplotlib"] if png is not None else []), *([] if url is not None else ["sglang", "torch"]))
    outcome = measure(plan, url=url, keep=keep)
    _show(plan, outcome)
    if json_file is not None:
        from sglang_tpusync.bench.report import write_report

        write_report(json_file, "serving", outcome.host, outcome.rows)
    if png is not None:
        from sglang_tpusync.bench.serving.render import write_chart

        write_chart(outcome.rows, png, f"Time to first token by where the KV comes from ({plan.model}, CPU)")
    return 1 if outcome.reasons else 0


def require_packages(*names: str) -> None:
    """Raises UnsupportedError for the first that is not installed: before the work, not after it."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            extra = "bench" if name == "matplotlib" else "sglang"
            raise UnsupportedError(f"the package {name} is needed: pip install 'sglang-tpusync[{extra}]'")


def measure(
    plan: Plan, *, url: str | None = None, keep: Path | None = None, say: Callable[[str], None] = print_progress
) -> Outcome:
    """The whole run, on servers that are started and stopped here, or the reduced one on the server at `url`."""
    from sglang_tpusync.bench.host import describe_host
    from sglang_tpusync.bench.serving.rows import differences, make_rows, verdict
    from sglang_tpusync.bench.serving.run import run_on_servers, run_on_url
    from sglang_tpusync.bench.serving.servers import kv_bytes_per_token

    with tempfile.TemporaryDirectory(prefix="tpusync-bench-", dir=scratch_parent()) as scratch:
        directory = keep if keep is not None else Path(scratch)
        samples = run_on_url(plan, url) if url is not None else run_on_servers(plan, _prepared(plan, directory), say)
        settings = {name: value for name, value in msgspec.to_builtins(plan).items() if name != "model"}
        host = describe_host(directory, model=Path(plan.model).name, **settings)
    rows = make_rows(plan, samples, 0 if url is not None else kv_bytes_per_token(plan.model))
    return Outcome(host=host, rows=rows, reasons=verdict(plan, rows, differences(plan, samples)))


def _prepared(plan: Plan, directory: Path) -> Path:
    """The directory, empty and with room for the stores; raises ConfigError with the numbers where it is not."""
    from sglang_tpusync.bench.serving.servers import kv_bytes_per_token

    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise ConfigError(
            f"--keep {directory}: allowed is a new or an empty directory, what is stored there is not cold"
        )
    needed = len(plan.backends) * plan.stored_tokens * kv_bytes_per_token(plan.model)
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise ConfigError(
            f"{directory} has {free / 1e9:.1f} GB free, the stores of this run take {needed / 1e9:.1f} GB"
        )
    return directory


def _show(plan: Plan, outcome: Outcome) -> None:
    from rich.console import Console
    from rich.markup import escape

    from sglang_tpusync.bench.serving.render import TABLE_WIDTH, rich_table

    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    title = f"{plan.model}, medians of {plan.num_rounds} rounds, greedy ids and log probabilities compared"
    console.print(rich_table(outcome.rows, title))
    for reason in outcome.reasons:
        console.print(f"[red]not met:[/] {escape(reason)}", soft_wrap=True)
    if not outcome.reasons:
        console.print("[green]all answers identical, every goal met[/]")


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ConfigError(f"--prompt-tokens {text!r}: allowed are whole numbers, separated by commas") from None


def _backends(compare: Sequence[str]) -> tuple[Backend, ...]:
    for name in compare:
        if name != "file":
            raise ConfigError(f"--compare {name!r}: allowed is 'file'")
    return ("tpusync", "file") if compare else ("tpusync",)


def scratch_parent() -> Path:
    """A place on a disk: the directory for temporary files is often memory."""
    from sglang_tpusync.config import read_environment

    place = read_environment().cache_home / "sglang-tpusync" / "bench"
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    return place
