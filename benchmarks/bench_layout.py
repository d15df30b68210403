"""Changes of layout beside memcpy: the same as `tpusync bench layout`, for a checkout."""

from __future__ import annotations

import typer

from sglang_tpusync.cli.bench_layout import layout

if __name__ == "__main__":
    typer.run(layout)
