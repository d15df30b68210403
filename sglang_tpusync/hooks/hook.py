"""What a hook is: one named change to the installed SGLang, that knows whether it fits and whether it took.

A hook waits until its target module is loaded by SGLang itself, then applies. Nothing is imported for its sake, and
nothing is raised into the import: what does not fit is kept as the hook's state, and `Hooks.require` raises it for
whoever relies on it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Literal

import msgspec

from sglang_tpusync.errors import HookError

__all__ = ["Around", "Hook", "Hooks", "Need", "around", "instead", "registers", "sglang_version"]

logger = logging.getLogger("sglang_tpusync")

Need = Literal["cli", "name", "copies", "weights", "transfer"]
Around = Callable[..., Any]  # (original, *args, **kwargs) -> result
_MARK = "__tpusync_hook__"
_WITHOUT_HOOK = "; `--hicache-storage-backend dynamic` works without this hook"


class Hook(msgspec.Struct, frozen=True, kw_only=True):
    """One change. `apply` and `took` get the loaded target module; `misfit` answers why the hook does not fit, or
    None.
    """

    name: str
    module: str  # the module whose loading triggers it
    attribute: str  # what it changes there
    need: Need  # what breaks without it: command line, backend name, device<->host copies, weight guard, KV transfer
    does: str
    why: str
    until: str  # the change in SGLang that makes it unnecessary
    apply: Callable[[ModuleType], None]
    misfit: Callable[[ModuleType], str | None]
    took: Callable[[ModuleType], bool]

    @property
    def target(self) -> str:
        return f"{self.module}.{self.attribute}"


def around(
    advice: Around,
    *,
    name: str,
    module: str,
    attribute: str,
    parameters: tuple[str, ...],
    need: Need,
    does: str,
    why: str,
    until: str,
) -> Hook:
    """A hook that calls `advice(original, *args, **kwargs)` in place of a function or method.

    `parameters` are those of the original that the advice relies on.
    """

    def misfit(loaded: ModuleType) -> str | None:
        owner, leaf = _owner(loaded, attribute)
        raw = inspect.getattr_static(owner, leaf, None)
        function = getattr(raw, "__func__", raw)
        if not callable(function) or isinstance(function, type):
            return f"{attribute} is no function there"
        known = inspect.signature(function).parameters
        missing = [p for p in parameters if p not in known]
        return f"{attribute} has no parameter {missing[0]!r}, it has {', '.join(known)}" if missing else None

    def apply(loaded: ModuleType) -> None:
        owner, leaf = _owner(loaded, attribute)
        raw = inspect.getattr_static(owner, leaf)
        original = getattr(raw, "__func__", raw)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return advice(original, *args, **kwargs)

        setattr(replacement, _MARK, name)
        wrapped = type(raw)(replacement) if isinstance(raw, classmethod | staticmethod) else replacement
        setattr(owner, leaf, wrapped)
        _rebind_imported(original, replacement)

    return Hook(
        name=name,
        module=module,
        attribute=attribute,
        need=need,
        does=does,
        why=why,
        until=until,
        apply=apply,
        misfit=misfit,
        took=lambda loaded: _is_marked(loaded, attribute, name),
    )


def instead(
    replace: Callable[[Any], Any],
    *,
    name: str,
    module: str,
    attribute: str,
    uses: tuple[str, ...],
    need: Need,
    does: str,
    why: str,
    until: str,
) -> Hook:
    """A hook that puts `replace(original)` in place of a module's global. `uses` are attributes the original must
    have.
    """

    def misfit(loaded: ModuleType) -> str | None:
        if attribute not in vars(loaded):
            return f"there is no {attribute}"
        missing = [u for u in uses if not hasattr(getattr(loaded, attribute), u)]
        return f"{attribute} has no {missing[0]!r}" if missing else None

    def apply(loaded: ModuleType) -> None:
        replacement = replace(getattr(loaded, attribute))
        setattr(replacement, _MARK, name)
        setattr(loaded, attribute, replacement)

    return Hook(
        name=name,
        module=module,
        attribute=attribute,
        need=need,
        does=does,
        why=why,
        until=until,
        apply=apply,
        misfit=misfit,
        took=lambda loaded: _is_marked(loaded, attribute, name),
    )


def registers(
    register: Callable[[ModuleType], None],
    *,
    name: str,
    module: str,
    attribute: str,
    parameters: tuple[str, ...],
    took: Callable[[ModuleType], bool],
    need: Need,
    does: str,
    why: str,
    until: str,
) -> Hook:
    """A hook that only calls a registration function `attribute`, which SGLang offers for the purpose."""

    def misfit(loaded: ModuleType) -> str | None:
        owner, leaf = _owner(loaded, attribute)
        function = getattr(owner, leaf, None)
        if not callable(function):
            return f"there is no function {attribute}"
        missing = [p for p in parameters if p not in inspect.signature(function).parameters]
        return f"{attribute} has no parameter {missing[0]!r}" if missing else None

    return Hook(
        name=name,
        module=module,
        attribute=attribute,
        need=need,
        does=does,
        why=why,
        until=until,
        apply=register,
        misfit=misfit,
        took=took,
    )


class Hooks:
    """A set of hooks and their states in this process. Thread-safe."""

    def __init__(self, hooks: Iterable[Hook], *, versions_tested: tuple[str, ...]) -> None:
        self._hooks = {hook.name: hook for hook in hooks}
        self._versions_tested = versions_tested
        self._states: dict[str, str | None] = {}  # absent: waits; None: applied; text: why it does not fit
        self._lock = threading.RLock()
        self._armed = False

    def arm(self) -> None:
        """Applies each hook when its module is loaded, now where it is. Idempotent; imports nothing of SGLang."""
        import wrapt

        with self._lock:
            if self._armed:
                return
            self._armed = True
        for hook in self._hooks.values():
            wrapt.register_post_import_hook(functools.partial(self._apply, hook), hook.module)

    def require(self, *needs: Need) -> None:
        """Loads what the hooks of `needs` change and raises HookError for the first that does not fit or did not
        take.
        """
        self.arm()
        for hook in self._hooks.values():
            if hook.need in needs:
                reason = self._reason(hook)
                if reason is not None:
                    raise HookError(self._refusal(hook, reason))

    def report(self) -> list[tuple[Hook, str]]:
        """Each hook with 'applied', 'waits' (its module is not loaded), or why it does not fit."""
        with self._lock:
            return [(hook, self._states.get(name, "waits") or "applied") for name, hook in self._hooks.items()]

    def _apply(self, hook: Hook, loaded: ModuleType) -> None:
        with self._lock:
            if hook.name in self._states:
                return
            try:
                reason = hook.misfit(loaded)
                if reason is None:
                    hook.apply(loaded)
                    reason = None if hook.took(loaded) else "it was applied and did not take"
            except Exception as error:  # an import of SGLang's must not fail because of us
                reason = f"{type(error).__name__}: {error}"
            self._states[hook.name] = reason
        if reason is not None:
            logger.warning("hook %s does not fit %s: %s", hook.name, hook.target, reason)

    def _reason(self, hook: Hook) -> str | None:
        try:
            loaded = importlib.import_module(hook.module)
        except ImportError as error:
            return f"{hook.module} cannot be imported: {error}"
        with self._lock:
            reason = self._states.get(hook.name, "it was not applied")
        if reason is None and not hook.took(loaded):
            return "something has replaced it since"
        return reason

    def _refusal(self, hook: Hook, reason: str) -> str:
        return (
            f"hook {hook.name!r} does not fit SGLang {sglang_version()}: {hook.target}: {reason}. "
            f"Without it {hook.why} Tested with SGLang {', '.join(self._versions_tested)}: install one of these, or a "
            f"newer sglang-tpusync{_WITHOUT_HOOK if hook.need in ('cli', 'name') else ''}."
        )


def sglang_version() -> str:
    """The version of the installed SGLang, without importing it; 'unknown' where none is installed."""
    from importlib import metadata

    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "unknown"


def _owner(loaded: ModuleType, attribute: str) -> tuple[Any, str]:
    """The object that holds the last name of a dotted attribute, and that name."""
    *path, leaf = attribute.split(".")
    owner: Any = loaded
    for step in path:
        owner = getattr(owner, step)
    return owner, leaf


def _is_marked(loaded: ModuleType, attribute: str, name: str) -> bool:
    """Whether the hook `name` is in place, possibly under wrappers that others put around it."""
    owner, leaf = _owner(loaded, attribute)
    found = inspect.getattr_static(owner, leaf, None)
    found = getattr(found, "__func__", found)
    while found is not None:
        if getattr(found, _MARK, None) == name:
            return True
        found = getattr(found, "__wrapped__", None)
    return False


def _rebind_imported(original: Any, replacement: Any) -> None:
    """Follows `from x import name` of modules of SGLang that were loaded before the hook."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.partition(".")[0] == "sglang":
            for key, value in list(vars(module).items()):
                if value is original:
                    setattr(module, key, replacement)
