"""Runs of a session: on servers of our own with a crash between, or on one that runs already."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from sglang_tpusync.bench.serving.plan import Plan
from sglang_tpusync.bench.serving.servers import ServerEngine
from sglang_tpusync.bench.serving.session import Sample, Session, control_prompt
from sglang_tpusync.bench.serving.url import UrlEngine

__all__ = ["run_on_servers", "run_on_url", "started", "tamper_with_control"]


def run_on_servers(plan: Plan, directory: Path, say: Callable[[str], None]) -> list[Sample]:
    """All arms, a SIGKILL to every process, the restart arms, the control. Leaves no process behind."""
    with started(plan, directory, say) as engines:
        session = Session(plan, engines, say)
        session.run_rounds()
        ours = next((engine for engine in engines if engine.backend == "tpusync"), None)
        if plan.control and ours is not None:
            session.store_control(ours)
        for engine in engines:
            if engine.backend == "none":
                engine.stop()
            else:
                engine.settle()
                say(f"kill -9: {engine.backend}")
                engine.crash()
        if plan.control and ours is not None:
            tamper_with_control(plan, ours.store)
        for engine in engines:
            if engine.backend != "none":
                say(f"starting again: {engine.backend}")
                engine.restart()
        say("after the restart")
        session.run_restarted()
        if plan.control and ours is not None:
            session.run_control(ours)
        return session.samples


def run_on_url(plan: Plan, url: str) -> list[Sample]:
    """The arms that need no crash and no sizes of our choice. The prompts must be new to the server's store."""
    session = Session(plan, [UrlEngine(url, plan.output_tokens)])
    session.run_reduced()
    return session.samples


@contextlib.contextmanager
def started(plan: Plan, directory: Path, say: Callable[[str], None], **options: object) -> Iterator[list[ServerEngine]]:
    """The server without cache and one per backend, one started after the other; stopped in any case.

    `options` are further options of our store.
    """
    engines = [ServerEngine(plan, backend, directory, **options) for backend in ("none", *plan.backends)]
    try:
        for engine in engines:
            say(f"starting: {'no cache' if engine.backend == 'none' else engine.backend}")
            engine.start()
        yield engines
    finally:
        for engine in engines:
            engine.stop()


def tamper_with_control(plan: Plan, store: Path) -> None:
    """Swaps two pages of the control's prefix, far apart and away from its ends, with checksums made right again."""
    from sglang_tpusync.testing.tamper import page_keys, swap_pages

    keys = page_keys(control_prompt(plan), plan.page_tokens)
    swap_pages(store, keys[1], keys[len(keys) // 2])
