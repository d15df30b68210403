"""The buffers that SGLang hands to a KV manager (KVArgs), as memory that is registered with an endpoint."""

from __future__ import annotations

import logging
from typing import Any

from sglang_tpusync._core import Endpoint
from sglang_tpusync.disagg.messages import Buffer, State
from sglang_tpusync.disagg.pairing import ROWS, Source, SourceBuffer
from sglang_tpusync.errors import ConfigError, TransferError, UnsupportedError
from sglang_tpusync.hicache.identity import weights_digest

__all__ = ["Memory", "layout_of", "model_namespace"]

logger = logging.getLogger("sglang_tpusync")


class Memory:
    """Of one rank: KV, metadata rows and states. `register` and `release` belong to SGLang's scheduler thread."""

    def __init__(self, endpoint: Endpoint, kv_args: Any, device: str) -> None:
        """Raises UnsupportedError for memory that this process cannot read and write."""
        if device != "cpu":
            raise UnsupportedError(
                f"--disaggregation-transfer-backend tpusync moves KV that lies in host memory: this server's device is "
                f"{device!r}, allowed is 'cpu'"
            )
        self._endpoint = endpoint
        ids = list(getattr(kv_args, "kv_layer_ids", None) or [])
        self.kv = _buffers(kv_args.kv_data_ptrs, kv_args.kv_data_lens, kv_args.kv_item_lens, ids)
        self.rows = _buffers(kv_args.aux_data_ptrs, kv_args.aux_data_lens, kv_args.aux_item_lens, [])
        layers = list(getattr(kv_args, "state_layer_ids", None) or [])
        self.states = tuple(
            (
                str(getattr(kind, "value", kind)),
                _buffers(
                    kv_args.state_data_ptrs[i],
                    kv_args.state_data_lens[i],
                    kv_args.state_item_lens[i],
                    layers[i] if i < len(layers) else [],
                ),
            )
            for i, kind in enumerate(kv_args.state_types)
        )
        self._regions: dict[int, int] = {}  # by address
        self.register()

    def register(self) -> None:
        for buffers in (self.kv, self.rows, *(buffers for _, buffers in self.states)):
            for buffer in buffers:
                if buffer.address not in self._regions:
                    self._regions[buffer.address] = self._endpoint.register_region(buffer.address, buffer.num_bytes)

    def release(self) -> None:
        """What a transfer still needs stays registered."""
        for address, region in list(self._regions.items()):
            try:
                self._endpoint.release_region(region)
                del self._regions[address]
            except TransferError as error:
                logger.warning("memory of KV stays registered: %s", error)

    def targets(self, buffers: tuple[SourceBuffer, ...]) -> tuple[Buffer, ...]:
        """As a peer names them."""
        return tuple(Buffer(self._regions[b.address], b.num_bytes, b.item_bytes, b.layer) for b in buffers)

    def target_states(self) -> tuple[State, ...]:
        return tuple(State(kind, self.targets(buffers)) for kind, buffers in self.states)

    def source(self, kv_args: Any, *, tp_size: int, is_mla: bool, namespace: str) -> Source:
        heads = 0 if is_mla else int(getattr(kv_args, "total_kv_head_num", 0))
        if not is_mla and heads <= 0:
            heads = int(kv_args.kv_head_num) * tp_size
        return Source(
            tp_size=tp_size,
            tp_rank=int(kv_args.engine_rank) % tp_size,
            num_kv_heads=heads,
            page_size=int(kv_args.page_size),
            kv_dtype=str(kv_args.kv_cache_dtype_str),
            layout=layout_of(kv_args),
            namespace=namespace,
            start_layer=int(getattr(kv_args, "prefill_start_layer", 0) or 0),
            kv=self.kv,
            rows=self.rows,
            states=self.states,
        )


def layout_of(kv_args: Any) -> str:
    """The order of the elements of a page. SGLang names one for pools that have several, and asserts for the others
    that pages are rows of tokens."""
    return str(kv_args.kv_layout) if getattr(kv_args, "kv_layout", None) else ROWS


def model_namespace(fingerprint: str | None) -> str:
    """What both sides must agree on about the weights of their start: a digest, or empty where it is unknown."""
    if fingerprint is not None:
        return f"fingerprint {fingerprint}"
    try:
        from sglang.srt.runtime_context import get_model

        return weights_digest(str(get_model().model_path), times=False)
    except (ImportError, AttributeError, ValueError, OSError, ConfigError) as error:
        logger.warning("the weights of this server cannot be told from others to its peers: %s", error)
        return ""


def _buffers(addresses: Any, sizes: Any, item_sizes: Any, layers: Any) -> tuple[SourceBuffer, ...]:
    """Buffers of no bytes are SGLang's for layers without one."""
    numbers = list(layers) or [-1] * len(addresses)
    return tuple(
        SourceBuffer(int(address), int(size), int(item), int(layer))
        for address, size, item, layer in zip(addresses, sizes, item_sizes, numbers, strict=True)
        if int(size) > 0
    )
