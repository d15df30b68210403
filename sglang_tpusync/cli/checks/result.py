"""The outcome of one check."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

__all__ = ["Result", "Status", "exit_code"]

Status = Literal["ok", "note", "warning", "failed"]

_CODES: dict[Status, int] = {"ok": 0, "note": 0, "warning": 1, "failed": 2}


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at, how it stands, the finding in one line, and the numbers behind it. Immutable."""

    name: str
    status: Status
    finding: str
    details: dict[str, object] = msgspec.field(default_factory=dict)
    remedy: str | None = None


def exit_code(results: Iterable[Result]) -> int:
    """0: all is well; 1: it works, with warnings; 2: something does not work."""
    return max((_CODES[result.status] for result in results), default=0)
