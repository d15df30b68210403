"""`tpusync bench`: one sub-command per benchmark, listed in `BENCHES`.

A benchmark is a function with typer options in a light module of `sglang_tpusync.cli`, which imports its measuring part
when it runs. It takes at least `--json FILE` and writes there what `sglang_tpusync.bench.report` defines.
"""

from __future__ import annotations

import importlib

import typer

__all__ = ["BENCHES", "app"]

# Name of the sub-command -> "module:function".
BENCHES: dict[str, str] = {
    "evict": "sglang_tpusync.cli.bench_evict:evict",
    "layout": "sglang_tpusync.cli.bench_layout:layout",
    "pd": "sglang_tpusync.cli.bench_pd:pd",
    "serving": "sglang_tpusync.cli.bench_serving:serving",
    "store": "sglang_tpusync.cli.bench_store:store",
    "tiers": "sglang_tpusync.cli.bench_tiers:tiers",
    "transfer": "sglang_tpusync.cli.bench_transfer:transfer",
}

app = typer.Typer(help="Measure; every benchmark writes the same JSON with --json.", no_args_is_help=True)

for _name, _place in BENCHES.items():
    _module, _, _function = _place.partition(":")
    app.command(_name)(getattr(importlib.import_module(_module), _function))


@app.callback()
def _root() -> None:
    """Measure; every benchmark writes the same JSON with --json."""
