"""SGLang's four classes of a transfer backend, on its Common classes.

The scheduler's thread only queues and looks. A prefill rank's writes are the courier's. A decode rank's pages are open
to writing by one grant per room, and `poll` reports the end of a room, good or bad, only when its grant is revoked and
no byte can land any more. So nothing needs a prefill server's word that it has stopped: it may be dead.
"""

from __future__ import annotations

import concurrent.futures
import ipaddress
import itertools
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import requests
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import (
    ABORT_TAG,
    AbortNotification,
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
    KVTransferError,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device, get_disagg, get_serving
from sglang.srt.utils.network import NetworkAddress

from sglang_tpusync import config
from sglang_tpusync._core import Endpoint
from sglang_tpusync.disagg import control, messages
from sglang_tpusync.disagg.courier import Chunk, Courier, Link, Sending
from sglang_tpusync.disagg.grants import Grants
from sglang_tpusync.disagg.memory import Memory, layout_of, model_namespace
from sglang_tpusync.disagg.messages import Hello, MessageError, Registration, Request, Status
from sglang_tpusync.disagg.pairing import pair
from sglang_tpusync.errors import TpuSyncError, UnsupportedError

__all__ = ["TpuSyncKVBootstrapServer", "TpuSyncKVManager", "TpuSyncKVReceiver", "TpuSyncKVSender"]

logger = logging.getLogger("sglang_tpusync")

_TAG = b"TPUSYNC"
_SEND_TIMEOUT_MS = 2000
_LOOKUP_WAIT_S = 0.2  # of the scheduler, once per look-up
_REFUSAL_S = 5.0  # for which a prefill server that does not fit is not asked again
_GIVEN_UP_S = 60.0  # for which a room that is not known yet is remembered as given up
_ROOMS_MAX = 65536
_RANKS_MAX = 4096
_NOTICES_MAX = 1024

Rank = tuple[str, int]  # host and port of a control socket


class _Peer:
    """What SGLang's Common classes want to know of a decode rank in `transfer_infos`."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.endpoint = request.host
        self.dst_port = request.port
        self.is_dummy = request.dummy
        self.required_dst_info_num = request.num_targets


class TpuSyncKVManager(CommonKVManager):  # type: ignore[misc]
    """One rank's side of all transfers, prefill or decode."""

    supports_deferred_decode_kv_release = True  # by revoking grants, not by acknowledgements

    def __init__(
        self,
        args: Any,
        disaggregation_mode: DisaggregationMode,
        server_args: Any,
        is_mla_backend: bool | None = False,
    ) -> None:
        """Raises ConfigError, UnsupportedError: the server does not start."""
        self.options = config.read_options(None)
        self.server_socket: zmq.Socket[bytes]
        self.rank_port: int
        self._is_listening = False
        self._closed = False
        self._notices: set[str] = set()
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        if self.dcp_size > 1 or self.defer_decode_allocation:
            raise UnsupportedError(
                f"--disaggregation-transfer-backend tpusync: DCP size {self.dcp_size} and decode allocation policy "
                f"{get_disagg().disaggregation_decode_allocation_policy!r}: allowed are 1 and 'early'"
            )
        self._listen()
        is_prefill = disaggregation_mode == DisaggregationMode.PREFILL
        self.endpoint = self._open_endpoint(dial_only=is_prefill)
        self.memory = Memory(self.endpoint, args, str(get_device().device))
        self.namespace = model_namespace(self.options.fingerprint)
        self.is_latent = bool(is_mla_backend) or self.is_hybrid_mla_backend
        if is_prefill:
            self._start_prefill()
        else:
            self._start_decode()
        logger.info(
            "KV transfer rank %d of %d (%s) at %s:%d, %s, %.1f MiB of KV, %s",
            args.engine_rank,
            self.attn_tp_size,
            disaggregation_mode.value,
            self.local_ip,
            self.rank_port,
            ", ".join(self.endpoint.addresses) or "dials only",
            sum(buffer.num_bytes for buffer in self.memory.kv) / 2**20,
            "with a shared secret" if self._keys else "without a secret",
        )

    # ---- both sides

    def _listen(self) -> None:
        """Puts a proved socket in the place of the plain one that the base class opened, before anybody is told."""
        if self._is_listening:
            return
        self._is_listening = True
        host = get_serving().host
        if control.is_loopback(host) and not os.environ.get("SGLANG_HOST_IP"):
            self.local_ip = "127.0.0.1" if host == "localhost" else host.strip("[]")
        self._keys = control.derive_keys(
            self.options.transfer_secret_file,
            host=self.local_ip,
            allow_unauthenticated=self.options.transfer_allow_unauthenticated,
        )
        self.server_socket.close(0)
        self.server_socket, self.rank_port = control.listen(self._zmq_ctx, self.local_ip, self._keys)
        self.refusals = control.Refusals(self._zmq_ctx, self._on_refused)
        self.refusals.watch(f"{self.local_ip}:{self.rank_port}", self.server_socket)

    def register_to_bootstrap(self) -> None:
        self._listen()
        super().register_to_bootstrap()

    def _open_endpoint(self, *, dial_only: bool) -> Endpoint:
        options = self.options
        here = f"[{self.local_ip}]:0" if ":" in self.local_ip else f"{self.local_ip}:0"
        return Endpoint(
            bind=() if dial_only else tuple(options.transfer_bind or [here]),
            secret_file=options.transfer_secret_file or "",
            allow_unauthenticated=options.transfer_allow_unauthenticated,
            num_streams=options.transfer_streams,
            num_io_threads=options.transfer_io_threads,
            same_host=options.transfer_same_host,
            checksum=options.transfer_checksum,
            rate_bytes_per_s_max=config.size_in_bytes("transfer_rate_per_s", options.transfer_rate_per_s, 0) or 0,
            silence_s=options.transfer_silence_s,
            heartbeat_s=min(0.5, options.transfer_silence_s / 4),
            progress_s=max(10.0, options.transfer_silence_s),
        )

    def _connect(self, endpoint: str, is_ipv6: bool = False) -> zmq.Socket[bytes]:
        """A socket to a control address. In place of the base class's, which is neither proved nor quick to give up."""
        with self._socket_lock:
            socket: zmq.Socket[bytes] | None = self._socket_cache.get(endpoint)
            if socket is None:
                socket = self._zmq_ctx.socket(zmq.PUSH)
                socket.setsockopt(zmq.IPV6, 1 if is_ipv6 else 0)
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
                control.secure_sender(socket, self._keys)
                self.refusals.watch(endpoint, socket)
                socket.connect(endpoint)
                self._socket_cache[endpoint] = socket
                self._socket_send_locks.setdefault(endpoint, threading.Lock())
            return socket

    def disconnect(self, endpoint: str) -> None:
        """Forgets the socket to a control address."""
        with self._socket_lock:
            socket = self._socket_cache.pop(endpoint, None)
            lock = self._socket_send_locks.pop(endpoint, None)
        if socket is not None and lock is not None:
            with lock:
                socket.close(0)

    def _hear(self, handle: Any) -> threading.Thread:
        """A thread that hands each message of the control socket to `handle`; what is wrong is said once."""
        socket = self.server_socket

        def run() -> None:
            while not self._closed:
                try:
                    if socket.poll(500):
                        handle(socket.recv_multipart())
                except MessageError as error:
                    self._notice(f"a control message was refused: {error}")
                except zmq.ZMQError:
                    if self._closed or socket.closed:
                        return
                    logger.exception("hearing control messages failed")
                    time.sleep(0.1)
                except Exception:
                    logger.exception("a control message could not be dealt with")

        thread = threading.Thread(target=run, name="tpusync-control", daemon=True)
        thread.start()
        return thread

    def _notice(self, text: str) -> None:
        """Logs a text once."""
        if text not in self._notices and len(self._notices) < _NOTICES_MAX:
            self._notices.add(text)
            logger.warning(text)

    def register_buffer_to_engine(self) -> None:
        self.memory.register()
        if self.disaggregation_mode == DisaggregationMode.DECODE:
            with self.connection_lock:
                self.connection_pool.clear()  # whoever comes next tells the numbers of the regions anew

    def deregister_buffer_to_engine(self) -> None:
        self.memory.release()

    def teardown(self) -> None:
        """Ends all threads and transfers of this manager."""
        self._closed = True
        self.endpoint.close()
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            self.courier.close()
        self._control_thread.join(5)
        self.refusals.close()
        self._zmq_ctx.destroy(0)

    # ---- prefill

    def _start_prefill(self) -> None:
        self.source = self.memory.source(
            self.kv_args, tp_size=self.attn_tp_size, is_mla=self.is_latent, namespace=self.namespace
        )
        self._links: dict[bytes, Link] = {}  # by endpoint; of the control thread
        self._link_at: dict[Rank, Link] = {}  # by control address
        self._misfits: OrderedDict[bytes, str] = OrderedDict()  # endpoints that cannot be served, and why
        self._room_lock = threading.Lock()
        self._owners: dict[int, TpuSyncKVSender] = {}
        self._unclaimed: OrderedDict[int, float] = OrderedDict()  # rooms that only decode has spoken of, and since when
        self._given_up: OrderedDict[int, float] = OrderedDict()  # by decode before any request of ours had them
        self._released: OrderedDict[int, None] = OrderedDict()  # lately: an abort of these comes too late
        self._sendings: dict[int, Sending] = {}
        self._notifier = concurrent.futures.ThreadPoolExecutor(4, thread_name_prefix="tpusync-status")
        self.courier = Courier(
            self.endpoint,
            Hello(host=self.local_ip, port=self.rank_port),
            on_sent=self._on_sent,
            on_failed=self._on_failed,
            timeout_s=float(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()),
        )
        self._control_thread = self._hear(self._on_prefill_message)

    def claim(self, room: int, sender: TpuSyncKVSender) -> bool:
        """Whether the room is this sender's from now on: not while another sender has it."""
        with self._room_lock:
            if room in self._owners:
                return False
            self._owners[room] = sender
            self._unclaimed.pop(room, None)
            return True

    def was_given_up(self, room: int) -> bool:
        """Whether decode gave a room up a moment before this server had a request for it."""
        with self._room_lock:
            return time.monotonic() - self._given_up.pop(room, -_GIVEN_UP_S) < _GIVEN_UP_S

    def release(self, room: int) -> None:
        """The sender is done with its room."""
        with self._room_lock:
            self._owners.pop(room, None)
            sending = self._sendings.pop(room, None)
            _remember(self._released, room, None)
        if sending is not None:
            self.courier.drop(sending)

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Any,
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        num_kv_tokens: int | None = None,
        *,
        wait_event: Any = None,
        indices_event: Any = None,
        trace_ctx: Any = None,
    ) -> None:
        """Queues a chunk of computed pages. Called by the scheduler; never blocks, never raises."""
        room = bootstrap_room
        if self.request_status.get(room, KVPoll.Failed) == KVPoll.Failed:
            return
        try:
            sending = self._sending_of(room)
            if sending is None:
                return
            states = [] if state_indices is None else state_indices
            chunk = Chunk(
                pages=np.array(kv_indices, np.int64).reshape(-1),
                first=int(index_slice.start),
                last=is_last_chunk,
                row=int(aux_index or 0),
                states=tuple(None if s is None else np.array(s, np.int64).reshape(-1) for s in states),
                ready=None if wait_event is None else wait_event.synchronize,
            )
            self.courier.send(sending, chunk)
        except Exception as error:
            if not isinstance(error, TpuSyncError):
                logger.exception("a chunk of room %s could not be queued", room)
            self.conclude_failure(bootstrap_room=room, failure_reason=str(error))

    def _sending_of(self, room: int) -> Sending | None:
        with self._room_lock:
            sending = self._sendings.get(room)
            peers = self.transfer_infos.get(room)
            if sending is None and peers:
                targets = [(self._links[peer.request.endpoint], peer.request) for peer in list(peers.values())]
                sending = self._sendings[room] = Sending(room, targets)
            return sending

    def _on_sent(self, sending: Sending) -> None:
        if self._sendings.get(sending.room) is sending:
            self.conclude_transfer(bootstrap_room=sending.room, status=KVPoll.Success)

    def _on_failed(self, sending: Sending, reason: str) -> None:
        if self._sendings.get(sending.room) is sending:
            self.conclude_failure(bootstrap_room=sending.room, failure_reason=reason)

    def send_kv_status_message(
        self,
        *,
        targets: Sequence[Rank],
        bootstrap_room: int,
        status: int,
        failure_reason: str | None = None,
    ) -> None:
        """Over the data connection where there is one, else over ZMQ. Never blocks."""
        message = messages.encode(
            Status(
                room=bootstrap_room,
                status=int(status),
                rank=self._prefill_unique_rank(),
                reason=(failure_reason or "")[:4096],
            )
        )
        for host, port in targets:
            link = self._link_at.get((host, port))
            try:
                if link is not None and link.state == "open":
                    self.endpoint.submit_message(link.peer, message)
                    continue
            except TpuSyncError:  # it has just been lost
                pass
            self._notifier.submit(self._send_status, NetworkAddress(host, port), message)

    def _send_status(self, where: NetworkAddress, message: bytes) -> None:
        try:
            self._send_multipart_locked(where.to_tcp(), [_TAG, message], is_ipv6=where.is_ipv6)
        except (zmq.ZMQError, KeyError, ValueError) as error:
            self._notice(f"the status of a room could not be told to {where.to_host_port_str()}: {error}")

    def _on_prefill_message(self, frames: list[bytes]) -> None:
        if frames and frames[0] == ABORT_TAG:
            self._on_abort(_room_in(frames))
            return
        message = _decode_frames(frames)
        if isinstance(message, Registration):
            self._on_registration(message)
        elif isinstance(message, Request):
            self._on_request(message)
        else:
            raise MessageError(f"a {type(message).__name__} is nothing for a prefill server")

    def _on_registration(self, message: Registration) -> None:
        try:
            link = Link(message, pair(self.source, message))
        except UnsupportedError as error:
            self._misfits[message.endpoint] = str(error)
            while len(self._misfits) > _NOTICES_MAX:
                self._misfits.popitem(last=False)
            self._notice(f"decode rank {message.host}:{message.port} cannot be served: {error}")
            return
        known = self._links.get(message.endpoint)
        if known is not None and known.registration == message:
            return
        self._misfits.pop(message.endpoint, None)
        self._forget_links_at((message.host, message.port))
        self._links[message.endpoint] = link
        self._link_at[(message.host, message.port)] = link
        while len(self._links) > _RANKS_MAX:  # of decode servers that came and went
            oldest = next(iter(self._links.values())).registration
            self._forget_links_at((oldest.host, oldest.port))
        self.courier.connect(link)

    def _forget_links_at(self, where: Rank) -> None:
        """Of an earlier process at the same address."""
        old = self._link_at.pop(where, None)
        if old is not None:
            self._links.pop(old.registration.endpoint, None)

    def _on_request(self, message: Request) -> None:
        reason = self._misfits.get(message.endpoint) or self._wrong_with(message)
        with self._room_lock:
            current = self.request_status.get(message.room)
            if current not in (None, KVPoll.Bootstrapping):
                return
            if reason is None:
                peers = self.transfer_infos.setdefault(message.room, {})
                peers[message.endpoint] = _Peer(message)
                if message.room not in self._owners:
                    self._remember_unclaimed(message.room)
                if len(peers) < message.num_targets:
                    return
                self.resolve_kv_replica_factor(peers)
                self.req_to_decode_prefix_len[message.room] = max(p.request.prefix_tokens for p in peers.values())
                self.update_status(message.room, KVPoll.WaitingForInput)
                return
        if current is None:
            self.send_kv_status_message(
                targets=[(message.host, message.port)],
                bootstrap_room=message.room,
                status=KVPoll.Failed,
                failure_reason=reason,
            )
        else:
            self.conclude_failure(
                bootstrap_room=message.room, failure_reason=reason, targets=[(message.host, message.port)]
            )

    def _wrong_with(self, message: Request) -> str | None:
        """What a request says that its rank's registration does not."""
        link = self._links.get(message.endpoint)
        if link is None:
            return "this prefill server does not know the decode server (was it restarted?)"
        wanted = max(1, link.registration.tp_size // self.attn_tp_size)
        if message.num_targets != wanted:
            return f"{message.num_targets} decode ranks are said to share a room, the TP widths make it {wanted}"
        return None

    def _remember_unclaimed(self, room: int) -> None:
        """Rooms that no request of this server ever claims are forgotten after a time, or when there are too many."""
        now = time.monotonic()
        self._unclaimed[room] = now
        while self._unclaimed:
            oldest, since = next(iter(self._unclaimed.items()))
            if len(self._unclaimed) <= _ROOMS_MAX and now - since < self.bootstrap_timeout:
                return
            del self._unclaimed[oldest]
            self.transfer_infos.pop(oldest, None)
            self.req_to_decode_prefix_len.pop(oldest, None)
            self.request_status.pop(oldest, None)

    def _on_abort(self, room: int) -> None:
        with self._room_lock:
            current = self.request_status.get(room)
            if current is None and room not in self._released:
                _remember(self._given_up, room, time.monotonic())
            if current is None or current == KVPoll.Success:
                return
            self.record_failure(room, "the decode server gave the request up")
            self.update_status(room, KVPoll.Failed)
            sending = self._sendings.get(room)
        if sending is not None:
            self.courier.drop(sending)

    # ---- decode

    def _start_decode(self) -> None:
        self.grants = Grants(self.endpoint)
        self._ranks_of: dict[int, frozenset[Rank]] = {}  # who may speak of a room
        self._rank_of_peer: dict[int, Rank] = {}
        self._misfits_at: dict[str, tuple[float, str]] = {}
        self._lookups: dict[str, concurrent.futures.Future[bool]] = {}
        self._executor = concurrent.futures.ThreadPoolExecutor(4, thread_name_prefix="tpusync-lookup")
        self._control_thread = self._hear(self._on_decode_message)
        self._events_thread = threading.Thread(target=self._hear_endpoint, name="tpusync-events", daemon=True)
        self._events_thread.start()
        self._start_heartbeat_checker_thread()

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Never raises, and never waits for a server that does not answer. What does not fit fails its requests."""
        if bootstrap_addr in self.prefill_info_table:
            return True
        if self._refuse_misfit(bootstrap_addr):
            return False
        lookup, wait_s = self._lookups.get(bootstrap_addr), 0.0
        if lookup is None:
            lookup, wait_s = self._executor.submit(self._look_up, bootstrap_addr), _LOOKUP_WAIT_S
            self._lookups[bootstrap_addr] = lookup
        try:
            found = lookup.result(timeout=wait_s)
        except concurrent.futures.TimeoutError:
            return False
        del self._lookups[bootstrap_addr]
        return found and not self._refuse_misfit(bootstrap_addr)

    def _look_up(self, bootstrap_addr: str) -> bool:
        try:
            return bool(super().try_ensure_parallel_info(bootstrap_addr))
        except Exception as error:
            reason = str(error.args[0] if error.args else error)
            self._misfits_at[bootstrap_addr] = (time.monotonic(), reason)
            self._notice(f"prefill server {bootstrap_addr} does not fit this decode server: {reason}")
            return True

    def _refuse_misfit(self, bootstrap_addr: str) -> bool:
        """Whether a prefill server cannot serve this one, as was found out just now: then its requests fail with it."""
        since, reason = self._misfits_at.get(bootstrap_addr, (0.0, ""))
        if not reason or time.monotonic() - since > _REFUSAL_S:
            self._misfits_at.pop(bootstrap_addr, None)
            return False
        for room in list(self.addr_to_rooms_tracker.get(bootstrap_addr, ())):
            if self.request_status.get(room) == KVPoll.Bootstrapping:
                self.fail(room, reason)
                if self.attn_tp_rank == 0:
                    self._executor.submit(self._give_up_at, bootstrap_addr, room)
        return True

    def _give_up_at(self, bootstrap_addr: str, room: int) -> None:
        """Tells every rank of a prefill server that its request has no decode server."""

        def route(dp: int, cp: int, tp: int, pp: int) -> dict[str, Any]:
            ranks = f"prefill_dp_rank={dp}&prefill_cp_rank={cp}&target_tp_rank={tp}&target_pp_rank={pp}"
            answer = requests.get(f"http://{bootstrap_addr}/route?{ranks}", timeout=5)
            answer.raise_for_status()
            return dict(answer.json())

        message = AbortNotification(room=room, decode_ip=self.local_ip, decode_port=self.rank_port).to_zmq()
        try:
            info = route(-1, -1, -1, -1)
            sizes = [int(info[name]) for name in ("dp_size", "attn_cp_size", "attn_tp_size", "pp_size")]
            for ranks in itertools.islice(itertools.product(*map(range, sizes)), _RANKS_MAX):
                where = _address_in(route(*ranks))
                self._send_multipart_locked(where.to_tcp(), message, is_ipv6=where.is_ipv6)
        except Exception as error:
            self._notice(f"prefill server {bootstrap_addr} could not be told that a request is refused: {error}")

    def _resolve_rank_mapping(self, info: Any) -> None:
        ours, theirs = self.attn_tp_size, int(info.attn_tp_size)
        if theirs < 1 or max(ours, theirs) % min(ours, theirs):
            raise UnsupportedError(f"TP widths do not divide each other: prefill has {theirs}, decode has {ours}")
        super()._resolve_rank_mapping(info)

    def build_receiver_registration_message(self) -> list[bytes]:
        registration = Registration(
            endpoint=self.endpoint.id,
            addresses=tuple(self.endpoint.addresses),
            host=self.local_ip,
            port=self.rank_port,
            tp_size=self.attn_tp_size,
            tp_rank=int(self.kv_args.engine_rank) % self.attn_tp_size,
            page_size=int(self.kv_args.page_size),
            kv_dtype=str(self.kv_args.kv_cache_dtype_str),
            layout=layout_of(self.kv_args),
            namespace=self.namespace,
            kv=self.memory.targets(self.memory.kv),
            rows=self.memory.targets(self.memory.rows),
            ready_row=len(self.memory.rows) - (2 if get_disagg().disaggregation_enable_kv_checksum else 1),
            states=self.memory.target_states(),
        )
        return [_TAG, messages.encode(registration)]

    def build_receiver_metadata_message(
        self,
        *,
        bootstrap_room: int,
        required_dst_info_num: int,
        kv_indices: Any,
        aux_index: int | None,
        state_indices: Sequence[Any] | None,
        decode_prefix_len: int | None,
        is_dummy: bool,
        device_kv_indices: Any = None,
    ) -> list[bytes]:
        pages = np.asarray(kv_indices, np.int64).reshape(-1)
        states = [np.asarray([] if s is None else s, np.int64).reshape(-1) for s in state_indices or ()]
        row = int(aux_index or 0)
        grant = 0
        if not is_dummy:
            memory = self.memory
            items = [(memory.targets(memory.kv), pages), (memory.targets(memory.rows), np.array([row], np.int64))]
            items += [(memory.targets(memory.states[i][1]), numbers) for i, numbers in enumerate(states)]
            grant = self.grants.open(bootstrap_room, items)
        request = Request(
            room=bootstrap_room,
            endpoint=self.endpoint.id,
            host=self.local_ip,
            port=self.rank_port,
            num_targets=required_dst_info_num,
            dummy=is_dummy,
            grant=grant,
            row=row,
            pages=b"" if is_dummy else pages.astype("<i4").tobytes(),
            states=() if is_dummy else tuple(numbers.astype("<i4").tobytes() for numbers in states),
            prefix_tokens=int(decode_prefix_len or 0),
        )
        return [_TAG, messages.encode(request)]

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether no byte can land for the room any more: the prefill ranks are not asked."""
        self.grants.revoke(bootstrap_room)
        return self.grants.is_quiet(bootstrap_room)

    def should_verify_kv_checksum(self, bootstrap_addr: str) -> bool:
        info = self.prefill_info_table.get(bootstrap_addr)
        return info is not None and int(info.attn_tp_size) == self.attn_tp_size

    def follow(self, room: int, ranks: frozenset[Rank]) -> None:
        """From now on these prefill ranks may speak of the room, and losing one of them fails it."""
        self._ranks_of[room] = ranks

    def forget(self, room: int) -> None:
        self._ranks_of.pop(room, None)
        self.grants.revoke(room)

    def fail(self, room: int, reason: str) -> None:
        status = self.request_status.get(room)
        if status is not None and status not in (KVPoll.Success, KVPoll.Failed):
            self.record_failure(room, reason)
            self.update_status(room, KVPoll.Failed)

    def _on_decode_message(self, frames: list[bytes]) -> None:
        if frames and frames[0] != _TAG:
            return  # an acknowledgement of an abort, which nobody waits for
        message = _decode_frames(frames)
        if not isinstance(message, Status) or message.status != KVPoll.Failed:
            raise MessageError(f"a {type(message).__name__} is nothing that a decode server hears here")
        self._on_status(message)

    def _hear_endpoint(self) -> None:
        while not self._closed:
            for event in self.endpoint.receive(timeout_s=1.0):
                try:
                    if event.kind == "lost":
                        self._on_lost(event.peer, event.reason)
                    else:
                        self._on_peer_message(event.peer, messages.decode(event.message))
                except MessageError as error:
                    self._notice(f"a message of a prefill server was refused: {error}")
                except Exception:
                    logger.exception("a message of a prefill server could not be dealt with")

    def _on_peer_message(self, peer: int, message: Any) -> None:
        if isinstance(message, Hello):
            self._rank_of_peer[peer] = (message.host, message.port)
        elif isinstance(message, Status):
            if self._rank_of_peer.get(peer) not in self._ranks_of.get(message.room, ()):
                return  # the room is over, or was never this peer's
            self._on_status(message)
        else:
            raise MessageError(f"a {type(message).__name__} is nothing that a prefill server sends")

    def _on_status(self, message: Status) -> None:
        self.apply_prefill_status(
            bootstrap_room=message.room,
            status=message.status,
            prefill_rank=message.rank,
            failure_reason=message.reason or None,
        )

    def _on_lost(self, peer: int, why: str) -> None:
        """A prefill rank is gone: what it serves fails now, and the next request asks who is there."""
        rank = self._rank_of_peer.pop(peer, None)
        if rank is None or rank in self._rank_of_peer.values():
            return
        rooms = [room for room, ranks in list(self._ranks_of.items()) if rank in ranks]
        for room in rooms:
            self.fail(room, f"the connection to prefill rank {rank[0]}:{rank[1]} is lost: {why}")
        self._drop_rank(rank)
        logger.warning("the connection to prefill rank %s:%d is lost (%s), %d rooms", rank[0], rank[1], why, len(rooms))

    def _drop_rank(self, rank: Rank) -> None:
        with self.connection_lock:
            for key, infos in list(self.connection_pool.items()):
                if any((info.get("rank_ip"), int(info.get("rank_port") or 0)) == rank for info in infos):
                    del self.connection_pool[key]
        self.disconnect(NetworkAddress(*rank).to_tcp())

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> None:
        with self.connection_lock:
            infos = [
                info
                for key, infos in self.connection_pool.items()
                if key.startswith(f"{failed_bootstrap_addr}_")
                for info in infos
            ]
        super()._handle_node_failure(failed_bootstrap_addr)
        for info in infos:
            self._drop_rank((info["rank_ip"], int(info["rank_port"])))

    def _on_refused(self, name: str) -> None:
        """The other side of a control socket has another secret: what waits for it fails with that reason."""
        if self.disaggregation_mode != DisaggregationMode.DECODE:
            return
        for room, ranks in list(self._ranks_of.items()):
            if any(NetworkAddress(*rank).to_tcp() == name for rank in ranks):
                self.fail(room, f"prefill rank {name} refused the connection: the secrets differ, or one side has none")


class TpuSyncKVSender(CommonKVSender):  # type: ignore[misc]
    """A request on the prefill side."""

    def __init__(
        self,
        mgr: TpuSyncKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self._is_owner = mgr.claim(bootstrap_room, self)
        if self._is_owner:
            super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
            if mgr.was_given_up(bootstrap_room):
                mgr.record_failure(bootstrap_room, "the decode server gave the request up")
                mgr.update_status(bootstrap_room, KVPoll.Failed)
            return
        self.kv_mgr, self.bootstrap_room = mgr, bootstrap_room
        self.conclude_state = KVPoll.Failed

    def pop_decode_prefix_len(self) -> int:
        return super().pop_decode_prefix_len() if self._is_owner else 0

    def clear(self) -> None:
        if self._is_owner:
            self._is_owner = False
            super().clear()
            self.kv_mgr.release(self.bootstrap_room)

    def abort(self) -> None:
        if self._is_owner:
            self.kv_mgr.conclude_failure(bootstrap_room=self.bootstrap_room, failure_reason="Aborted by AbortReq.")
            super().abort()

    def failure_exception(self) -> None:
        if not self._is_owner and self.conclude_state == KVPoll.Failed and not hasattr(self, "aux_index"):
            raise KVTransferError(self.bootstrap_room, f"bootstrap room {self.bootstrap_room} is in use")
        super().failure_exception()


class TpuSyncKVReceiver(CommonKVReceiver):  # type: ignore[misc]
    """A request on the decode side."""

    def __init__(self, mgr: TpuSyncKVManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.bootstrap_room: Any
        self.bootstrap_infos: Any
        self._is_duplicate = bootstrap_room in mgr.request_status
        if not self._is_duplicate:
            super().__init__(mgr, bootstrap_addr, bootstrap_room)
            return
        self.kv_mgr, self.bootstrap_addr, self.bootstrap_room = mgr, bootstrap_addr, bootstrap_room
        self.conclude_state = KVPoll.Failed
        self.require_staging = False
        self.abort_notified = False
        self.bootstrap_infos = None
        self.init_time = None

    def init(self, prefill_dp_rank: int) -> None:
        if self._is_duplicate:
            return
        try:
            super().init(prefill_dp_rank)
        except Exception as error:
            logger.exception("room %s could not be opened", self.bootstrap_room)
            self._give_up(f"the answers of bootstrap server {self.bootstrap_addr} are of no use: {error}")
        if self.conclude_state is None and self.bootstrap_infos:
            ranks = frozenset((info["rank_ip"], int(info["rank_port"])) for info in self.bootstrap_infos)
            self.kv_mgr.follow(self.bootstrap_room, ranks)

    def send_metadata(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().send_metadata(*args, **kwargs)
        except TpuSyncError as error:
            self._give_up(str(error))

    def poll(self) -> int:
        """The end of a room is told when no byte can land in its pages any more."""
        if self._is_duplicate:
            return int(KVPoll.Failed)
        status = int(super().poll())
        if status in (KVPoll.Success, KVPoll.Failed):
            self.kv_mgr.grants.revoke(self.bootstrap_room)
            if not self.kv_mgr.grants.is_quiet(self.bootstrap_room):
                return int(KVPoll.Transferring)
        return status

    def clear(self) -> None:
        if not self._is_duplicate:
            super().clear()
            self.kv_mgr.forget(self.bootstrap_room)

    def abort(self) -> None:
        if not self._is_duplicate:
            super().abort()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        if not self._is_duplicate:
            self.kv_mgr.grants.revoke(self.bootstrap_room)
            super().ensure_abort_notified(force_arm=force_arm)

    def failure_exception(self) -> None:
        if self._is_duplicate:
            raise KVTransferError(self.bootstrap_room, f"bootstrap room {self.bootstrap_room} is in use")
        self.invalidate_cached_bootstrap_infos()  # the next request asks who is there, and registers
        super().failure_exception()

    def _give_up(self, reason: str) -> None:
        self.kv_mgr.record_failure(self.bootstrap_room, reason)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed

    def _connect_to_bootstrap_server(self, bootstrap_info: dict[str, Any]) -> tuple[zmq.Socket[bytes], threading.Lock]:
        where = NetworkAddress(bootstrap_info["rank_ip"], bootstrap_info["rank_port"])
        socket = self.kv_mgr._connect(where.to_tcp(), where.is_ipv6)
        return socket, self.kv_mgr._socket_send_locks.setdefault(where.to_tcp(), threading.Lock())

    def _get_bootstrap_info_from_server(self, *ranks: int) -> dict[str, Any] | None:
        """What a bootstrap server answers is an address that is to be tried, not to be believed."""
        info = super()._get_bootstrap_info_from_server(*ranks)
        if info is None:
            return None
        try:
            where = _address_in(info)
        except ValueError as error:
            self.kv_mgr._notice(f"bootstrap server {self.bootstrap_addr} names no address of a prefill rank: {error}")
            return None
        return {**info, "rank_ip": where.host, "rank_port": where.port}


class TpuSyncKVBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]
    """SGLang's registry of prefill ranks. Its answers are addresses, which prove themselves by the secret."""


def _remember(rooms: OrderedDict[int, Any], room: int, what: Any) -> None:
    rooms[room] = what
    while len(rooms) > _ROOMS_MAX:
        rooms.popitem(last=False)


def _address_in(info: dict[str, Any]) -> NetworkAddress:
    """The control address in the answer of a bootstrap server. Raises ValueError."""
    try:
        host, port = str(info["rank_ip"]).strip("[]"), int(info["rank_port"])
        ipaddress.ip_address(host)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if not 1 <= port <= 65535:
        raise ValueError(f"port {port}")
    return NetworkAddress(host, port)


def _room_in(frames: Sequence[bytes]) -> int:
    """The room of SGLang's ABORT. Raises MessageError, where SGLang's own parser logs each."""
    try:
        return int(frames[1].decode("ascii"))
    except (IndexError, ValueError) as error:
        raise MessageError("an ABORT that names no room") from error


def _decode_frames(frames: Sequence[bytes]) -> Any:
    if len(frames) != 2 or frames[0] != _TAG:
        raise MessageError(f"{len(frames)} frames that are none of ours")
    return messages.decode(frames[1])
