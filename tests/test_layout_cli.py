"""`tpusync layout` and `tpusync bench layout` as a user runs them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from sglang_tpusync.bench.layout import CASES, Case, measure
from sglang_tpusync.bench.report import read_report
from sglang_tpusync.cli.bench_layout import layout as bench_layout
from sglang_tpusync.cli.layout import app
from sglang_tpusync.errors import ConfigError
from sglang_tpusync.layout import TiledLayout


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None:
        raise result.exception
    return result.output


def test_show_says_what_a_page_is() -> None:
    text = invoke("show", "{3,2,1,0:T(8,128)(2,1)}", "bf16", "4096,64,8,64")
    assert "536,870,912, of them padding 268,435,456 (50%)" in text
    assert "contiguous, 131,072 bytes; its elements are 256 runs of 256 bytes and more" in text
    assert "[8, 128] then [2, 1]" in text
    assert "     1      3      5" in text


def test_show_knows_scalars_and_empty_arrays() -> None:
    assert "a scalar" in invoke("show", "{:T(128)}", "F32", "")
    assert "bytes              0" in invoke("show", "{1,0}", "F32", "0,128")


def test_diff_says_what_a_conversion_takes() -> None:
    tiled = "{3,2,1,0:T(8,128)(2,1)}"
    text = invoke("diff", tiled, "linear", "BF16", "64,64,8,128")
    assert "conversion: split 8388608 bytes" in text
    assert "measured here on one thread" in text
    assert "[8, 128] then [2, 1]\n                     none" in text
    assert "the same           major to minor, element, bytes" in text
    assert "not measured above 64 MiB" in invoke("diff", tiled, "linear", "BF16", "4096,64,8,128")
    assert "nothing to convert" in invoke("diff", tiled, "{3,2,1,0:T(2,128)(2,1)}", "BF16", "64,64,8,128")
    assert "through codes" in invoke("diff", "{1,0:E(4)}", "linear", "S4", "8,8")


def test_malformed_arguments_are_errors_of_ours() -> None:
    with pytest.raises(ConfigError, match="position 7"):
        invoke("show", "{1,0:T(x)}", "F32", "4,4")
    with pytest.raises(ConfigError, match="numbers separated by commas"):
        invoke("show", "{1,0}", "F32", "4;4")


def test_the_benchmark_measures_every_case_and_writes_its_report(tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    command = typer.Typer()
    command.command()(bench_layout)
    CliRunner().invoke(command, ["--pages", "128", "--rounds", "1", "--json", str(path)])
    report = read_report(path)
    assert report.bench == "layout"
    assert [row.case.split(" ", 1)[0] for row in report.rows] == [case.name.split(" ", 1)[0] for case in CASES]
    assert all(row.ratio and row.ratio > 0 for row in report.rows)


@pytest.mark.parametrize("case", [case for case in CASES if case.name.endswith("tile")], ids=lambda case: case.name)
def test_numpy_does_the_same_conversion(case: Case) -> None:
    (row,) = measure(128, 1, [case])
    assert row.peers["numpy"] > 0


def test_numpys_ways_give_what_ours_give() -> None:
    """The transposes that the benchmark times, on arrays with content."""
    rng = np.random.default_rng(3)
    for text, dtype, dims, split, order in [
        ("{4,3,2,1,0:T(4,128)(4,1)}", "F8E4M3FN", (128, 4, 4, 4, 128), (128, 4, 4, 128, 4), (0, 1, 2, 4, 3)),
        ("{0,3,2,1:T(8,128)(2,1)}", "BF16", (256, 4, 1, 576), (4, 72, 2, 4, 128, 2), (2, 4, 0, 1, 3, 5)),
    ]:
        layout = TiledLayout.parse(text, dtype, dims)
        codes = rng.integers(0, 255, dims, dtype=np.uint8).astype(layout.code_dtype)
        seen = layout.tile(codes).view(layout.code_dtype).reshape(split).transpose(order)
        np.testing.assert_array_equal(seen.reshape(dims), codes)
