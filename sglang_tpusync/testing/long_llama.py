"""A small Llama with random weights whose answer depends on every part of a long prompt.

Equal answers prove nothing about a cache if the model ignores what it read, as random weights usually do: their
attention is nearly uniform, the residual stream of the last token outweighs it, and one token repeats for ever.
The scales below avoid that, for prompts of 1K to 64K tokens:

* Scores have a standard deviation of SCORE_STD: softmax over n tokens then rests on about
  n / exp(SCORE_STD ** 2) of them, anywhere in the prompt, a dozen at 2K and some hundreds at 64K; neither all nor one.
* ATTENTION_GAIN makes what was read half as large as the token that reads it, or more, in each layer. Much less,
  and the answer depends on the last token alone. Much more, and what all tokens have in common grows from layer to
  layer until every state is the same, which is when one token repeats.
* Logits have a standard deviation of LOGIT_STD, and are computed in float32: clear winners, and log-probabilities
  that show small differences instead of rounding them away (a bfloat16 of 17 has steps of 0.125).

What it cannot show: attention is a sum over (key, value) pairs, and keys carry their position, so swapping two
whole pages of one prefix in the cache leaves later rows the same up to rounding, for every such model. A control
must replace a page with one of another prompt, or with another page of the same.
"""

from __future__ import annotations

__all__ = ["RECIPE_VERSION", "write_model"]

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_tpusync.testing import smollm2

if TYPE_CHECKING:
    from torch import Tensor

RECIPE_VERSION = 3

SEED = 20_260
LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 4, 256, 512, 49_152
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 128
CONTEXT = 65_536

SCORE_STD = 2.3
ATTENTION_GAIN = 3.0
LOGIT_STD = 3.0


def write_model(directory: Path) -> None:
    """Writes config.json, model.safetensors (bf16) and the tokenizer of smollm2."""
    import torch
    from safetensors.torch import save_file

    kept = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in _weights().items()}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_config(), indent=2))
    smollm2.write_tokenizer(directory)


def _weights() -> dict[str, Tensor]:
    import torch

    generator = torch.Generator().manual_seed(SEED)

    def normal(rows: int, columns: int, gain: float) -> Tensor:
        """A product with it has `gain` times the standard deviation of its input."""
        return torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))

    weights = {
        "model.embed_tokens.weight": normal(VOCABULARY, HIDDEN, math.sqrt(HIDDEN)),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": normal(VOCABULARY, HIDDEN, LOGIT_STD),
    }
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        weights |= {
            name + "input_layernorm.weight": torch.ones(HIDDEN),
            name + "self_attn.q_proj.weight": normal(query, HIDDEN, math.sqrt(SCORE_STD)),
            name + "self_attn.k_proj.weight": normal(key, HIDDEN, math.sqrt(SCORE_STD)),
            name + "self_attn.v_proj.weight": normal(key, HIDDEN, 1.0),
            name + "self_attn.o_proj.weight": normal(HIDDEN, query, ATTENTION_GAIN),
            name + "post_attention_layernorm.weight": torch.ones(HIDDEN),
            name + "mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN, 1.0),
            name + "mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN, 1.0),
            name + "mlp.down_proj.weight": normal(HIDDEN, INTERMEDIATE, 1.0),
        }
    return weights


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "vocab_size": VOCABULARY,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
        "enable_lm_head_fp32": True,  # SGLang's name for logits in float32
        "torch_dtype": "bfloat16",
    }
