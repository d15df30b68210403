"""SGLang's CPU engine support, without a server: shims, attention, models, processes."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from sglang_tpusync.testing import attention, cpu_engine, long_llama, models
from sglang_tpusync.testing.processes import MarkedProcess, free_port, marked_pids


def run_python(code: str, *, path: Path | None = None, **variables: str) -> str:
    """Output of a fresh interpreter in the environment of a CPU engine, with `path` on its PYTHONPATH."""
    base = {**os.environ, "PYTHONPATH": str(path)} if path else dict(os.environ)
    env = {**cpu_engine.environment(omp_threads=1, base=base), **variables}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=240).stdout


# Shims


def package(folder: Path, name: str, code: str) -> Path:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    return folder


def test_stub_of_sgl_kernel_can_be_imported_from_and_refuses_to_be_called() -> None:
    code = """
        from sgl_kernel import copy_all_layer_kv_cache_cpu
        try:
            from sgl_kernel import silu_and_mul
        except ImportError:
            print("no other names")
        try:
            copy_all_layer_kv_cache_cpu(1, two=2)
        except NotImplementedError as error:
            print(error)
    """
    assert run_python(code).splitlines() == [
        "no other names",
        "sgl_kernel.copy_all_layer_kv_cache_cpu needs a real sgl-kernel; this is the stub of sglang_tpusync.testing",
    ]


def test_a_real_sgl_kernel_is_never_shadowed(tmp_path: Path) -> None:
    real = package(tmp_path, "sgl_kernel", "copy_all_layer_kv_cache_cpu = 'the real one'")
    assert (
        run_python("import sgl_kernel; print(sgl_kernel.copy_all_layer_kv_cache_cpu)", path=real).strip()
        == "the real one"
    )


@pytest.mark.parametrize("error", ["ImportError('libcuda.so.1')", "OSError('no driver')"])
def test_an_sgl_kernel_that_does_not_load_here_gives_way_to_the_stub(tmp_path: Path, error: str) -> None:
    broken = package(tmp_path, "sgl_kernel", f"half_cpu = 'loaded'\nfrom sgl_kernel import part\nraise {error}")
    (tmp_path / "sgl_kernel" / "part.py").write_text("")
    code = "import sgl_kernel, sys; print(sgl_kernel.half_cpu, 'sgl_kernel.part' in sys.modules)"
    out = run_python(code, path=broken)
    assert out.startswith("<function ")
    assert out.split()[-1] == "False"


def test_an_sgl_kernel_with_a_bug_shows_it(tmp_path: Path) -> None:
    buggy = package(tmp_path, "sgl_kernel", "raise ValueError('a bug')")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run_python("import sgl_kernel", path=buggy)
    assert "a bug" in caught.value.stderr


def test_shims_do_nothing_unless_asked_by_name() -> None:
    code = "import importlib.util; print(importlib.util.find_spec('sgl_kernel'))"
    assert run_python(code, TPUSYNC_CPU_ENGINE="").strip() == "None"


def test_the_sitecustomize_that_is_hidden_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.hidden_ran = True")
    assert run_python("import sys; print(sys.hidden_ran)", path=tmp_path).strip() == "True"


def test_torchvision_and_what_imports_it_load_beside_this_torch() -> None:
    assert (
        run_python("import torchvision; from transformers import LlamaForCausalLM; print('loaded')").strip() == "loaded"
    )


def test_activation_imports_neither_torch_nor_sglang() -> None:
    code = """
        import sys
        from sglang_tpusync.testing import cpu_engine
        assert cpu_engine.requested()
        cpu_engine.activate()
        print([name for name in ("torch", "sglang", "transformers") if name in sys.modules])
    """
    assert run_python(code).strip() == "[]"


def test_hicache_reserves_no_host_memory_and_attention_is_replaced_once_activated() -> None:
    code = """
        from sglang_tpusync.testing import cpu_engine
        cpu_engine.activate()
        from sglang.srt.mem_cache.pool_host import base
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as backend
        print(base.HICACHE_HOST_MEMORY_RESERVE_BYTES)
        print(backend._run_sdpa_forward_extend.__module__, backend._run_sdpa_forward_decode.__module__)
    """
    assert run_python(code).split() == ["0", *["sglang_tpusync.testing.attention"] * 2]


def test_ranks_share_the_cores_out() -> None:
    env = cpu_engine.environment(tensor_parallel=3, base={"PATH": "/bin"})
    cores = sorted(os.sched_getaffinity(0))
    assert env["SGLANG_CPU_OMP_THREADS_BIND"].split("|") == [str(cores[i % len(cores)]) for i in range(3)]
    assert env["OMP_NUM_THREADS"] == str(max(1, len(cores) // 3))
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in cpu_engine.environment(base={})


# Attention

HEADS, KV_HEADS, HEAD_DIM = 6, 3, 32


class Sequence:
    """Random rows of one sequence, its cache scattered over a pool whose other rows are poison."""

    def __init__(self, length: int, dtype: torch.dtype = torch.bfloat16) -> None:
        generator = torch.Generator().manual_seed(length)
        self.query = torch.randn(length, HEADS, HEAD_DIM, generator=generator).to(dtype)
        self.slots = torch.randperm(2 * length, generator=generator)[:length]
        self.keys, self.values = (self._pool(length, generator).to(dtype) for _ in range(2))

    def _pool(self, length: int, generator: torch.Generator) -> torch.Tensor:
        pool = torch.full((2 * length, KV_HEADS, HEAD_DIM), math.nan)
        pool[self.slots] = torch.randn(length, KV_HEADS, HEAD_DIM, generator=generator)
        return pool

    def attended(self, *chunks: int, **options: Any) -> torch.Tensor:
        """The output when the rows arrive in chunks of these sizes; the last one is what is left."""
        output = torch.empty_like(self.query)
        begin, length = 0, len(self.query)
        for rows in (*chunks, length - sum(chunks)):
            end = begin + rows
            attention.attend(
                self.query[begin:end], output[begin:end], self.keys, self.values, self.slots[:end], **options
            )
            begin = end
        return output

    def reference(self, window: int | None = None, scale: float | None = None) -> torch.Tensor:
        group = HEADS // KV_HEADS
        keys, values = (pool[self.slots].repeat_interleave(group, 1).movedim(0, 1) for pool in (self.keys, self.values))
        row, column = torch.arange(len(self.query)).unsqueeze(1), torch.arange(len(self.query)).unsqueeze(0)
        seen = (column <= row) & (True if window is None else column >= row - window)
        return scaled_dot_product_attention(
            self.query.movedim(0, 1), keys, values, attn_mask=seen, scale=scale
        ).movedim(0, 1)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 200])
@pytest.mark.parametrize("window", [None, 0, 40])
def test_attention_is_that_of_torch(length: int, window: int | None) -> None:
    sequence = Sequence(length, torch.float32)
    expected = sequence.reference(window, scale=0.2)
    torch.testing.assert_close(sequence.attended(window=window, scaling=0.2), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chunks", [(64,), (1, 1, 1), (511, 1, 64), (704,), (705, 1), (640, 35)], ids=str)
def test_bits_of_a_row_do_not_depend_on_how_its_prefix_arrived(dtype: torch.dtype, chunks: tuple[int, ...]) -> None:
    sequence = Sequence(707, dtype)
    assert torch.equal(sequence.attended(*chunks), sequence.attended())


def test_rows_of_a_linear_layer_do_not_depend_on_their_number() -> None:
    """What bit-equal answers rest on besides attention; a host where this fails cannot compare bit by bit."""
    generator = torch.Generator().manual_seed(0)
    for inner, outer in ((256, 2048), (1024, 256), (576, 960), (1536, 576)):
        weight = torch.randn(outer, inner, generator=generator).bfloat16()
        rows = torch.randn(300, inner, generator=generator).bfloat16()
        whole = linear(rows, weight)
        for begin, end in ((0, 1), (299, 300), (236, 300), (100, 131), (7, 263)):
            assert torch.equal(linear(rows[begin:end], weight), whole[begin:end])


# Models

PAGE = 64
Cache = list[tuple[torch.Tensor, torch.Tensor]]


class PlainLlama:
    """long-llama in plain torch, one sequence, bf16 with float32 logits as in the server."""

    def __init__(self, directory: Path) -> None:
        from safetensors.torch import load_file

        self.weights = load_file(directory / "model.safetensors")

    def forward(self, tokens: list[int], cache: Cache) -> torch.Tensor:
        """Extends the cache by the tokens; the log-probabilities after the last one, [vocabulary]."""
        state = self.weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        for layer in range(long_llama.LAYERS):
            state = state + self._attention(layer, _normalized(state), cache)
            inner = _normalized(state)
            gate, up = self._linear(layer, "mlp.gate_proj", inner), self._linear(layer, "mlp.up_proj", inner)
            state = state + self._linear(layer, "mlp.down_proj", silu(gate) * up)
        return linear(_normalized(state[-1]).float(), self.weights["lm_head.weight"].float()).log_softmax(-1)

    def greedy(self, last: int, cache: Cache, num_tokens: int) -> tuple[list[int], list[float]]:
        cache, tokens, logprobs = list(cache), [last], []
        for _ in range(num_tokens):
            scores = self.forward(tokens[-1:], cache)
            tokens.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
        return tokens[1:], logprobs

    def _linear(self, layer: int, name: str, state: torch.Tensor) -> torch.Tensor:
        return linear(state, self.weights[f"model.layers.{layer}.{name}.weight"])

    def _attention(self, layer: int, state: torch.Tensor, cache: Cache) -> torch.Tensor:
        past = len(cache[layer][0]) if layer < len(cache) else 0
        query, key, value = (
            self._linear(layer, f"self_attn.{part}_proj", state).unflatten(-1, (-1, long_llama.HEAD_DIM))
            for part in "qkv"
        )
        query, key = _rotated(query, past), _rotated(key, past)
        if past:
            key, value = torch.cat([cache[layer][0], key]), torch.cat([cache[layer][1], value])
            cache[layer] = (key, value)
        else:
            cache.append((key, value))
        output = torch.empty_like(query)
        attention.attend(query, output, key, value, torch.arange(len(key)))
        return self._linear(layer, "self_attn.o_proj", output.flatten(1))


def _normalized(state: torch.Tensor) -> torch.Tensor:
    wide = state.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(state.dtype)


def _rotated(rows: torch.Tensor, first: int) -> torch.Tensor:
    half = long_llama.HEAD_DIM // 2
    frequency = 1_000_000.0 ** (-torch.arange(half) / half)
    angle = (first + torch.arange(len(rows))).outer(frequency).unsqueeze(1)
    left, right = rows.float().chunk(2, -1)
    turned = left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()
    return torch.cat(turned, -1).to(rows.dtype)


def with_page(cache: Cache, at: int, source: Cache, source_at: int) -> Cache:
    """The cache with the page at a position replaced by a page of another."""
    changed = [(key.clone(), value.clone()) for key, value in cache]
    for own, other in zip(changed, source, strict=True):
        for mine, theirs in zip(own, other, strict=True):
            mine[at : at + PAGE] = theirs[source_at : source_at + PAGE]
    return changed


def difference(left: tuple[list[int], list[float]], right: tuple[list[int], list[float]]) -> float:
    """The largest difference of log-probabilities up to and including the first token that differs."""
    equal = [a == b for a, b in zip(left[0], right[0], strict=True)]
    compared = equal.index(False) + 1 if False in equal else len(equal)
    return max(abs(a - b) for a, b in zip(left[1][:compared], right[1][:compared], strict=True))


@pytest.fixture(scope="module")
def long_model() -> Path:
    return models.build_model("long-llama")


@torch.inference_mode()
def test_long_llama_reads_far_pages_and_does_not_repeat_itself(long_model: Path) -> None:
    llama = PlainLlama(long_model)
    generator = torch.Generator().manual_seed(7)
    prompt: list[int] = torch.randint(100, 49_000, (4096 + 4 * PAGE,), generator=generator).tolist()
    caches: list[Cache] = []
    for page in (None, PAGE, 3 * PAGE):  # a page more than 4K tokens back is another one
        tokens = list(prompt)
        if page is not None:
            tokens[page : page + PAGE] = torch.randint(100, 49_000, (PAGE,), generator=generator).tolist()
        caches.append([])
        llama.forward(tokens[:-1], caches[-1])
    whole = llama.greedy(prompt[-1], caches[0], 16)
    assert len(set(whole[0])) >= 12

    changed = [llama.greedy(prompt[-1], cache, 16) for cache in caches[1:]]
    wrong_pages = [with_page(caches[0], PAGE, caches[1], PAGE), with_page(caches[0], 2 * PAGE, caches[0], 5 * PAGE)]
    changed += [llama.greedy(prompt[-1], cache, 16) for cache in wrong_pages]
    differences = [difference(whole, other) for other in changed]
    assert min(differences) > 0.05
    assert sum(other[0] != whole[0] for other in changed) >= 2

    swapped = with_page(with_page(caches[0], PAGE, caches[0], 30 * PAGE), 30 * PAGE, caches[0], PAGE)
    assert difference(whole, llama.greedy(prompt[-1], swapped, 16)) < min(differences)  # see long_llama


def test_smollm2_speaks_as_the_original() -> None:
    code = """
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained(DIRECTORY)
        model = AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32)
        given = tokenizer("The capital of France is", return_tensors="pt")
        print(given["input_ids"].tolist())
        print(repr(tokenizer.decode(model.generate(**given, max_new_tokens=12, do_sample=False)[0])))
        print(tokenizer.decode(tokenizer("Grüße 2023 <|im_end|>")["input_ids"]), tokenizer.eos_token_id)
    """
    directory = models.build_model("smollm2")
    out = run_python(f"DIRECTORY = {str(directory)!r}\n" + textwrap.dedent(code)).splitlines()
    assert out == [
        "[[504, 3575, 282, 4649, 314]]",
        r"'The capital of France is Paris.\n\nThe answer is: 201'",
        "Grüße 2023 <|im_end|> 2",
    ]


class CountingBuilder:
    """Stands in for a recipe; writes slowly enough to be met half way."""

    RECIPE_VERSION = 1

    def __init__(self, write: Callable[[Path], None]) -> None:
        self.write_model = write


def test_a_model_is_built_once_and_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, started = [], threading.Barrier(4, timeout=30)

    def write(directory: Path) -> None:
        calls.append(directory)
        (directory / "config.json").write_text(json.dumps({}))

    monkeypatch.setitem(models._BUILDERS, "smollm2", CountingBuilder(write))  # type: ignore[arg-type]

    def build() -> None:
        started.wait()
        assert (models.build_model("smollm2", tmp_path) / "config.json").is_file()

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert not calls[0].exists()


def test_a_recipe_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(directory: Path) -> None:
        (directory / "half").write_text("")
        raise OSError("disk full")

    monkeypatch.setitem(models._BUILDERS, "smollm2", CountingBuilder(write))  # type: ignore[arg-type]
    with pytest.raises(OSError, match="disk full"):
        models.build_model("smollm2", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".smollm2-v1.lock"]
    with pytest.raises(ValueError, match="long-llama, smollm2"):
        models.build_model("smollm3", tmp_path)


# Processes

# A command with a child in a session of its own and a grandchild that has no environment. Each speaks in one
# write: where PYTHONUNBUFFERED is set, print makes two, and lines of three processes mix.
FAMILY = r"""
import os, signal, subprocess, sys
sleep = [sys.executable, "-c", r"import os, signal; os.write(1, b'up\n'); signal.pause()"]
subprocess.Popen(sleep, start_new_session=True)
subprocess.Popen(sleep, env={})
os.write(1, b"up\n")
signal.pause()
"""


def test_a_free_port_is_none_that_the_kernel_gives_to_connections() -> None:
    """Else a connection takes it while the server that it is for still starts."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) > 10
    if lowest > 20100:
        assert all(20000 <= port < lowest for port in ports)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", ports[0]))


def started_family(log: Path) -> MarkedProcess:
    os.mkfifo(log)
    # Opened for both so that neither side waits for the other.
    with open(os.open(log, os.O_RDWR)) as output:
        process = MarkedProcess([sys.executable, "-c", FAMILY], env=dict(os.environ), log_path=log)
        for _ in range(3):
            line = output.readline()
            assert line == "up\n", line
    return process


def test_kill_leaves_no_descendant(tmp_path: Path) -> None:
    process = started_family(tmp_path / "log")
    assert len(process.pids()) == 3
    process.kill()
    assert process.pids() == []
    assert process.returncode() == -signal.SIGKILL
    assert marked_pids(process._mark, process.pid) == []
    process.kill()


def test_the_guard_kills_what_its_killed_maker_left(tmp_path: Path) -> None:
    code = """
        import os, signal, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[1])
        from test_cpu_engine import started_family
        process = started_family(Path(sys.argv[2]))
        print(process._mark, process.pid, process._guard.pid, len(process.pids()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    here = str(Path(__file__).parent)
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), here, str(tmp_path / "log")]
    maker = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert maker.returncode == -signal.SIGKILL
    mark, session, guard, number = maker.stdout.split()
    assert number == "3"
    _wait_end(int(guard))
    assert marked_pids(mark, int(session)) == []


def _wait_end(pid: int) -> None:
    import select

    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], 60)[0]
    finally:
        os.close(handle)
