"""Serving rows for people: a table for the terminal, a table in Markdown, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_tpusync.bench.report import ServingRow, Source

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["SOURCE_TEXT", "TABLE_WIDTH", "markdown_table", "rich_table", "write_chart"]

SOURCE_TEXT: dict[Source, str] = {
    "nocache": "no cache",
    "cold": "cold",
    "l1": "device (L1)",
    "l2": "host DRAM (L2)",
    "l3": "store (L3)",
    "restart": "store, after kill -9",
    "control": "control: pages swapped",
}
TABLE_WIDTH = 124  # columns that the table needs, also where there is no terminal to ask
_HEADERS = (
    "tokens",
    "KV from",
    "backend",
    "TTFT s",
    "spread",
    "of cold",
    "device",
    "host",
    "store",
    "MB",
    "GB/s",
    "same",
)
_COLOURS = {"none": "#8c8c8c", "tpusync": "#1f6f8b", "file": "#e09f3e"}


def rich_table(rows: Sequence[ServingRow], title: str) -> Table:
    """The rows as a table; a blank line between prompt lengths."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold")
    for number, header in enumerate(_HEADERS):
        table.add_column(header, justify="left" if number in (1, 2) else "right", no_wrap=True)
    for index, row in enumerate(rows):
        last = index + 1 == len(rows) or rows[index + 1].prompt_tokens != row.prompt_tokens
        expected = row.identical != (row.source == "control")
        table.add_row(*_cells(row), style=None if expected else "bold red", end_section=last)
    return table


def markdown_table(rows: Sequence[ServingRow]) -> str:
    """The same table in Markdown."""
    lines = ["| " + " | ".join(_HEADERS) + " |", "|" + "|".join(" --- " for _ in _HEADERS) + "|"]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write_chart(rows: Sequence[ServingRow], path: Path, title: str) -> None:
    """One panel per prompt length, one bar per source and backend, time to first token on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = [row for row in rows if row.source != "control"]
    lengths = sorted({row.prompt_tokens for row in shown})
    figure = Figure(figsize=(4.4 * len(lengths) + 0.6, 4.4), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    for panel, length in zip(panels, lengths, strict=True):
        _draw_panel(panel, [row for row in shown if row.prompt_tokens == length])
        panel.set_title(f"{length:,} prompt tokens", fontsize=11)
    panels[0].set_ylabel("time to first token, s (median; log scale)")
    backends = sorted({row.backend for row in shown}, key=lambda name: (name != "none", name != "tpusync", name))
    handles = [Patch(color=_colour(name), label="no cache" if name == "none" else name) for name in backends]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(title, fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_panel(panel: object, rows: Sequence[ServingRow]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(panel, Axes)
    sources = [source for source in SOURCE_TEXT if any(row.source == source for row in rows)]
    for position, source in enumerate(sources):
        group = [row for row in rows if row.source == source]
        width = 0.8 / len(group)
        for number, row in enumerate(group):
            x = position + (number - (len(group) - 1) / 2) * width
            error = row.spread * row.value / 2 or None
            panel.bar(x, row.value, width * 0.92, color=_colour(row.backend), yerr=error, ecolor="#444444", capsize=2)
            panel.annotate(
                f"{row.value:.2f}", (x, row.value), (0, 4), textcoords="offset points", ha="center", fontsize=7
            )
    panel.set_xticks(
        range(len(sources)), [SOURCE_TEXT[source] for source in sources], rotation=30, ha="right", fontsize=8
    )
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.margins(y=0.12)
    panel.grid(axis="y", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _colour(backend: str) -> str:
    return _COLOURS.get(backend, "#6a4c93")


def _cells(row: ServingRow) -> tuple[str, ...]:
    tiers = [str(row.cached_by_tier.get(tier, 0) or "") for tier in ("device", "host", "storage")]
    megabytes = f"{row.loaded_bytes / 1e6:.1f}" if row.loaded_bytes else ""
    rate = f"{row.loaded_bytes / row.ttft_s / 1e9:.2f}" if row.loaded_bytes and row.ttft_s else ""
    return (
        str(row.prompt_tokens),
        SOURCE_TEXT[row.source],
        row.backend,
        f"{row.ttft_s:.3f}",
        f"{100 * row.spread:.0f} %",
        "" if row.ratio is None else f"{row.ratio:.3f}",
        *tiers,
        megabytes,
        rate,
        "yes" if row.identical else "NO",
    )
