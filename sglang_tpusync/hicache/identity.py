"""What makes two pages the same: the namespace of a rank's pages in the store.

SGLang's key says which tokens a page holds. The namespace says everything else: model, weights, adapters, dtype,
page size, layers, heads, byte layout, format. It is one SHA-256 over the canonical JSON of these fields; any
difference is another namespace, hence a miss. A rank is never part of it, only the heads and layers that the rank
holds.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sglang_tpusync.errors import ConfigError

__all__ = [
    "FORMAT_VERSION",
    "Namespace",
    "Shard",
    "draft_fields",
    "head_range",
    "layout_of",
    "namespace_of",
    "shard_of_process",
    "weights_digest",
]

FORMAT_VERSION = 1  # of the fields and of the order of bytes in a page

# Settings of SGLang's `model` namespace that say how weights arrive, not what they are. All others are part of the
# identity, so that a setting that a later SGLang adds separates pages rather than mixing them.
_MODEL_SETTINGS_IGNORED = frozenset(
    {
        "checkpoint_engine_wait_weights_before_ready",
        "custom_weight_loader",
        "delete_ckpt_after_loading",
        "download_dir",
        "engine_info_bootstrap_port",
        "is_startup_weight_load_overlap",
        "model_checksum",
        "modelexpress_config",
        "modelopt_checkpoint_save_path",
        "modelopt_export_path",
        "shared_experts",
        "startup_weight_load_mode",
        "trust_remote_code",
        "weight_cache_mode",
        "weight_cache_socket",
        "weight_cache_timeout",
        "weight_loader_disable_mmap",
        "weight_loader_drop_cache_after_load",
        "weight_loader_prefetch_checkpoints",
        "weight_loader_prefetch_num_threads",
    }
)
_MODEL_PREFIXES_IGNORED = ("remote_instance_weight_loader_",)
_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".npz", ".json", ".py")
_HEADER_BYTES_MAX = 64 << 20


class Namespace:
    """The identity of a rank's pages. Immutable."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.json = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        self.digest = hashlib.sha256(self.json.encode()).digest()
        self.fields: dict[str, Any] = json.loads(self.json)

    def of_epoch(self, name: str | None) -> Namespace:
        """The same for other weights; None: for those of the start."""
        fields = {key: value for key, value in self.fields.items() if key != "weights_epoch"}
        return Namespace(fields if name is None else {**fields, "weights_epoch": name})


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a model that a rank holds, as SGLang's HiCacheStorageConfig tells it."""

    is_mla_model: bool
    tp_rank: int
    tp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    dcp_rank: int
    dcp_size: int


def shard_of_process(is_mla_model: bool) -> Shard:
    """What SGLang will say when it attaches a store, as far as it is known before that."""
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    attention = is_dp_attention_enabled()
    return Shard(
        is_mla_model=is_mla_model,
        tp_rank=parallel.attn_tp_rank if attention else parallel.tp_rank,
        tp_size=parallel.attn_tp_size if attention else parallel.tp_size,
        attn_cp_rank=parallel.attn_cp_rank,
        attn_cp_size=parallel.attn_cp_size,
        dcp_rank=parallel.attn_dcp_rank,
        dcp_size=parallel.attn_dcp_size,
    )


def namespace_of(pool: Any, storage_config: Any, fingerprint: str | None) -> Namespace:
    """The namespace of the pages of `pool`, an SGLang host pool, in the process that holds the model.

    Raises ConfigError if the model cannot be identified and no fingerprint is configured.
    """
    fields = {
        "format": FORMAT_VERSION,
        "model": {"fingerprint": fingerprint} if fingerprint is not None else _model_fields(),
        "adapters": [] if fingerprint is not None else _adapter_fields(),
        "draft": draft_fields(
            int(pool.layer_num) - int(getattr(pool, "target_layer_num", pool.layer_num)), fingerprint
        ),
        "kv_dtype": str(pool.dtype),
        "page_size": int(pool.page_size),
        "layers": [int(pool.start_layer), int(pool.end_layer), int(pool.layer_num)],
        "heads": _heads_of(pool, storage_config),
        "layout": layout_of(pool),
        "context": _context_shard(storage_config),
    }
    return Namespace(fields)


def head_range(rank: int, size: int, total: int) -> tuple[int, int]:
    """The KV heads [first, last + 1) that tensor-parallel `rank` of `size` holds of `total`.

    With more ranks than heads, each head is held by size / total neighbouring ranks.
    """
    if total >= size:
        per_rank = total // size
        return rank * per_rank, (rank + 1) * per_rank
    head = rank * total // size
    return head, head + 1


def weights_digest(path: str, *, times: bool = True) -> str:
    """SHA-256 over names, sizes, times and headers of the files that make up a model or adapter at `path`.

    Without `times` copies of a model on two hosts have one digest. `path` is a directory, a file, or the name of a
    repository in the local Hugging Face cache. Raises ConfigError otherwise.
    """
    where = _local_path(path)
    files = [where] if where.is_file() else sorted(_weight_files(where))
    if not files:
        raise ConfigError(f"no weight files under {where}: configure 'fingerprint' to name these weights yourself")
    digest = hashlib.sha256()
    root = where.parent if where.is_file() else where
    for file in files:
        stat = file.stat()
        changed = stat.st_mtime_ns if times else ""
        digest.update(f"{file.relative_to(root)}\0{stat.st_size}\0{changed}\0".encode())
        digest.update(hashlib.sha256(_header_bytes(file)).digest())
    return digest.hexdigest()


def _weight_files(root: Path) -> Iterable[Path]:
    for directory, children, names in os.walk(root):
        children[:] = [child for child in children if not child.startswith(".")]
        yield from (Path(directory, name) for name in names if name.endswith(_WEIGHT_SUFFIXES))


def _header_bytes(file: Path) -> bytes:
    """The part of a file that describes its tensors; of a small text file, all of it."""
    with open(file, "rb") as stream:
        if file.suffix == ".safetensors":
            length = int.from_bytes(stream.read(8), "little")
            return stream.read(min(length, _HEADER_BYTES_MAX))
        if file.suffix in (".json", ".py"):
            return stream.read(_HEADER_BYTES_MAX)
        return stream.read(1 << 20)


def _local_path(path: str) -> Path:
    where = Path(path).expanduser()
    if where.exists():
        return where.resolve()
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(path, "config.json")
    except (ImportError, ValueError):
        found = None
    if isinstance(found, str):
        return Path(found).parent
    raise ConfigError(f"{path!r} is no local directory: configure 'fingerprint' to name these weights yourself")


def _model_fields() -> dict[str, Any]:
    try:
        from sglang.srt.runtime_context import get_device, get_model

        model = get_model()
        settings = dict(model._fields)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"the model of this process is unknown ({error}): configure 'fingerprint' to name it"
        ) from error
    fields = {
        key: _plain(value)
        for key, value in settings.items()
        if key not in _MODEL_SETTINGS_IGNORED and not key.startswith(_MODEL_PREFIXES_IGNORED)
    }
    if settings.get("load_format") == "dummy":
        fields["random_seed"] = get_device().random_seed
    fields["weights"] = weights_digest(str(settings["model_path"]))
    return fields


def _adapter_fields() -> list[dict[str, Any]]:
    from sglang.srt.runtime_context import get_lora

    paths = get_lora().lora_paths or []
    items = paths.items() if isinstance(paths, Mapping) else ((None, entry) for entry in paths)
    adapters = []
    for name, entry in items:
        path = entry if isinstance(entry, str) else getattr(entry, "lora_path", None)
        label = name or getattr(entry, "lora_name", None) or path
        if path is None:
            raise ConfigError(
                f"the files of LoRA adapter {label!r} are unknown: configure 'fingerprint' to name the weights"
            )
        adapters.append({"name": str(label), "path": str(path), "weights": weights_digest(str(path))})
    return sorted(adapters, key=lambda adapter: str(adapter["name"]))


def draft_fields(num_draft_layers: int, fingerprint: str | None) -> dict[str, Any] | None:
    """The draft model, where a page holds layers of it."""
    if num_draft_layers == 0:
        return None
    if fingerprint is not None:
        return {"num_layers": num_draft_layers}
    from sglang.srt.runtime_context import get_model, get_spec

    path = str(getattr(get_spec(), "speculative_draft_model_path", None) or get_model().model_path)
    return {"num_layers": num_draft_layers, "path": path, "weights": weights_digest(path)}


def _heads_of(pool: Any, storage_config: Any) -> dict[str, Any]:
    if storage_config.is_mla_model:
        return {"latent_bytes": int(pool.kv_cache_dim) * pool.dtype.itemsize}
    heads = {"head_bytes": int(pool.head_dim) * pool.dtype.itemsize}
    if getattr(pool, "v_head_dim", pool.head_dim) != pool.head_dim:
        heads["v_head_bytes"] = int(pool.v_head_dim) * pool.dtype.itemsize
    rank, size, held = int(storage_config.tp_rank), int(storage_config.tp_size), int(pool.head_num)
    total = _total_kv_heads() if size > 1 else held
    if total is None:
        return {**heads, "shard": [rank, size, held]}  # not shared with any other width, but never mixed up
    first, end = head_range(rank, size, total)
    if end - first != held:
        raise ConfigError(f"rank {rank} of {size} holds {held} KV heads, expected {end - first} of {total}")
    return {**heads, "range": [first, end], "total": total}


def _total_kv_heads() -> int | None:
    try:
        from sglang.srt.arg_groups.model_override_base import model_config_of
        from sglang.srt.runtime_context import get_server_args

        return int(model_config_of(get_server_args()).get_total_num_kv_heads())
    except (ImportError, AttributeError, ValueError, RuntimeError, OSError):
        return None


def layout_of(pool: Any) -> dict[str, Any]:
    return {"order": str(pool.layout), "tag": pool.storage_format_tag, "class": _base_class(pool)}


def _base_class(pool: Any) -> str:
    """The class of SGLang that laid the pool out: copies of ours do not change the bytes."""
    for base in type(pool).__mro__:
        if base.__module__.startswith("sglang.srt."):
            return base.__name__
    return type(pool).__name__


def _context_shard(storage_config: Any) -> list[int] | None:
    """Which part of a sequence the rank holds, where context parallelism or DCP divides it."""
    shard = [storage_config.attn_cp_rank, storage_config.attn_cp_size, storage_config.dcp_rank, storage_config.dcp_size]
    return None if shard[1] <= 1 and shard[3] <= 1 else [int(part) for part in shard]


def _plain(value: Any) -> Any:
    """A value of a setting as JSON; what JSON lacks, as text without addresses."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return f"{type(value).__module__}.{type(value).__qualname__}"
