"""What a user may configure, read and checked in one place.

Options come from the extra config of SGLang's `--hicache-storage-backend-extra-config` (a mapping, JSON text, or
`@file` in TOML or JSON) on top of the file that the environment variable `TPUSYNC_CONFIG` names. A wrong key or
value is a ConfigError that names the key, the value and what is allowed.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from sglang_tpusync.errors import ConfigError

__all__ = [
    "BACKEND_NAME",
    "Environment",
    "Options",
    "as_mapping",
    "dram_path",
    "read_environment",
    "read_options",
    "seconds",
    "size_in_bytes",
    "status_path_of",
    "store_path",
]

BACKEND_NAME = "tpusync"

# Keys that SGLang puts into the same mapping for itself; they are not ours to judge.
_SGLANG_KEYS = frozenset(
    {
        "allocator",
        "backend_name",
        "class_name",
        "file_storage_path",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*|%)\s*\Z")
_SIZE_ALLOWED = "a number of bytes, or text such as '200GB', '64GiB' or '20%' (of the file system, or of the memory)"
_BYTES_MAX = 2**62
_UNLIMITED = "unlimited"

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SECONDS_MAX = 3.15e9
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smhd]?)\s*\Z")
_DURATION_ALLOWED = "a number of seconds from 1 on, or text such as '90m', '12h' or '7d'"

Size = int | float | str

_SIZES = (
    "capacity",
    "floor",
    "write_budget_per_day",
    "host_pool_capacity",
    "host_pool_reserve",
    "transfer_rate_per_s",
)


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of the store and of the copies. Sizes: bytes, or text with a unit, or percent of the file system."""

    path: str | None = None  # directory of the store; None: `sglang-tpusync` under the user's cache directory
    capacity: Size | None = None  # of the whole directory; None: the smaller of 20 % of what is free and 200 GB
    floor: Size | None = None  # free space left to others; None: 20 % of the file system
    write_budget_per_day: Size | None = None  # of the whole directory; None: one capacity; or "unlimited"
    fsync: Literal["none", "interval", "always"] = "none"
    io: Literal["auto", "uring", "threads", "buffered"] = "auto"
    num_threads: int = 0  # IO threads of one rank, for reading and for writing; 0: as the engine likes it
    register_memory: Literal["auto", "always", "never"] = "auto"  # the host pool, with io_uring; auto: if it is pinned
    allow_tmpfs: bool = False
    host_pool: Literal["private", "shared"] = "private"  # memory of the host pool; shared: a DRAM region of the node
    host_pool_path: str | None = None  # directory of the DRAM regions; None: one of this user under /dev/shm
    host_pool_capacity: Size | None = None  # of all DRAM regions there; None: what the memory allows
    host_pool_reserve: Size = "1GiB"  # memory that DRAM regions leave to others
    spill: Literal["through", "selective", "lazy", "never"] = "through"  # which pages of a shared pool go to disk
    status_path: str | None = None  # directory of what `tpusync top` reads; None: one of this user under /dev/shm
    ttl: int | float | str | None = None  # pages are misses so long after they were written; seconds, or '12h', '7d'
    latency_budget_s: float = 2.0  # of one transfer: a disk that is slower is left alone for a while
    trust_weight_version: bool = False  # SGLang's weight_version names weights, in every server of this model
    fingerprint: str | None = None  # names the weights, in place of the digest of the weight files
    get_timeout_s: float = 30.0  # of one batch of pages; what is late is a miss
    put_timeout_s: float = 60.0  # of one batch of pages; what is late is a refused write
    summary_interval_s: float = 60.0  # between two summary lines in the log; 0: only at close
    copy_threads: int = 2  # of the copies between device and host memory
    copy_timeout_s: float = 60.0  # of one copy between device and host memory
    transfer_secret_file: str | None = None  # the same random bytes on all servers: docs/deployment.md
    transfer_allow_unauthenticated: bool = False  # KV transfer beyond loopback without a secret
    transfer_bind: list[str] | None = None  # "address:port" on which a decode rank takes KV; None: its host
    transfer_streams: int = 4  # TCP streams from a prefill rank to a decode rank
    transfer_io_threads: int = 1  # of the KV transfer of one rank
    transfer_same_host: bool = True  # fetch KV from the memory of a prefill rank on this host instead of receiving it
    transfer_checksum: bool = True  # of KV that goes through a socket
    transfer_rate_per_s: Size | None = None  # bytes that a prefill rank sends at most; None: no limit
    transfer_silence_s: float = 2.0  # a peer that says nothing for so long is lost
    native_copies: bool = True  # copies between device and host memory by this package, where SGLang has none (CPU)


# Allowed range of each number, both ends included.
_RANGES: dict[str, tuple[float, float]] = {
    "num_threads": (0, 64),
    "latency_budget_s": (0.001, 3600),
    "get_timeout_s": (0.001, 3600),
    "put_timeout_s": (0.001, 3600),
    "summary_interval_s": (0, 86400),
    "copy_threads": (1, 64),
    "copy_timeout_s": (0.001, 3600),
    "transfer_streams": (1, 64),
    "transfer_io_threads": (1, 64),
    "transfer_silence_s": (0.1, 3600),
}


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Every environment variable that the package reads."""

    config_path: str | None  # TPUSYNC_CONFIG: a file of options, TOML or JSON
    cpu_engine: bool  # TPUSYNC_CPU_ENGINE=1: supply what SGLang lacks on `--device cpu`
    cache_home: Path  # XDG_CACHE_HOME, else ~/.cache


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    env = os.environ if environ is None else environ
    home = Path(env.get("HOME") or Path.home())
    cache = env.get("XDG_CACHE_HOME", "")
    return Environment(
        config_path=env.get("TPUSYNC_CONFIG") or None,
        cpu_engine=env.get("TPUSYNC_CPU_ENGINE") == "1",
        cache_home=Path(cache) if os.path.isabs(cache) else home / ".cache",
    )


def read_options(source: Mapping[str, Any] | str | None, environ: Mapping[str, str] | None = None) -> Options:
    """Options out of a mapping, JSON text, `@file` or nothing, on top of the file that TPUSYNC_CONFIG names.

    Raises ConfigError for a key, value or file that is not as it should be.
    """
    config_path = read_environment(environ).config_path
    merged = _read_file(config_path, "TPUSYNC_CONFIG") if config_path else {}
    merged.update(as_mapping(source))
    ours = {key: value for key, value in merged.items() if key not in _SGLANG_KEYS}
    for key in ours:
        if key not in Options.__struct_fields__:
            raise ConfigError(_unknown_key(key))
    options = _convert(ours)
    _check(options)
    return options


def store_path(options: Options, environ: Mapping[str, str] | None = None) -> Path:
    """The directory of the store, absolute. The default never lies under the directory for temporary files."""
    if options.path is not None:
        return Path(options.path).expanduser().absolute()
    path = read_environment(environ).cache_home / "sglang-tpusync"
    temporary = Path(tempfile.gettempdir()).resolve()
    if path.resolve().is_relative_to(temporary):
        raise ConfigError(
            f"option 'path' is needed: the default {path} lies under {temporary}, which is emptied at will; "
            "name a directory on a disk"
        )
    return path


def dram_path(options: Options) -> Path:
    """The directory of the node's DRAM regions, absolute."""
    return Path(options.host_pool_path or f"/dev/shm/sglang-tpusync-{os.getuid()}").expanduser().absolute()


def status_path_of(options: Options) -> Path:
    """The directory of the status files of this node's processes, absolute."""
    return Path(options.status_path or f"/dev/shm/sglang-tpusync-status-{os.getuid()}").expanduser().absolute()


def size_in_bytes(key: str, value: Size | None, file_system_bytes: int) -> int | None:
    """`value` of option `key` in bytes; None stays None. `20%` is 20 % of `file_system_bytes`."""
    if value is None:
        return None
    if isinstance(value, str):
        return _parse_size(key, value, file_system_bytes)
    if not 0 <= value <= _BYTES_MAX:
        raise ConfigError(f"option {key!r} = {value!r}: allowed is {_SIZE_ALLOWED}")
    return int(value)


def _parse_size(key: str, text: str, file_system_bytes: int) -> int:
    if key == "write_budget_per_day" and text.strip().lower() == _UNLIMITED:
        return _BYTES_MAX
    found = _SIZE.match(text)
    if found is None or (found[2] != "%" and found[2].lower() not in _UNITS):
        raise ConfigError(f"option {key!r} = {text!r}: allowed is {_SIZE_ALLOWED}")
    number = float(found[1])
    if found[2] == "%":
        if number > 100:
            raise ConfigError(f"option {key!r} = {text!r}: allowed is 0% to 100%")
        return int(file_system_bytes * number / 100)
    size = int(number * _UNITS[found[2].lower()])
    if size > _BYTES_MAX:
        raise ConfigError(f"option {key!r} = {text!r}: allowed is at most {_BYTES_MAX} bytes")
    return size


def seconds(key: str, value: float | str | None) -> float | None:
    """`value` of option `key` in seconds; None stays None. Raises ConfigError below one second and above a century."""
    found = _DURATION.match(str(value))
    if value is None:
        return None
    number = float(found[1]) * _SECONDS[found[2]] if found is not None else 0.0
    if not 1 <= number <= _SECONDS_MAX:
        raise ConfigError(f"option {key!r} = {value!r}: allowed is {_DURATION_ALLOWED}")
    return number


def as_mapping(source: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """The keys and values of a source of options, SGLang's own among them. Raises ConfigError if it cannot be read."""
    if source is None:
        return {}
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, str):
        raise ConfigError(f"the extra config is a {type(source).__name__}: allowed is a mapping, JSON text or '@file'")
    text = source.strip()
    if text.startswith("@"):
        return _read_file(text[1:], "the extra config")
    return _parse_json(text, "the extra config") if text else {}


def _read_file(path: str, named_by: str) -> dict[str, Any]:
    try:
        raw = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{named_by} names {path!r}, which cannot be read: {error.strerror}") from error
    where = f"{path!r}, named by {named_by},"
    if path.lower().endswith(".json"):
        return _parse_json(raw.decode("utf-8", "replace"), where)
    if path.lower().endswith(".toml"):
        try:
            return tomllib.loads(raw.decode("utf-8", "replace"))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{where} is not TOML: {error}") from error
    if path.lower().endswith((".yaml", ".yml")):
        return _parse_yaml(raw, where)
    raise ConfigError(f"{named_by} names {path!r}: allowed is a file that ends in .toml, .json or .yaml")


def _parse_yaml(raw: bytes, where: str) -> dict[str, Any]:
    """YAML, because SGLang takes it for its extra config; it comes with SGLang and not with this package."""
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError(f"{where} is YAML, for which the package PyYAML is missing: use .toml or .json") from error
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {error}") from error
    return _as_object(value, where)


def _parse_json(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    return _as_object(value, where)


def _as_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} holds a {type(value).__name__}: allowed is an object of options")
    return value


def _unknown_key(key: str) -> str:
    names = sorted(Options.__struct_fields__)
    near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"option {key!r} is unknown: {hint}allowed are {', '.join(names)}"


def _convert(values: dict[str, Any]) -> Options:
    """One option at a time, so that the message can name key and value."""
    for key, value in values.items():
        try:
            msgspec.convert({key: value}, Options)
        except msgspec.ValidationError as error:
            raise ConfigError(f"option {key!r} = {value!r}: allowed is {_allowed(key)}") from error
    return msgspec.convert(values, Options)


def _allowed(key: str) -> str:
    if key in _SIZES:
        return _SIZE_ALLOWED
    if key == "ttl":
        return _DURATION_ALLOWED
    hint = get_type_hints(Options)[key]
    if get_origin(hint) is Literal:
        return ", ".join(repr(choice) for choice in get_args(hint))
    kind = {bool: "true or false", int: "an integer", float: "a number"}.get(hint, "text")
    return f"{kind} from {_RANGES[key][0]} to {_RANGES[key][1]}" if key in _RANGES else kind


def _rate(key: str, value: Size | None) -> None:
    """A rate is no part of anything, and one of nothing would never end."""
    if value is not None and ("%" in str(value) or not size_in_bytes(key, value, file_system_bytes=1)):
        raise ConfigError(f"option {key!r} = {value!r}: allowed are at least 1 byte a second, or text such as '2GB'")


def _check(options: Options) -> None:
    for key, (low, high) in _RANGES.items():
        value = getattr(options, key)
        if not low <= value <= high:
            raise ConfigError(f"option {key!r} = {value!r}: allowed is {low} to {high}")
    for key in _SIZES:
        size_in_bytes(key, getattr(options, key), file_system_bytes=1)
    _rate("transfer_rate_per_s", options.transfer_rate_per_s)
    seconds("ttl", options.ttl)
    for key in ("path", "host_pool_path", "status_path", "fingerprint", "transfer_secret_file"):
        if getattr(options, key) == "":
            raise ConfigError(f"option {key!r} = '': allowed is text that is not empty")
