"""Rooms depend downwards only: every include of csrc/, every import of the package, and what an import costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc" / "tpusync"
PACKAGE = ROOT / "sglang_tpusync"

LEVELS = {
    "base": 0, "metrics": 0,
    "layout": 1, "wire": 1, "index": 1, "os": 1,
    "exec": 2,
    "device": 3, "host": 3, "flash": 3, "transport": 3,
    "tier": 4,
    "session": 5,
    "binding": 6,
}  # fmt: skip
# metrics counts with what base offers; both are the floor.
SIBLINGS_ALLOWED = {("metrics", "base")}
# A header of a library that would leak into everything: the rooms whose .cc files may use it.
CONFINED = {"liburing.h": {"os", "flash"}, "pybind11/": {"binding"}, "sodium.h": {"wire"}, "Python.h": {"binding"}}

# torch and sglang may be imported at the top of modules in these places, and nowhere else.
ADAPTERS = ("hicache/", "testing/", "adapters/", "disagg/", "weights/")
ADAPTED = {"torch", "sglang", "jax"}
# Packages from the bottom up; one may import those before it. Modules of a name not listed may import all.
PYTHON_ORDER = ["errors", "config", "runtime", "hooks", "plugin"]
IMPORT_LIMIT_MS = 100

INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)


def includes(file: Path) -> Iterator[str]:
    for quoted, angled in INCLUDE.findall(file.read_text()):
        yield quoted or angled


def sources() -> list[Path]:
    return sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cc"))


def declared_uses() -> dict[str, set[str]]:
    """What CMakeLists.txt lets each room use, with all that these use."""
    text = (ROOT / "CMakeLists.txt").read_text()
    direct = {
        name: {used for used in uses.split() if used in LEVELS or used == "testing"}
        for name, uses in re.findall(r"tpusync_room\((\w+) USES ([^)]*)\)", text)
    }
    closed: dict[str, set[str]] = {}
    for name, used in direct.items():  # the lowest come first
        closed[name] = used.union(*(closed[u] for u in used))
    return closed


def violations_of_file(file: Path, uses: dict[str, set[str]]) -> Iterator[str]:
    room = file.relative_to(CSRC).parts[0]
    is_test = file.name.endswith("_test.cc")
    for included in includes(file):
        for header, rooms in CONFINED.items():
            if included.startswith(header) and (room not in rooms or (file.suffix == ".h" and header != "pybind11/")):
                yield f"{file.name} includes {included}, which belongs into .cc files of {sorted(rooms)}"
        if not included.startswith("tpusync/"):
            continue
        target = included.split("/")[1]
        if target == room or room == "testing" or (is_test and target == "testing"):
            continue
        if target not in LEVELS:
            yield f"{file.relative_to(CSRC)} includes {included} of no room"
        elif LEVELS[target] >= LEVELS[room] and (room, target) not in SIBLINGS_ALLOWED:
            yield f"{file.relative_to(CSRC)} (level {LEVELS[room]}) includes {included} (level {LEVELS[target]})"
        elif room in uses and target not in uses[room]:
            yield f"{file.relative_to(CSRC)} includes {included}, which CMakeLists.txt does not let {room} use"


def test_includes_go_downwards() -> None:
    uses = declared_uses()
    assert {"base", "exec", "flash", "device"} <= set(uses)
    found = [violation for file in sources() for violation in violations_of_file(file, uses)]
    assert not found, "\n".join(found)
    assert len(sources()) > 20


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("flash/x.cc", '#include "tpusync/device/copy_stream.h"'),
        ("base/x.h", '#include "tpusync/exec/ticket.h"'),
        ("device/x.cc", '#include "tpusync/index/page_key.h"'),
        ("flash/x.cc", '#include "tpusync/testing/sim_disk.h"'),
        ("exec/x.cc", '#include "tpusync/os/file.h"'),
        ("flash/x.h", "#include <liburing.h>"),
        ("device/x.cc", "#include <pybind11/pybind11.h>"),
        ("os/x.cc", '#include "tpusync/nowhere/x.h"'),
    ],
)
def test_the_check_of_includes_can_fail(place: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uses = declared_uses()
    monkeypatch.setattr(sys.modules[__name__], "CSRC", tmp_path)
    file = tmp_path / place
    file.parent.mkdir()
    file.write_text(line + "\n")
    assert list(violations_of_file(file, uses))


def test_every_room_has_a_level_and_a_row_in_the_architecture() -> None:
    rooms = {path.name for path in CSRC.iterdir() if any(path.glob("*.h")) or any(path.glob("*.cc"))}
    assert rooms <= {*LEVELS, "testing"}
    text = (ROOT / "docs" / "architecture.md").read_text()
    for room in rooms - {"testing", "binding"}:
        row = re.search(rf"^\| `{room}` \| (\d) \|", text, re.MULTILINE)
        assert row is not None, f"docs/architecture.md has no row for {room}"
        assert int(row[1]) == LEVELS[room]


def imports_at_load(tree: ast.Module) -> Iterator[str]:
    """Names imported when a module is loaded: not those inside functions or under TYPE_CHECKING."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            if node.module == "sglang_tpusync":
                yield from (f"sglang_tpusync.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            pending += [*node.body, *node.orelse]
        elif isinstance(node, ast.Try):
            pending += [*node.body, *node.orelse, *node.finalbody, *(s for h in node.handlers for s in h.body)]
        elif isinstance(node, ast.ClassDef | ast.With):
            pending += node.body


def modules() -> Iterator[tuple[str, set[str]]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        place = file.relative_to(PACKAGE).as_posix()
        if "/shims/" not in f"/{place}":
            yield place, set(imports_at_load(ast.parse(file.read_text())))


def test_torch_and_sglang_are_imported_by_adapters_only() -> None:
    found = [
        f"{place} imports {name} when it is loaded"
        for place, names in modules()
        for name in names
        if name.partition(".")[0] in ADAPTED and not place.startswith(ADAPTERS)
    ]
    assert not found, "\n".join(found)


def test_package_modules_import_downwards() -> None:
    found = []
    for place, names in modules():
        own = place.removesuffix(".py").partition("/")[0]
        for name in names:
            parts = name.split(".")
            if parts[0] != "sglang_tpusync" or len(parts) < 2 or parts[1] == own:
                continue
            if own in PYTHON_ORDER and PYTHON_ORDER.index(own) < _height(parts[1]):
                found.append(f"{place} imports {name} when it is loaded")
            if parts[1] == "testing" and own not in ("bench", "cli", "testing"):
                found.append(f"{place} is production code and imports {name}")
    assert not found, "\n".join(found)


def _height(package: str) -> int:
    return PYTHON_ORDER.index(package) if package in PYTHON_ORDER else len(PYTHON_ORDER)


def test_every_module_has_what_it_exports() -> None:
    """Ruff keeps `__all__` sorted, and mypy does not look whether its names exist."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        exported = next((ast.literal_eval(value) for name, value in _assigned(tree) if name == "__all__"), None)
        if exported is None:
            continue
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        present = defined | {name for name, _ in _assigned(tree)} | _imported(tree) | {"TpuSyncStorage"}
        found += [f"{file.name}: {name} is exported and not there" for name in set(exported) - present]
    assert not found, "\n".join(sorted(found))


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and node.value is not None:  # type: ignore[union-attr]
                yield target.id, node.value  # type: ignore[union-attr, misc]


def _imported(tree: ast.Module) -> set[str]:
    nodes = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return {alias.asname or alias.name for node in nodes for alias in node.names}


def imported_by(module: str) -> dict[str, int]:
    """Cumulative microseconds of each module that importing `module` loads, in a process of its own."""
    command = [sys.executable, "-X", "importtime", "-c", f"import {module}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    rows = [line.removeprefix("import time:").split("|") for line in done.stderr.splitlines() if "|" in line]
    return {row[2].strip(): int(row[1]) for row in rows if row[1].strip().isdigit()}


@pytest.mark.parametrize("module", ["sglang_tpusync", "sglang_tpusync.plugin"])
def test_importing_brings_no_framework(module: str) -> None:
    """The plugin runs in every process of SGLang, also in those that do not use it."""
    assert not {name.partition(".")[0] for name in imported_by(module)} & (ADAPTED | {"numpy"})


def test_importing_the_package_is_cheap() -> None:
    """The quickest of several tries: a busy machine takes its time from any of them."""
    tries = (imported_by("sglang_tpusync")["sglang_tpusync"] for _ in range(10))
    assert any(cumulative_us < IMPORT_LIMIT_MS * 1000 for cumulative_us in tries)
