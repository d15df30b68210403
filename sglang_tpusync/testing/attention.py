"""Attention for SGLang's torch_native backend that makes prefix hits visible, and exact.

The stock backend computes the attention of the whole sequence on every extend, so a prefix hit saves only the
linear layers. Here only new rows are computed, and a row's bits do not depend on how its prefix arrived:

* Rows are computed in blocks of ROWS absolute positions. A block that is present in part (the head of it was
  cached, the prompt ends in it, or it is one decoded token) is filled up with zero rows.
* Block b reads exactly the keys [0, ROWS * (b + 1)); keys past the end of the sequence are zeros and masked.

So every matrix product of block b has the same shape whether the block was reached in one chunk or in ten, from
a cache, or by decoding, and the same rows and keys give the same bits. What is left to the linear layers is that
the row of a product does not depend on the number of rows; tests/test_cpu_engine.py checks that here.
"""

from __future__ import annotations

__all__ = ["ROWS", "attend", "install"]

import inspect
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import wrapt

if TYPE_CHECKING:
    from torch import Tensor, dtype

ROWS = 32  # the rows that torch's CPU flash attention takes at once when there are few: filling up costs no more

_MODULE = "sglang.srt.layers.attention.torch_native_backend"
_EXTEND = "_run_sdpa_forward_extend"
_DECODE = "_run_sdpa_forward_decode"
_PARAMETERS = ("query", "output", "k_cache", "v_cache", "req_to_token", "req_pool_indices", "seq_lens")


def install() -> None:
    """Replaces the two attention methods of the backend once SGLang imports it."""
    wrapt.register_post_import_hook(_patch, _MODULE)


def attend(
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    scaling: float | None = None,
    window: int | None = None,
) -> None:
    """Causal attention of the last rows of one sequence.

    query, output: [rows, heads, head_dim] of the last `rows` positions; output is written.
    k_cache, v_cache: [num_slots, kv_heads, head_dim]; slots: [length] of every position of the sequence.
    window: a row sees this many positions before itself; None: all of them.
    """
    from torch.nn.functional import scaled_dot_product_attention

    length, heads, kv_heads = slots.shape[0], query.shape[1], k_cache.shape[1]
    first = length - query.shape[0]
    padded = -(-length // ROWS) * ROWS
    keys = _gathered(k_cache, slots, padded, query.dtype, heads // kv_heads)
    values = _gathered(v_cache, slots, padded, query.dtype, heads // kv_heads)
    mask = _mask(padded, window, query.dtype)
    block = query.new_zeros(ROWS, heads, query.shape[2])
    for begin in range(first // ROWS * ROWS, padded, ROWS):
        end = begin + ROWS
        low, high = max(begin, first), min(end, length)
        block.zero_()
        block[low - begin : high - begin] = query[low - first : high - first]
        rows = scaled_dot_product_attention(
            block.view(ROWS, kv_heads, -1, query.shape[2]).permute(1, 2, 0, 3),
            keys[:, :, :end],
            values[:, :, :end],
            attn_mask=mask[:, padded - end :],
            scale=scaling,
        )
        output[low - first : high - first] = rows.permute(2, 0, 1, 3).flatten(1, 2)[low - begin : high - begin]


def _gathered(cache: Tensor, slots: Tensor, padded: int, kind: dtype, group: int) -> Tensor:
    """[kv_heads, group, padded, head_dim]: a copy of the sequence's rows, zeros behind, a view per query head.

    The rows of a head lie together: products over scattered ones take 1.6 times as long.
    """
    import torch

    length, heads = slots.shape[0], cache.shape[1]
    rows = cache.new_empty(heads, padded, cache.shape[2])
    rows[:, length:] = 0
    for head in range(heads):
        torch.index_select(cache[:, head], 0, slots, out=rows[head, :length])
    return rows.to(kind).unsqueeze(1).expand(-1, group, -1, -1)


@lru_cache(maxsize=8)
def _mask(padded: int, window: int | None, kind: dtype) -> Tensor:
    """[ROWS, padded] to add to the scores of the last block; its last columns serve every earlier block."""
    import torch

    row = torch.arange(padded - ROWS, padded).unsqueeze(1)
    column = torch.arange(padded).unsqueeze(0)
    hidden = column > row
    if window is not None:
        hidden |= column < row - window
    return torch.zeros(ROWS, padded, dtype=kind).masked_fill_(hidden, float("-inf"))


def _patch(module: ModuleType) -> None:
    backend = module.TorchNativeAttnBackend
    for name in (_EXTEND, _DECODE):
        present = tuple(inspect.signature(getattr(backend, name)).parameters)[1 : len(_PARAMETERS) + 1]
        if present != _PARAMETERS:
            raise ImportError(f"{_MODULE}.{name} takes {present}, not {_PARAMETERS}: this SGLang is not supported")
    setattr(backend, _EXTEND, _extend(getattr(backend, _EXTEND)))
    setattr(backend, _DECODE, _decode(getattr(backend, _DECODE)))


def _window(size: int | None) -> int | None:
    return None if size is None or size < 0 else size


def _extend(stock: Any) -> Any:
    def run(
        self: Any, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, req_to_token: Tensor,
        req_pool_indices: Tensor, seq_lens: Tensor, extend_prefix_lens: Tensor, extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        pools = (k_cache, v_cache)
        if encoder_lens is not None or not options.get("causal"):
            return stock(
                self, query, output, *pools, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
                extend_seq_lens, encoder_lens, **options,
            )  # fmt: skip
        _run(query, output, pools, req_to_token, req_pool_indices, seq_lens, extend_seq_lens.tolist(), options)
        return output

    return run


def _decode(stock: Any) -> Any:
    def run(
        self: Any, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, req_to_token: Tensor,
        req_pool_indices: Tensor, seq_lens: Tensor, encoder_lens: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        pools = (k_cache, v_cache)
        if encoder_lens is not None or options.get("is_cross_attn"):
            return stock(self, query, output, *pools, req_to_token, req_pool_indices, seq_lens, encoder_lens, **options)
        _run(query, output, pools, req_to_token, req_pool_indices, seq_lens, [1] * seq_lens.shape[0], options)
        return output

    return run


def _run(
    query: Tensor,
    output: Tensor,
    pools: tuple[Tensor, Tensor],
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    num_rows: list[int],
    options: dict[str, Any],
) -> None:
    window = _window(options.get("sliding_window_size"))
    begin = 0
    for i, rows in enumerate(num_rows):
        end = begin + rows
        slots = req_to_token[req_pool_indices[i], : int(seq_lens[i])]
        attend(query[begin:end], output[begin:end], *pools, slots, scaling=options.get("scaling"), window=window)
        begin = end
