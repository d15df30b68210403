"""SGLang 0.5.23 with `--device cpu`: the environment and arguments of a server, and the part inside it.

    python -m sglang_tpusync.testing.cpu_engine sglang serve --device cpu ...     # any command, in its environment

`environment` and `launch_arguments` are the one place that says how such a server is started. The plugin calls
`activate` in every process of a server whose environment has TPUSYNC_CPU_ENGINE=1, and never otherwise.
"""

from __future__ import annotations

__all__ = ["VARIABLE", "activate", "environment", "launch_arguments", "requested"]

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import wrapt

from sglang_tpusync.testing import attention

VARIABLE = "TPUSYNC_CPU_ENGINE"

_RESERVE = "HICACHE_HOST_MEMORY_RESERVE_BYTES"
_SHIMS = Path(__file__).with_name("shims")

# What a server needs on a host without an accelerator, and no network.
_SETTINGS = {
    VARIABLE: "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health answers at once instead of after a generation
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",  # with AMX a row depends on how many there are: no bit-equal answers
}

# torch_native is the only attention backend that needs no sgl-kernel. Chunks of 2048 tokens keep the memory of
# a 64K prompt small, and are the same for every server, so that answers may be compared bit by bit.
_ARGUMENTS = (
    "--device", "cpu",
    "--attention-backend", "torch_native",
    "--mem-fraction-static", "0.3",
    "--page-size", "64",
    "--chunked-prefill-size", "2048",
    "--max-running-requests", "8",
    "--sleep-on-idle",
)  # fmt: skip


def requested(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process belongs to a server that asked for the CPU engine support by name."""
    return environ.get(VARIABLE) == "1"


def environment(
    *, omp_threads: int | None = None, tensor_parallel: int = 1, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment of a server: `base` plus what the CPU engine needs.

    `omp_threads` is the number of OpenMP threads of each rank; None: the cores of this process, shared out
    among the ranks. Several servers at work at once want 1. The shims come first on PYTHONPATH, the
    directory of this interpreter first on PATH: SGLang builds a small extension with the ninja found there.
    """
    cores = sorted(os.sched_getaffinity(0))
    threads = omp_threads or max(1, len(cores) // tensor_parallel)
    env = {**base, **_SETTINGS, "OMP_NUM_THREADS": str(threads)}
    env["PYTHONPATH"] = os.pathsep.join([str(_SHIMS), *filter(None, [base.get("PYTHONPATH")])])
    env["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), base.get("PATH", os.defpath)])
    if tensor_parallel > 1:
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[i % len(cores)]) for i in range(tensor_parallel))
    return env


def launch_arguments(model_path: str | Path, *, host: str, port: int) -> list[str]:
    """The command line of a server; arguments appended to it win over those in it."""
    module = [sys.executable, "-m", "sglang.launch_server"]
    return [*module, "--model-path", str(model_path), "--host", host, "--port", str(port), *_ARGUMENTS]


def activate() -> None:
    """Adapts SGLang in this process: attention, and the host memory that HiCache leaves free.

    Imports no SGLang module; each change is made when SGLang imports the module it is made to. SGLang keeps
    10 GiB of host memory free of HiCache, which a small host does not have.
    """
    attention.install()
    wrapt.register_post_import_hook(_keep_no_reserve, "sglang.srt.mem_cache.pool_host.base")


def _keep_no_reserve(module: ModuleType) -> None:
    if not hasattr(module, _RESERVE):
        raise ImportError(f"{module.__name__} has no {_RESERVE}: this SGLang is not supported")
    setattr(module, _RESERVE, 0)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m sglang_tpusync.testing.cpu_engine COMMAND [ARGUMENT]...")
    os.execvpe(sys.argv[1], sys.argv[1:], environment())
