"""Hooks on modules made for the purpose, the documents about them, and what the plugin does in processes of SGLang."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from sglang_tpusync import hooks as package
from sglang_tpusync import plugin
from sglang_tpusync.config import read_options
from sglang_tpusync.errors import ConfigError, HookError
from sglang_tpusync.hicache.selection import options_source
from sglang_tpusync.hooks.hook import Hook, Hooks, around, instead, registers
from sglang_tpusync.testing import cpu_engine

ROOT = Path(__file__).parent.parent
TEXT = {"does": "d", "why": "things break.", "until": "u"}

SOURCE = """
events = []
def outer(a, b=2):
    return ("outer", a, b)
class Thing:
    def method(self, a):
        return ("method", a)
    @classmethod
    def made(cls, a):
        return (cls.__name__, a)
    @staticmethod
    def alone(a):
        return ("alone", a)
registered = []
def register(name):
    registered.append(name)
class device:
    Event = 1
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module, not loaded yet, below a package called sglang as the real one is."""
    name = f"hooked_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def add_mark(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return ("hooked", original(*args, **kwargs))


def on(module: str, attribute: str, *parameters: str, name: str = "") -> Hook:
    return around(
        add_mark, name=name or attribute, module=module, attribute=attribute, parameters=parameters, need="name", **TEXT
    )


def armed(*hooks: Hook) -> Hooks:
    made = Hooks(hooks, versions_tested=("1.0",))
    made.arm()
    return made


def test_a_hook_waits_for_its_module_and_applies_to_every_kind_of_function(target: str) -> None:
    made = armed(*(on(target, a, "a") for a in ("outer", "Thing.method", "Thing.made", "Thing.alone")))
    assert target not in sys.modules
    assert {state for _, state in made.report()} == {"waits"}
    loaded = __import__(target)
    assert {state for _, state in made.report()} == {"applied"}
    assert loaded.outer(1, b=3) == ("hooked", ("outer", 1, 3))
    assert loaded.Thing().method(1) == ("hooked", ("method", 1))
    assert loaded.Thing.made(1) == ("hooked", ("Thing", 1))
    assert loaded.Thing.alone(1) == ("hooked", ("alone", 1))
    made.require("name")


def test_a_module_that_is_loaded_already_is_hooked_at_once_and_so_are_its_importers(target: str) -> None:
    loaded = __import__(target)
    importer = ModuleType("sglang.importer")
    importer.borrowed = loaded.outer  # type: ignore[attr-defined]
    sys.modules["sglang.importer"] = importer
    try:
        armed(on(target, "outer"))
        assert importer.borrowed(1) == ("hooked", ("outer", 1, 2))
    finally:
        del sys.modules["sglang.importer"]


@pytest.mark.parametrize(
    ("attribute", "parameters", "reason"),
    [
        ("gone", (), "gone is no function"),
        ("Thing.gone", (), "Thing.gone is no function"),
        ("Gone.method", (), "AttributeError"),
        ("events", (), "events is no function"),
        ("Thing", (), "Thing is no function"),
        ("outer", ("a", "c"), "outer has no parameter 'c', it has a, b"),
    ],
)
def test_what_does_not_fit_is_left_alone_and_refused_by_name(
    target: str, attribute: str, parameters: tuple[str, ...], reason: str
) -> None:
    made = armed(on(target, attribute, *parameters))
    before = __import__(target).outer(1)
    assert before == ("outer", 1, 2)
    assert reason in made.report()[0][1]
    with pytest.raises(HookError) as caught:
        made.require("name")
    for part in (f"'{attribute}'", reason, "SGLang", "things break.", "1.0", "dynamic"):
        assert part in str(caught.value)
    made.require("weights")  # nobody else is kept from working


def test_a_module_that_is_gone_is_refused_by_name() -> None:
    made = armed(on("sglang_no_such_module", "outer"))
    with pytest.raises(HookError, match="sglang_no_such_module cannot be imported"):
        made.require("name")


def test_a_hook_that_was_replaced_since_is_noticed(target: str) -> None:
    made = armed(on(target, "outer"))
    loaded = __import__(target)
    hooked = loaded.outer

    def wrapper(*args: Any) -> Any:
        return hooked(*args)

    wrapper.__wrapped__ = hooked  # type: ignore[attr-defined]
    loaded.outer = wrapper
    made.require("name")  # another plugin wraps it: ours is still in place
    loaded.outer = lambda a: a
    with pytest.raises(HookError, match="replaced"):
        made.require("name")


def test_values_and_registrations(target: str) -> None:
    def stand_in(original: Any) -> Any:
        return type("StandIn", (), {"original": original})()

    value = instead(stand_in, name="value", module=target, attribute="device", uses=("Event",), need="copies", **TEXT)
    bad = instead(stand_in, name="bad", module=target, attribute="device", uses=("Stream",), need="cli", **TEXT)
    call = registers(
        lambda loaded: loaded.register("us"), name="call", module=target, attribute="register", parameters=("name",),
        took=lambda loaded: "us" in loaded.registered, need="name", **TEXT,
    )  # fmt: skip
    made = armed(bad, value, call)
    loaded = __import__(target)
    assert loaded.registered == ["us"]
    assert loaded.device.original.Event == 1
    made.require("name", "copies")
    with pytest.raises(HookError, match="has no 'Stream'"):
        made.require("cli")


def test_a_hook_that_fails_to_apply_does_not_fail_the_import(target: str) -> None:
    hook = msgspec.structs.replace(on(target, "outer"), apply=lambda loaded: loaded.no_such_thing)
    made = armed(hook)
    __import__(target)
    with pytest.raises(HookError, match="AttributeError"):
        made.require("name")


def test_the_document_lists_the_hooks_as_they_are() -> None:
    text = (ROOT / "docs" / "upstream.md").read_text()
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert sections == [hook.name for hook in package.ALL]
    for hook in package.ALL:
        for row in (
            f"| target | `{hook.target}` |",
            f"| relied on by | {hook.need} |",
            f"| does | {hook.does} |",
            f"| without it | {hook.why} |",
            f"| unnecessary with | {hook.until} |",
        ):
            assert row in text, f"docs/upstream.md lacks: {row}"
    for version in package.VERSIONS_TESTED:
        assert version in text


@pytest.mark.parametrize("name", ["store.toml", "durable.toml"])
def test_the_configurations_that_are_shipped_are_valid(name: str) -> None:
    options = read_options(f"@{ROOT / 'configs' / name}", {})
    text = (ROOT / "configs" / name).read_text()
    if name == "store.toml":  # names every option, and its defaults are the defaults
        assert options == read_options(None, {})
        for field in msgspec.structs.fields(options):
            assert re.search(rf"^(# )?{field.name} = ", text, re.MULTILINE), field.name


def test_the_name_on_a_command_line() -> None:
    assert plugin.named_on(["x", "--hicache-storage-backend", "tpusync"])
    assert plugin.named_on(["x", "--hicache-storage-backend=tpusync", "-y"])
    assert not plugin.named_on(["x", "--hicache-storage-backend", "file", "tpusync"])


def test_an_untested_version_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "sglang_version", lambda: "9.9.9")
    plugin.warn_if_untested.cache_clear()
    with caplog.at_level(logging.WARNING, logger="sglang_tpusync"):
        plugin.check_use({"path": "/x"})
        plugin.check_use({"path": "/x"})
    plugin.warn_if_untested.cache_clear()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "9.9.9" in warnings[0]
    assert package.VERSIONS_TESTED[0] in warnings[0]


def test_wrong_options_are_refused_where_the_name_is_used() -> None:
    with pytest.raises(ConfigError, match="did you mean 'capacity'"):
        plugin.check_use('{"capcity": 1}')


def run_inside(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python process in the CPU engine environment, in which SGLang can be imported."""
    environment = cpu_engine.environment(omp_threads=1)
    environment["PYTHONPATH"] += f":{ROOT}"
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)


@pytest.mark.sglang
def test_a_process_that_does_not_use_the_name_imports_nothing_of_sglang_for_us() -> None:
    done = run_inside("""
        import sys
        from sglang_tpusync.plugin import activate
        activate()
        print(sorted(m for m in sys.modules if m.partition(".")[0] in ("sglang", "torch")))
    """)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.sglang
def test_the_command_line_accepts_the_name_and_one_flag_is_enough() -> None:
    done = run_inside(
        """
        import sys
        from sglang_tpusync.plugin import activate
        activate()
        from sglang.srt.server_args import ServerArgs, prepare_server_args
        given = ["--model-path", "dummy", "--hicache-storage-backend"]
        args = prepare_server_args([*given, "tpusync", "--hicache-storage-backend-extra-config", '{"path": "/x"}'])
        from sglang.srt.arg_groups.overrides import resolution_result
        args.resolve_once()
        print("tpusync:", resolution_result(args, "enable_hierarchical_cache"))
        args = prepare_server_args([*given, "file"])
        args.resolve_once()
        print("file:", resolution_result(args, "enable_hierarchical_cache"))
        from sglang_tpusync.errors import ConfigError
        args = ServerArgs(model_path="dummy", hicache_storage_backend="tpusync",
                          hicache_storage_backend_extra_config='{"capcity": 1}')
        try:
            args.resolve_once()
        except ConfigError as error:
            print("refused:", error)
        """
    )
    assert "tpusync: True" in done.stdout, done.stdout + done.stderr
    assert "file: False" in done.stdout
    assert "refused: option 'capcity' is unknown: did you mean 'capacity'" in done.stdout


@pytest.mark.sglang
def test_a_command_line_with_the_name_and_a_hook_that_does_not_fit_ends_with_the_reason() -> None:
    done = run_inside(
        """
        import sglang.srt.arg_groups.arg_utils as utils
        del utils.add_cli_args_from_dataclass
        from sglang_tpusync.plugin import activate
        activate()
        print("went on")
        """,
        "--hicache-storage-backend",
        "tpusync",
    )
    assert done.returncode == 1
    assert "went on" not in done.stdout
    for part in ("cli-choice", "0.5.23", "add_cli_args_from_dataclass", "--hicache-storage-backend dynamic"):
        assert part in done.stderr, done.stderr


def test_the_route_through_dynamic_is_recognised(tmp_path: Path) -> None:
    ours = '{"module_path": "sglang_tpusync.hicache", "class_name": "TpuSyncStorage"}'
    (tmp_path / "ours.json").write_text(ours)
    assert options_source("tpusync", None) is not None
    assert options_source("dynamic", ours) is not None
    assert options_source("dynamic", f"@{tmp_path / 'ours.json'}") is not None
    for backend, extra in [
        ("dynamic", '{"module_path": "theirs"}'),
        ("dynamic", "{"),
        ("dynamic", None),
        ("file", ours),
    ]:
        assert options_source(backend, extra) is None
