"""The common language of the benchmarks: what a row may say, and what survives a round trip."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from sglang_tpusync.bench.host import describe_host
from sglang_tpusync.bench.report import (
    Report,
    Row,
    ServingRow,
    is_ahead,
    measured,
    meets_goal,
    read_report,
    spread_of,
    write_report,
)
from sglang_tpusync.bench.rounds import interleaved, measure_interleaved

ROW_FIELDS = ["case", "value", "unit", "better", "spread", "limit", "limit_value", "ratio", "goal", "peers"]
SERVING_FIELDS = ["prompt_tokens", "source", "backend", "ttft_s", "cached_tokens", "identical"]


def serving_row() -> ServingRow:
    return ServingRow(
        case="2048 tokens, l3, tpusync",
        value=0.1,
        unit="s",
        better="lower",
        prompt_tokens=2048,
        source="l3",
        backend="tpusync",
        ttft_s=0.1,
        cached_tokens=1984,
        identical=True,
    )


def test_a_report_survives_the_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "report.json"
    plain = measured("read", [1.0, 2.0, 3.0], unit="GB/s", better="higher", limit="fio", limit_samples=[4.0], goal=0.4)
    write_report(path, "store", {"cores": 2}, [plain, serving_row()])
    report = read_report(path)
    assert report == Report(bench="store", host={"cores": 2}, rows=[plain, serving_row()])
    assert isinstance(report.rows[1], ServingRow)
    assert list(path.parent.iterdir()) == [path]


def test_the_document_has_exactly_the_fields_of_the_language(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_report(path, "store", {}, [measured("read", [1.0], unit="s", better="lower"), serving_row()])
    document = json.loads(path.read_text())
    assert list(document) == ["bench", "host", "rows"]
    assert list(document["rows"][0]) == ROW_FIELDS
    assert list(document["rows"][1])[: len(ROW_FIELDS) + len(SERVING_FIELDS)] == ROW_FIELDS + SERVING_FIELDS


def test_medians_spread_and_ratio_come_from_the_samples() -> None:
    row = measured(
        "x", [4.0, 1.0, 2.0, 3.0, 5.0], unit="s", better="lower", limit="best", limit_samples=[1.0, 2.0, 9.0],
        peers={"other": [7.0, 6.0, 8.0]},
    )  # fmt: skip
    assert (row.value, row.limit_value, row.ratio, row.peers) == (3.0, 2.0, 1.5, {"other": 7.0})
    assert row.spread == pytest.approx(2.0 / 3.0)
    assert spread_of([5.0]) == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"value": float("nan")},
        {"value": float("inf")},
        {"spread": -0.1},
        {"limit": "x"},
        {"limit_value": 1.0},
        {"limit": "x", "limit_value": 2.0, "ratio": 0.7},
        {"ratio": 1.0},
        {"goal": 1.0},
        {"peers": {"a": float("nan")}},
        {"case": ""},
        {"unit": ""},
    ],
)
def test_a_row_that_contradicts_itself_is_refused(wrong: dict[str, object]) -> None:
    right: dict[str, object] = {"case": "c", "value": 1.0, "unit": "s", "better": "lower"}
    Row(**right)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r".+"):
        Row(**(right | wrong))  # type: ignore[arg-type]


def test_unknown_fields_and_words_are_refused_when_reading(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_report(path, "serving", {}, [serving_row()])
    document = json.loads(path.read_text())
    for change in ({"source": "l4"}, {"better": "bigger"}, {"surprise": 1}):
        path.write_text(json.dumps(document | {"rows": [document["rows"][0] | change]}))
        with pytest.raises(msgspec.ValidationError):
            read_report(path)


def test_a_goal_is_a_minimum_where_higher_is_better_and_a_maximum_where_lower_is() -> None:
    def row(better: str, value: float) -> Row:
        limits = {"limit": "l", "limit_value": 1.0, "ratio": value, "goal": 0.5}
        return Row(case="c", value=value, unit="u", better=better, **limits)  # type: ignore[arg-type]

    assert meets_goal(row("higher", 0.6)) is True
    assert meets_goal(row("higher", 0.4)) is False
    assert meets_goal(row("lower", 0.4)) is True
    assert meets_goal(row("lower", 0.6)) is False
    assert meets_goal(Row(case="c", value=1.0, unit="u", better="lower")) is None


def test_ahead_means_not_behind_by_more_than_the_spread() -> None:
    def row(better: str, peer: float) -> Row:
        return Row(case="c", value=1.0, unit="u", better=better, spread=0.1, peers={"p": peer})  # type: ignore[arg-type]

    assert is_ahead(row("higher", 1.09), "p")
    assert not is_ahead(row("higher", 1.11), "p")
    assert is_ahead(row("lower", 0.91), "p")
    assert not is_ahead(row("lower", 0.89), "p")


def test_every_round_has_every_arm_and_another_first_one() -> None:
    order = list(interleaved(["a", "b", "c"], 3))
    assert order[:3] == [(0, "a"), (0, "b"), (0, "c")]
    assert [arm for _, arm in order[::3]] == ["a", "b", "c"]
    assert all(sorted(arm for index, arm in order if index == n) == ["a", "b", "c"] for n in range(3))
    counts = iter(range(6))
    assert measure_interleaved({"a": lambda: next(counts), "b": lambda: next(counts)}, 3) == {
        "a": [0, 3, 4],
        "b": [1, 2, 5],
    }


def test_the_host_is_described_without_names_and_paths(tmp_path: Path) -> None:
    import platform

    host = describe_host(tmp_path, rounds=5)
    assert {"cpu", "cores", "memory_bytes", "python", "versions", "file_system", "settings"} <= set(host)
    text = json.dumps(host)
    assert str(tmp_path) not in text
    assert platform.node() not in text
