"""`tpusync bench evict`: what it reads, what it says, and that its replay agrees with a plain one."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sglang_tpusync import _core
from sglang_tpusync.bench.evict import gap_closed, measure
from sglang_tpusync.bench.report import read_report
from sglang_tpusync.bench.traces import Workload, WorkloadBuilder, generate, read_traces
from sglang_tpusync.cli.main import app
from sglang_tpusync.errors import ConfigError

MOONCAKE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]},
    {"timestamp": 20, "input_length": 1500, "output_length": 5, "hash_ids": [7, 8, 9]},
    {"timestamp": 20, "input_length": 1500, "output_length": 5, "hash_ids": [7, 10]},
]
AGENTIC = [
    {"hash_id_scope": "local", "requests": [{"t": 0.0, "hash_ids": [1, 2]}, {"t": 9.5, "hash_ids": [1, 2, 3]}]},
    {"hash_id_scope": "local", "requests": [{"t": 1.0, "hash_ids": [1]}, {"t": 2.0, "type": "subagent"}]},
]


def write_traces(directory: Path) -> Path:
    (directory / "mooncake").mkdir(parents=True)
    (directory / "kv-cache-tester").mkdir()
    lines = "".join(json.dumps(line) + "\n" for line in MOONCAKE)
    (directory / "mooncake" / "conversation_trace.jsonl").write_text(lines)
    for number, conversation in enumerate(AGENTIC):
        (directory / "kv-cache-tester" / f"trace_{number}.json").write_text(json.dumps(conversation))
    return directory


def lru_hits(work: Workload, num_slots: int) -> int:
    """Leading hits of a least recently used cache, page by page, the head touched last."""
    stored: OrderedDict[int, None] = OrderedDict()
    hits = 0
    begin = 0
    for end in work.ends.tolist():
        path = work.pages[begin:end].tolist()
        begin = end
        for page in path:
            if page not in stored:
                break
            hits += 1
        for page in reversed(path):
            stored[page] = None
            stored.move_to_end(page)
            if len(stored) > num_slots:
                stored.popitem(last=False)
    return hits


def test_traces_become_paths_of_numbers(tmp_path: Path) -> None:
    conversation, agentic = read_traces(write_traces(tmp_path))
    assert (conversation.name, conversation.capacities) == ("conversation", (1000, 5000, 20_000, 50_000))
    assert conversation.pages.tolist() == [0, 1, 0, 1, 2, 0, 3]
    assert conversation.ends.tolist() == [2, 5, 7]
    assert (agentic.name, agentic.capacities) == ("agentic", (10_000, 50_000))
    # In the order of time, the ids of each conversation its own, no request without ids.
    assert agentic.pages.tolist() == [0, 1, 2, 0, 1, 3]
    assert agentic.ends.tolist() == [2, 3, 6]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "truncated"),
        ('{"timestamp": 30}', "hash_ids"),
        ('{"timestamp": "x", "hash_ids": []}', "timestamp"),
        ('{"timestamp": 30, "hash_ids": [1.5]}', "hash_ids"),
        ('{"timestamp": 19, "hash_ids": [7]}', "timestamp 19"),
        ('{"timestamp": 30, "hash_ids": [8]}', "block 8 follows"),
        ('{"timestamp": 30, "hash_ids": [70, 70]}', "block 70 follows"),
        ("\xff", "line 1|malformed|invalid"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write_traces(tmp_path) / "mooncake" / "conversation_trace.jsonl"
    path.write_bytes(path.read_bytes() + line.encode("latin-1") + b"\n")
    with pytest.raises(ConfigError, match=rf"conversation_trace\.jsonl:4: .*({message})"):
        read_traces(tmp_path)
    result = CliRunner().invoke(app, ["bench", "evict", "--traces", str(tmp_path)])
    assert result.exit_code == 2
    assert "conversation_trace.jsonl:4: " in result.output


@pytest.mark.parametrize("text", ["[]", '{"hash_id_scope": "local"}', '{"hash_id_scope": "global", "requests": []}'])
def test_a_bad_conversation_is_named(tmp_path: Path, text: str) -> None:
    (write_traces(tmp_path) / "kv-cache-tester" / "trace_1.json").write_text(text)
    with pytest.raises(ConfigError, match=r"trace_1\.json:1: "):
        read_traces(tmp_path)


def test_a_directory_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither mooncake"):
        read_traces(tmp_path)


def test_the_same_seed_gives_the_same_requests() -> None:
    first, again, other = generate(3, 500), generate(3, 500), generate(4, 500)
    assert np.array_equal(first.pages, again.pages)
    assert np.array_equal(first.ends, again.ends)
    assert not np.array_equal(first.pages[:1000], other.pages[:1000])
    assert first.ends.size == 500


def test_the_replay_agrees_with_a_plain_one() -> None:
    work = generate(1, 1500)
    for num_slots in (50, 400, 3000):
        result = _core.evict.replay(
            work.pages, work.ends, policy="lru", num_slots=num_slots, front_pages=0, requests_after_crash=0
        )
        assert result["hits"] == lru_hits(work, num_slots)
        assert result["pages"] == work.pages.size


def test_rows_compare_with_the_optimum_and_the_peers() -> None:
    rows = measure([generate(0, 3000, (300, 1000))], front_blocks=100)
    assert [row.case.rpartition(": ")[2] for row in rows] == [
        *("hit rate", "gap_closed", "hit rate after a crash", "blocks written")
    ] * 2
    for hit_rate, gap in zip(rows[::4], rows[1::4], strict=True):
        assert hit_rate.limit == "Belady's optimum"
        assert hit_rate.limit_value is not None
        assert set(hit_rate.peers) == {"LRU", "S3-FIFO"}
        assert 0 < hit_rate.value <= hit_rate.limit_value
        assert gap.value == gap_closed(hit_rate.value, hit_rate.peers["LRU"], hit_rate.limit_value)
        assert gap.goal is None
    for written in rows[3::4]:
        assert written.value < written.peers["LRU"]  # admission refuses what is worth less than what it would displace
    assert measure([generate(0, 3000, (300, 1000))], front_blocks=100) == rows


def test_the_goal_of_a_gap_is_absolute() -> None:
    builder = WorkloadBuilder()
    for i in range(50):
        builder.add([0, 1000 + i], "here")
    hit_rate, gap = measure([builder.build("conversation", (1000,))])
    assert (gap.limit_value, gap.goal, gap.ratio) == (0.30, 1.0, 1.0 / 0.30)  # nothing to gain: all of it
    assert hit_rate.value == hit_rate.limit_value == 49.0


@pytest.mark.parametrize(
    ("pages", "ends", "message"),
    [
        ([0, 0], [2], "page 0 twice"),
        ([0, 5], [2], "page 5"),
        ([0, 1], [3], "ends at 3"),
        ([0, 1], [2, 1], "ends at 1"),
        ([0, 1], [1], "of no request"),
    ],
)
def test_numbers_that_are_no_requests_are_refused(pages: list[int], ends: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _core.evict.optimum(np.array(pages, np.uint32), np.array(ends, np.uint64), num_slots=1)


def test_the_command_writes_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "evict.json"
    result = CliRunner().invoke(app, ["bench", "evict", "--requests", "2000", "--json", str(path)])
    assert result.exit_code in (0, 1), result.output
    report = read_report(path)
    assert report.bench == "evict"
    assert len(report.rows) == 6
    assert "generated, seed 0, 1000 blocks: hit rate" in result.output
