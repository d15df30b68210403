"""`tpusync layout`: what a TPU layout means, and what lies between two of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_tpusync.errors import ConfigError

if TYPE_CHECKING:
    from sglang_tpusync.layout import Plan, TiledLayout

__all__ = ["app"]

app = typer.Typer(help="Explain TPU memory layouts.", no_args_is_help=True)

_MAP_ROWS, _MAP_LANES = 8, 8
_MEASURED_BYTES_MAX = 64 << 20
_ROUNDS = 5

LayoutText = Annotated[
    str, typer.Argument(help="As XLA prints it: '{1,0:T(8,128)(2,1)}'; 'linear'; or 'default' to ask libtpu.")
]
Dtype = Annotated[str, typer.Argument(help="BF16, F8E4M3FN, S4, ...")]
DimsText = Annotated[str, typer.Argument(help="Dimensions, separated by commas.")]
Topology = Annotated[str, typer.Option(help="For 'default'.")]


@app.command()
def show(text: LayoutText, dtype: Dtype, dims: DimsText, topology: Topology = "v6e:2x2") -> None:
    """Geometry, padding, pages and a map of the first tile."""
    layout = _layout(text, dtype, dims, topology)
    typer.echo(f"{layout.dtype} {list(layout.dims)} {layout.text}")
    for name, value in _facts(layout).items():
        typer.echo(f"  {name:18} {value}")
    if _product(layout.dims) and layout.dims:
        _draw_map(layout)


@app.command()
def diff(left: LayoutText, right: LayoutText, dtype: Dtype, dims: DimsText, topology: Topology = "v6e:2x2") -> None:
    """How two layouts of one array differ, and what it takes to get from one to the other."""
    a, b = _layout(left, dtype, dims, topology), _layout(right, dtype, dims, topology)
    typer.echo(f"{a.dtype} {list(a.dims)}\n  from {a.text}\n  to   {b.text}")
    same = []
    for (name, one), other in zip(_facts(a).items(), _facts(b).values(), strict=True):
        if one == other:
            same.append(name)
        else:
            typer.echo(f"  {name:18} {one}\n  {'':18} {other}")
    if same:
        typer.echo(f"  {'the same':18} {', '.join(same)}")
    typer.echo(_conversion(a, b))


def _facts(layout: TiledLayout) -> dict[str, str]:
    padding = layout.padded_bytes - _product(layout.dims) * layout.element_bits / 8
    order = " ".join(f"{dim}:{layout.dims[dim]}" for dim in reversed(layout.minor_to_major))
    return {
        "major to minor": order or "a scalar",
        "tiles": " then ".join(str(list(tile)) for tile in layout.tiles) or "none",
        "element": f"{layout.element_bits} bits",
        "bytes": f"{layout.padded_bytes:,}, of them padding {padding:,.0f}{_share(layout, padding)}",
        "page (dimension 0)": _page(layout),
    }


def _conversion(a: TiledLayout, b: TiledLayout) -> str:
    from sglang_tpusync.layout import Shard, ShardSpec, plan

    if a.element_bits != b.element_bits:
        return f"elements of {a.element_bits} and of {b.element_bits} bits: through codes, untile then tile"
    if _product(a.dims) == 0:
        return "nothing to convert"
    origin = (0,) * len(a.dims)
    specs = [
        ShardSpec(dims=a.dims, dtype=a.dtype, shards=(Shard(origin=origin, extent=a.dims, layout=layout),))
        for layout in (a, b)
    ]
    steps = plan(*specs)
    line = steps.describe().splitlines()[1].partition(": ")[2]
    whole = f"runs {a.padded_bytes} bytes, 1 loops, pieces of {a.padded_bytes} bytes and more"
    if a.padded_bytes == b.padded_bytes and line == whole:
        return "the same bytes in the same places: nothing to convert"
    return f"conversion: {line}\n            {_MEANING[line.split()[0]]}\n            {_cost(steps)}"


def _cost(steps: Plan) -> str:
    """The best of a few rounds on this machine, beside a plain copy of as many bytes."""
    import numpy as np

    if max(sum(steps.src_bytes), sum(steps.dst_bytes)) > _MEASURED_BYTES_MAX:
        return f"not measured above {_MEASURED_BYTES_MAX >> 20} MiB: give the dimensions of a page or a few"
    source, target = (np.ones(sizes[0], dtype=np.uint8) for sizes in (steps.src_bytes, steps.dst_bytes))
    plain = np.ones(steps.moved_bytes, dtype=np.uint8)
    copied = plain.copy()
    best, best_plain = (
        min(_timed(run) for _ in range(_ROUNDS))
        for run in (lambda: steps.apply([source], [target]), lambda: np.copyto(copied, plain))
    )
    rate, plain_rate = (steps.moved_bytes / seconds / 1e9 for seconds in (best, best_plain))
    return f"measured here on one thread: {best * 1e6:,.0f} us, {rate:.2f} GB/s; a plain copy {plain_rate:.2f} GB/s"


def _timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


_MEANING = {
    "runs": "memory is copied in the pieces named: near the speed of memcpy for long ones",
    "split": "packed words are taken apart into rows: near the speed of memcpy",
    "join": "rows are packed into words: near the speed of memcpy",
    "pick": "one row is picked out of packed words: half of what is read is used",
    "repack": "words are made anew from rows of other words",
    "transpose": "the minor dimensions change places: a fraction of memcpy",
    "elements": "every element moves for itself: slow",
    "bits": "elements of less than a byte move one by one: slow",
}


def _layout(text: str, dtype: str, dims: str, topology: str) -> TiledLayout:
    from sglang_tpusync.layout import TiledLayout, default

    try:
        shape = tuple(int(dim) for dim in dims.split(",") if dim.strip())
    except ValueError as error:
        raise ConfigError(f"dims '{dims}': numbers separated by commas") from error
    if text == "default":
        return default(dtype, shape, topology)
    return TiledLayout.linear(dtype, shape) if text == "linear" else TiledLayout.parse(text, dtype, shape)


def _page(layout: TiledLayout) -> str:
    if not layout.dims or layout.dims[0] == 0:
        return "none"
    try:
        runs = layout.runs(0)
    except ConfigError:
        return "does not consist of whole bytes"
    pieces = int(runs["count"].sum())
    shortest = int(runs["length"].min())
    torn = "1 run" if pieces == 1 else f"{pieces:,} runs of {shortest:,} bytes and more"
    if layout.page_bytes is None:
        return f"not a stretch of its own; its elements are {torn}"
    return f"contiguous, {layout.page_bytes:,} bytes; its elements are {torn}"


def _share(layout: TiledLayout, padding: float) -> str:
    return f" ({padding / layout.padded_bytes:.0%})" if layout.padded_bytes else ""


def _product(dims: tuple[int, ...]) -> int:
    product = 1
    for dim in dims:
        product *= dim
    return product


def _draw_map(layout: TiledLayout) -> None:
    """Places of the first elements of the two most minor dimensions, in elements."""
    minor = layout.minor_to_major[0]
    second = layout.minor_to_major[1] if len(layout.dims) > 1 else None
    lanes = min(_MAP_LANES, layout.dims[minor])
    rows = min(_MAP_ROWS, layout.dims[second]) if second is not None else 1
    title = f"dimension {minor} across" + (f", dimension {second} down" if second is not None else "")
    typer.echo(f"  places of elements, {title}:")
    for row in range(rows):
        places = []
        for lane in range(lanes):
            index = [0] * len(layout.dims)
            index[minor] = lane
            if second is not None:
                index[second] = row
            places.append(layout.offset_bits(index) // layout.element_bits)
        more = " ..." if layout.dims[minor] > lanes else ""
        typer.echo("    " + " ".join(f"{place:6}" for place in places) + more)
