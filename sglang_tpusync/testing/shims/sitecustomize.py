"""Lets SGLang's CPU engine start without sgl-kernel's CPU build, which no package index carries.

Acts in a process that has this directory on its PYTHONPATH and TPUSYNC_CPU_ENGINE=1, on two imports only:

* `sgl_kernel`: if none is installed, or the installed one does not load here (a CUDA build without a driver),
  a stub takes its place whose functions end in `_cpu` and refuse to be called. SGLang imports such names
  unconditionally and calls them for speculative decoding only. One that loads is left alone.
* `torchvision`: if its operators do not load beside the installed torch, the schemas of the two that its
  Python part mentions at import are declared. SGLang imports torchvision, its text models never call it.

Then it runs the sitecustomize that it hides, if there is one.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_kept_alive: list[Any] = []


def _run_hidden_sitecustomize() -> None:
    elsewhere = [p for p in sys.path if os.path.abspath(p or os.curdir) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _refusing_getattr(name: str) -> Callable[..., None]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"the stub of sgl_kernel has no {name!r}")

    def refuse(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(
            f"sgl_kernel.{name} needs a real sgl-kernel; this is the stub of sglang_tpusync.testing"
        )

    refuse.__name__ = name
    return refuse


def _become_stub(module: ModuleType) -> None:
    module.__doc__ = "Stands in for sgl-kernel, refuses to be used (sglang_tpusync.testing)."
    module.__getattr__ = _refusing_getattr  # type: ignore[method-assign]


class _StubLoader(importlib.abc.Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        _become_stub(module)


def _sgl_kernel_spec(spec: ModuleSpec | None) -> ModuleSpec | None:
    if spec is None or spec.loader is None:
        return ModuleSpec("sgl_kernel", _StubLoader(), is_package=True)
    run = spec.loader.exec_module

    def run_or_become_stub(module: ModuleType) -> None:
        try:
            run(module)
        except (ImportError, OSError):
            for name in [n for n in sys.modules if n.startswith("sgl_kernel.")]:
                del sys.modules[name]
            for name in [n for n in vars(module) if not n.startswith("__")]:
                delattr(module, name)
            _become_stub(module)

    spec.loader.exec_module = run_or_become_stub  # type: ignore[method-assign]
    return spec


def _declare_torchvision_operators(folder: str) -> None:
    import torch

    for name in sorted(os.listdir(folder)):
        if name.startswith("_C") and name.endswith(".so"):
            try:
                torch.ops.load_library(os.path.join(folder, name))
                return
            except (ImportError, OSError):
                break
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ):
        if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
            library.define(schema)
    _kept_alive.append(library)


def _torchvision_spec(spec: ModuleSpec | None) -> ModuleSpec | None:
    if spec is None or spec.loader is None or not spec.submodule_search_locations:
        return spec
    run = spec.loader.exec_module
    folder = spec.submodule_search_locations[0]

    def declare_and_run(module: ModuleType) -> None:
        _declare_torchvision_operators(folder)
        run(module)

    spec.loader.exec_module = declare_and_run  # type: ignore[method-assign]
    return spec


_ADAPTERS = {"sgl_kernel": _sgl_kernel_spec, "torchvision": _torchvision_spec}


class _Finder(importlib.abc.MetaPathFinder):
    """Asks every other finder and adapts the answer for the two names above."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        adapt = _ADAPTERS.get(name)
        if adapt is None:
            return None
        others = (f for f in list(sys.meta_path) if f is not self and hasattr(f, "find_spec"))
        found = (f.find_spec(name, path, target) for f in others)
        return adapt(next((spec for spec in found if spec is not None), None))


if os.environ.get("TPUSYNC_CPU_ENGINE") == "1":
    sys.meta_path.insert(0, _Finder())
_run_hidden_sitecustomize()
