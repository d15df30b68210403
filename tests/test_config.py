"""Options: every source, every wrong key and value with a message that helps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_tpusync.config import Options, read_environment, read_options, seconds, size_in_bytes, store_path
from sglang_tpusync.errors import ConfigError

NONE: dict[str, str] = {}


def test_every_source_gives_the_same_options(tmp_path: Path) -> None:
    values = {"path": "/data/kv", "capacity": "200GB", "num_threads": 2, "allow_tmpfs": True}
    as_json, as_toml, as_yaml = tmp_path / "a.json", tmp_path / "a.toml", tmp_path / "a.yaml"
    as_yaml.write_text("path: /data/kv\ncapacity: 200GB\nnum_threads: 2\nallow_tmpfs: true\n")
    as_json.write_text(json.dumps(values))
    as_toml.write_text('path = "/data/kv"\ncapacity = "200GB"\nnum_threads = 2\nallow_tmpfs = true\n')
    expected = Options(**values)
    sources: list[Any] = [values, json.dumps(values), f"@{as_json}", f"@{as_toml}", f"@{as_yaml}"]
    for source in sources:
        assert read_options(source, NONE) == expected
    assert read_options(None, {"TPUSYNC_CONFIG": str(as_toml)}) == expected


def test_the_extra_config_wins_over_the_file_of_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('fsync = "always"\nnum_threads = 7\n')
    options = read_options({"num_threads": 3}, {"TPUSYNC_CONFIG": str(file)})
    assert (options.fsync, options.num_threads) == ("always", 3)


def test_keys_of_sglang_are_left_alone() -> None:
    theirs = {
        "prefetch_threshold": 1, "prefetch_timeout_base": 1, "prefetch_timeout_per_ki_token": 0.25,
        "hicache_storage_pass_prefix_keys": True, "tp_lcm_size": 4, "backend_name": "tpusync", "allocator": "shm",
        "module_path": "sglang_tpusync.hicache", "class_name": "TpuSyncStorage", "interface_v1": 1,
    }  # fmt: skip
    assert read_options(theirs, NONE) == Options()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"capcity": 1}, ["'capcity'", "did you mean 'capacity'?"]),
        ({"zzz": 1}, ["'zzz'", "allowed are", "write_budget_per_day"]),
        ({"num_threads": -1}, ["'num_threads' = -1", "0 to 64"]),
        ({"num_threads": "two"}, ["'num_threads' = 'two'", "an integer from 0 to 64"]),
        ({"num_threads": 2.5}, ["'num_threads' = 2.5", "an integer"]),
        ({"fsync": "never"}, ["'fsync' = 'never'", "'none', 'interval', 'always'"]),
        ({"io": 1}, ["'io' = 1", "'uring'"]),
        ({"allow_tmpfs": "yes"}, ["'allow_tmpfs' = 'yes'", "true or false"]),
        ({"capacity": "20 bananas"}, ["'capacity' = '20 bananas'", "'200GB'"]),
        ({"capacity": "120%"}, ["'capacity' = '120%'", "0% to 100%"]),
        ({"capacity": -1}, ["'capacity' = -1"]),
        ({"floor": True}, ["'floor' = True"]),
        ({"capacity": "unlimited"}, ["'capacity' = 'unlimited'"]),
        ({"get_timeout_s": float("nan")}, ["'get_timeout_s' = nan"]),
        ({"path": ""}, ["'path' = ''"]),
        ({"path": 7}, ["'path' = 7", "text"]),
        ({"transfer_rate_per_s": "20%"}, ["'transfer_rate_per_s' = '20%'", "byte a second"]),
        ({"transfer_rate_per_s": 0}, ["'transfer_rate_per_s' = 0"]),
        ({"transfer_streams": 65}, ["'transfer_streams' = 65", "1 to 64"]),
        ("[1]", ["holds a list"]),
        ("{", ["is not JSON"]),
        ("@/nowhere.toml", ["'/nowhere.toml'", "cannot be read"]),
        ("@/nowhere.ini", ["'/nowhere.ini'"]),
        (7, ["int"]),
    ],
)
def test_a_wrong_key_or_value_is_named(source: Any, expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_options(source, NONE)
    for part in expected:
        assert part in str(caught.value)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    for name, text, expected in [
        ("a.ini", "", ".toml, .json or .yaml"),
        ("a.toml", "= 1", "is not TOML"),
        ("a.json", "x", "JSON"),
        ("a.yaml", "- 1", "holds a list"),
        ("a.yml", "{", "is not YAML"),
    ]:
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=expected):
            read_options(f"@{tmp_path / name}", NONE)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None), (5, 5), ("5", 5), ("1.5KB", 1500), ("2 KiB", 2048), ("200GB", 200 * 10**9), ("1TiB", 2**40),
        ("20%", 200), ("0", 0),
    ],
)  # fmt: skip
def test_sizes(value: Any, expected: int | None) -> None:
    assert size_in_bytes("capacity", value, 1000) == expected


def test_only_the_write_budget_may_be_unlimited() -> None:
    assert size_in_bytes("write_budget_per_day", "unlimited", 1000) == 2**62


def test_the_default_path_is_under_the_cache_directory_of_the_user() -> None:
    assert store_path(Options(), {"HOME": "/home/u"}) == Path("/home/u/.cache/sglang-tpusync")
    assert store_path(Options(), {"HOME": "/home/u", "XDG_CACHE_HOME": "/big"}) == Path("/big/sglang-tpusync")
    assert store_path(Options(path="/data"), NONE) == Path("/data")


def test_the_default_path_is_never_under_the_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with pytest.raises(ConfigError, match="option 'path' is needed"):
        store_path(Options(), {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert store_path(Options(path=str(tmp_path)), NONE) == tmp_path


def test_a_relative_cache_home_is_ignored_as_its_standard_asks() -> None:
    assert read_environment({"HOME": "/home/u", "XDG_CACHE_HOME": "rel"}).cache_home == Path("/home/u/.cache")


def test_every_numeric_option_has_a_range() -> None:
    from sglang_tpusync import config

    numbers = {f.name for f in msgspec.structs.fields(Options) if f.type in (int, float)}
    assert numbers == set(config._RANGES)


def test_a_time_to_live_is_seconds_or_text_with_a_unit() -> None:
    assert [seconds("ttl", value) for value in (None, 90, "90", "1.5h", "7 d", "30m")] == [
        None, 90, 90, 5400, 7 * 86400, 1800,
    ]  # fmt: skip
    for wrong in (0, 0.5, -3, "1w", "soon", "", "200000d", float("nan")):
        with pytest.raises(ConfigError, match=r"'ttl' = .*allowed is a number of seconds from 1 on"):
            read_options({"ttl": wrong}, NONE)
    assert read_options({"ttl": "12h"}, NONE).ttl == "12h"
