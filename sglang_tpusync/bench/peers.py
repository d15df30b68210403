"""Peers that a benchmark compares with, each in an environment of its own that is made when it is first asked for."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from sglang_tpusync.config import read_environment
from sglang_tpusync.errors import UnsupportedError

__all__ = ["LMCACHE", "NIXL", "Peer", "interpreter_of"]


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A package of somebody else. Immutable."""

    name: str
    requirements: tuple[str, ...]  # installed without their dependencies
    probe: str  # a program that has to run there
    over_ours: bool = False  # packages that it needs and does not name (torch) are those of this environment


NIXL = Peer(name="nixl", requirements=("nixl-cu12==1.5.1", "numpy==2.4.6"), probe="import nixl_cu12, numpy")
# The package itself asks for CUDA; its native client of the file system needs torch alone.
LMCACHE = Peer(
    name="lmcache",
    requirements=("lmcache==0.5.6",),
    probe="import torch, importlib.util as u; assert u.find_spec('lmcache') and u.find_spec('numpy')",
    over_ours=True,
)


def interpreter_of(peer: Peer) -> Path:
    """The Python of the peer's environment, made under the user's cache directory if it is not there.

    Raises UnsupportedError with the installer's last words where it cannot be installed or does not run.
    """
    environment = _place(peer)
    python = environment / "bin" / "python"
    if not _runs(python, peer.probe):
        _make(peer, environment)
        if not _runs(python, peer.probe):
            raise UnsupportedError(f"{peer.name} was installed and does not run: python -c {peer.probe!r} fails")
    return python


def _place(peer: Peer) -> Path:
    key = "\n".join([*peer.requirements, sys.version, sys.prefix if peer.over_ours else ""])
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return read_environment().cache_home / "sglang-tpusync" / "peers" / f"{peer.name}-{digest}"


def _runs(python: Path, program: str) -> bool:
    if not python.exists():
        return False
    return subprocess.run([python, "-c", program], capture_output=True, check=False).returncode == 0


def _make(peer: Peer, environment: Path) -> None:
    """Under another name first: what has the right name is whole."""
    environment.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=environment.parent, prefix=f"{peer.name}-") as scratch:
        unfinished = Path(scratch) / "env"
        _call(peer, [sys.executable, "-m", "venv", str(unfinished)])
        python = str(unfinished / "bin" / "python")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps"]
        _call(peer, [*pip, *peer.requirements])
        if peer.over_ours:
            _layer(unfinished)
        if environment.exists():
            environment.rename(Path(scratch) / "old")
        unfinished.rename(environment)


def _layer(environment: Path) -> None:
    """Packages of this interpreter behind those of the environment."""
    ours = [path for path in sys.path if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in ours]
    for site in environment.glob("lib/python*/site-packages"):
        (site / "engine.pth").write_text("".join(lines))


def _call(peer: Peer, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise UnsupportedError(f"{peer.name} ({', '.join(peer.requirements)}) cannot be installed: {last}")
