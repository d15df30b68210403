"""Whether each hook fits the installed SGLang: applied in a process of its own, against the real modules."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping

import msgspec

from sglang_tpusync.cli.checks.result import Result, Status

__all__ = ["check_hooks"]

_TIMEOUT_S = 300
_MARK = "tpusync-hooks:"

# Loads what the hooks change, as a server would, and prints their states; SGLang's own output goes before the mark.
_PROBE = f"""
import importlib, json
from sglang_tpusync.hooks import hooks
hooks.arm()
failed = {{}}
for hook, _ in hooks.report():
    try:
        importlib.import_module(hook.module)
    except Exception as error:
        failed[hook.name] = f"{{hook.module}} cannot be imported: {{error}}"
states = [
    {{"name": h.name, "target": h.target, "need": h.need, "does": h.does, "state": failed.get(h.name, s)}}
    for h, s in hooks.report()
]
print({_MARK!r} + json.dumps(states))
"""


class _State(msgspec.Struct, frozen=True):
    name: str
    target: str
    need: str
    does: str
    state: str


class _ProbeError(Exception):
    """The probe gave no states."""


def check_hooks() -> list[Result]:
    """One result per hook; one alone where they could not be tried.

    Where SGLang loads only with the CPU engine support (no accelerator, no driver), the hooks are tried with it.
    """
    if importlib.util.find_spec("sglang") is None:
        return [Result(name="hooks", status="note", finding="not tried: SGLang is not installed")]
    try:
        states, how = _probe(os.environ), "as installed"
        if any(state.state != "applied" for state in states):
            with_support = _probe(_cpu_engine_environment())
            if all(state.state == "applied" for state in with_support):
                states, how = with_support, "with the CPU engine support: without it, this SGLang does not load here"
    except _ProbeError as error:
        return [Result(name="hooks", status="failed", finding=str(error))]
    return [_result(state, how) for state in states]


def _probe(environment: Mapping[str, str]) -> list[_State]:
    command = [sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _ProbeError(f"not tried within {_TIMEOUT_S} s") from error
    marked = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not marked:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise _ProbeError(f"could not be tried: {last}")
    return msgspec.json.decode(marked[-1].removeprefix(_MARK), type=list[_State])


def _cpu_engine_environment() -> Mapping[str, str]:
    from sglang_tpusync.testing import cpu_engine

    return cpu_engine.environment()


def _result(state: _State, how: str) -> Result:
    details: dict[str, object] = {"target": state.target, "need": state.need, "state": state.state, "tried": how}
    name = f"hook {state.name}"
    if state.state == "applied":
        return Result(name=name, status="ok", finding=state.does, details=details)
    status: Status = "note" if state.need == "copies" else "failed"
    remedy = {
        "cli": "--hicache-storage-backend dynamic works without it",
        "name": "--hicache-storage-backend dynamic works without it",
        "copies": "only a server on --device cpu needs it",
        "weights": "without it a weight update would leave pages of the old weights: the store refuses to start",
    }.get(state.need)
    finding = f"does not fit {state.target}: {state.state}"
    return Result(name=name, status=status, finding=finding, details=details, remedy=remedy)
