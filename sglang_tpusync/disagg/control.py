"""The ZMQ sockets on which servers hear control messages: proved and encrypted by the shared secret.

With a secret, sockets speak CURVE: both keys of the listening side are derived from the secret, so whoever does not
know it can neither say a word to it nor answer in its place, and nothing can be replayed, reflected or forged. Without
one they speak plain text, which is refused beyond loopback unless it is allowed by name.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import itertools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from sglang_tpusync.errors import ConfigError

__all__ = ["Keys", "Refusals", "derive_keys", "is_loopback", "listen", "secure_sender"]

logger = logging.getLogger("sglang_tpusync")

_LABEL = b"tpusync disaggregation v1 control socket"
_SECRET_BYTES = (16, 4096)
_MESSAGE_BYTES_MAX = 64 << 20
_HANDSHAKE_MS = 5000
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_HOSTS_NAMED_MAX = 1024
_monitors = itertools.count()


class Keys(NamedTuple):
    """Of the listening side, Z85 text."""

    public: bytes
    secret: bytes


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def derive_keys(secret_file: str | None, *, host: str, allow_unauthenticated: bool) -> Keys | None:
    """The keys that the secret in this file gives; None without a file. Raises ConfigError if one is needed or bad."""
    if not secret_file:
        if is_loopback(host) or allow_unauthenticated:
            return None
        raise ConfigError(
            f"option 'transfer_secret_file' is needed: this server is reached at {host}, which is not loopback. Name a "
            "file with the same random bytes on every server (openssl rand -hex 32), or set SGLANG_HOST_IP=127.0.0.1; "
            "'transfer_allow_unauthenticated' = true lets anybody who reaches this host write into KV pages"
        )
    try:
        secret = Path(secret_file).expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"option 'transfer_secret_file' = {secret_file!r}: {error.strerror}") from error
    if not _SECRET_BYTES[0] <= len(secret) <= _SECRET_BYTES[1]:
        raise ConfigError(
            f"option 'transfer_secret_file' = {secret_file!r}: it holds {len(secret)} bytes, allowed are "
            f"{_SECRET_BYTES[0]} to {_SECRET_BYTES[1]}"
        )
    key = z85.encode(hmac.new(secret, _LABEL, hashlib.sha256).digest())
    return Keys(public=zmq.curve_public(key), secret=key)


def listen(context: zmq.Context[Any], host: str, keys: Keys | None) -> tuple[zmq.Socket[bytes], int]:
    """A socket that hears messages at a free port of `host`, and that port."""
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES_MAX)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    if keys is not None:
        socket.curve_secretkey = keys.secret
        socket.curve_publickey = keys.public
        socket.curve_server = True
    where = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return socket, socket.bind_to_random_port(f"tcp://{where}")


def secure_sender(socket: zmq.Socket[bytes], keys: Keys | None) -> None:
    """To be called before the socket connects."""
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    if keys is not None:
        socket.curve_serverkey = keys.public
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


class Refusals:
    """Counts handshakes that failed on sockets, says so once per socket, and tells who wants to know.

    Watched sockets are told apart by a name. close() before their context ends.
    """

    def __init__(self, context: zmq.Context[Any], on_refused: Callable[[str], None]) -> None:
        self._context = context
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._new: list[tuple[str, zmq.Socket[bytes]]] = []
        self.num_watched = 0
        self._named: set[str] = set()
        self._closed = threading.Event()
        self.count = 0
        self._thread = threading.Thread(target=self._run, name="tpusync-refusals", daemon=True)
        self._thread.start()

    def watch(self, name: str, socket: zmq.Socket[bytes]) -> None:
        where = f"inproc://tpusync-refusals-{next(_monitors)}"  # the default is of a descriptor, and these come again
        monitor = socket.get_monitor_socket(_REFUSED | zmq.EVENT_MONITOR_STOPPED, where)
        with self._lock:
            self._new.append((name, monitor))
            self.num_watched += 1

    def close(self) -> None:
        self._closed.set()
        self._thread.join(5)

    def _run(self) -> None:
        poller = zmq.Poller()
        names: dict[zmq.Socket[bytes], str] = {}
        while not self._closed.is_set():
            with self._lock:
                new, self._new = self._new, []
            for name, monitor in new:
                names[monitor] = name
                poller.register(monitor, zmq.POLLIN)
            for monitor, _ in poller.poll(200):
                try:
                    event = recv_monitor_message(monitor, zmq.NOBLOCK)
                except zmq.ZMQError:
                    event = {"event": zmq.EVENT_MONITOR_STOPPED}
                if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                    poller.unregister(monitor)
                    monitor.close(0)
                    del names[monitor]
                    with self._lock:
                        self.num_watched -= 1
                elif event["event"] & _REFUSED:
                    self._refused(names[monitor])
        for monitor in names:
            monitor.close(0)

    def _refused(self, name: str) -> None:
        self.count += 1
        if name not in self._named and len(self._named) < _HOSTS_NAMED_MAX:
            self._named.add(name)
            logger.warning("a control connection was refused: %s: the secrets differ, or one side has none", name)
        try:
            self._on_refused(name)
        except Exception:
            logger.exception("telling of a refused control connection failed")
