"""The native core, as Python sees it. Every call that may block releases the GIL.

Arrays are C-contiguous numpy arrays of the dtype named here; anything else is a TypeError. Keys are raw bytes:
`n` keys are one bytes object of `n * KEY_BYTES`. Addresses are those of memory that the caller keeps alive and
unmoved until the ticket is done. Codes of base/error.h arrive as the exceptions of `sglang_tpusync.errors`.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict, final

import numpy as np
from numpy.typing import NDArray

KEY_BYTES: int  # 32, a SHA-256

# Outcome of one page of a batch: 0 ok, else a code of base/error.h. OUTCOME_NAMES[code] is its name.
OUTCOME_NAMES: tuple[str, ...]

@final
class Ticket:
    """The receipt for work that runs elsewhere. Thread-safe."""

    @property
    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until done or until the time is over; answers whether it is done. Never raises for the work."""
    def cancel(self) -> None: ...
    def error(self) -> str | None:
        """What went wrong with the work as a whole, None if nothing did. For a batch see `outcomes`."""
    def outcomes(self) -> NDArray[np.uint8]:
        """One code per page of a batch, only once done; empty for work that is no batch."""

@final
class FlashStore:
    """One namespace of a store directory, opened for writing by this process (one region), see docs/formats/.

    Thread-safe. Raises ConfigError (a value out of its range, a path that may not be used) or StorageError
    (the system refused, a newer format version) from the constructor, nothing from the data calls.
    """

    def __init__(
        self,
        *,
        path: str,
        namespace: bytes,  # 32 bytes, the digest of the identity
        namespace_json: str,  # the readable fields of the identity, kept beside the region
        page_bytes: int,  # payload of one page, 1 to 2**32 - 1
        capacity_bytes: int | None = None,  # of the whole directory; None: min(20 % of what is free, 200 GB)
        floor_bytes: int | None = None,  # free space left to others; None: 20 % of the file system
        write_budget_bytes_per_day: int | None = None,  # of the whole directory; None: one capacity
        fsync: Literal["none", "interval", "always"] = "none",
        io: Literal["auto", "uring", "threads", "buffered"] = "auto",
        num_threads: int = 4,
        allow_tmpfs: bool = False,
    ) -> None: ...
    def submit_put(
        self,
        keys: bytes,  # n keys in prefix order: page i+1 continues page i
        prefix: bytes,  # the keys of all earlier pages of the prefix, head first; may be empty
        addresses: NDArray[np.uint64],  # [n, num_segments] of the pieces that make up a page
        lengths: NDArray[np.uint64],  # [num_segments] bytes; they sum up to page_bytes
        timeout_s: float | None = None,
    ) -> Ticket:
        """Stores pages. Outcome 0: the page is stored or was there already and survives a SIGKILL from now on."""
    def submit_get(
        self,
        keys: bytes,
        prefix: bytes,
        addresses: NDArray[np.uint64],  # [n, num_segments]; bytes of a page whose outcome is not 0 are undefined
        lengths: NDArray[np.uint64],
        timeout_s: float | None = None,
    ) -> Ticket:
        """Reads pages into caller memory and verifies them. Outcome 0: the bytes are those that were put."""
    def match(self, keys: bytes, prefix: bytes) -> int:
        """Number of leading keys that are stored; touches them and their ancestors. Microseconds, no IO."""
    def contains(self, keys: bytes) -> NDArray[np.bool_]: ...
    def remove(self, keys: bytes) -> int:
        """Drops entries; answers how many there were."""
    def clear(self) -> int: ...
    def keys(self) -> bytes:
        """Every key stored in this namespace, most recently used first."""
    def stats(self) -> Mapping[str, int | float | str]:
        """Counters and gauges by name; the names end in their unit (docs/architecture.md, metrics)."""
    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until all that was submitted is done and, unless fsync is 'none', on the medium."""
    def close(self) -> None: ...

@final
class CopyStream:
    """An in-order queue of copies, executed by the threads of a HostDevice."""

    def submit_copy(
        self,
        # Base addresses, parts in the same order on both sides (K then V; MLA has one part). A part of a device
        # geometry has num_layers buffers, a part of a host geometry has one: MHA is [2 * num_layers] against [2].
        dst_bases: NDArray[np.uint64],
        dst_sizes: NDArray[np.uint64],  # bytes of each buffer: every run is checked against them
        src_bases: NDArray[np.uint64],
        src_sizes: NDArray[np.uint64],
        dst: PageGeometry,
        src: PageGeometry,
        dst_slots: NDArray[np.int64],  # token slots, [num_tokens]; num_tokens is a multiple of the page size
        src_slots: NDArray[np.int64],
        layers: tuple[int, int],  # half-open range of layers of the geometries to copy
    ) -> Ticket:
        """Queues a copy. Never blocks on it, never raises for values: what is wrong with them fails the ticket.

        Refused before a byte moves: a slot out of range, a destination slot given twice, a page that a paged
        host layout (page_first_direct, page_head) cannot hold as one, a run beyond a buffer, overlapping buffers.
        """
    def submit_marker(self) -> Ticket:
        """A ticket that is done when all that was submitted before is done: an event of the stream."""
    def pause(self, timeout_s: float) -> None:
        """For tests: the stream starts nothing for this long."""

@final
class HostDevice:
    """A device whose HBM is ordinary memory (SGLang's --device cpu)."""

    def __init__(self, *, num_threads: int) -> None: ...
    def open_stream(self, name: str) -> CopyStream: ...

@final
class PageGeometry:
    """Where the KV of a token of a layer lies in a pool: layout/page_geometry.h. Immutable."""

    @staticmethod
    def device(*, num_layers: int, num_slots: int, row_bytes: int, row_stride_bytes: int, page_size: int) -> PageGeometry:
        """SGLang's device pool: one buffer per layer of (num_slots, row)."""
    @staticmethod
    def host(
        *,
        layout: Literal["layer_first", "page_first", "page_first_direct", "page_head"],
        num_layers: int,
        num_slots: int,
        num_heads: int,
        head_bytes: int,  # row_bytes = num_heads * head_bytes
        page_size: int,
    ) -> PageGeometry:
        """SGLang's host pool of one part (K, V or MLA's latent): one buffer for all layers."""
    @property
    def row_bytes(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...

@final
class TransportEvent:
    """What `Endpoint.receive` hands out. Immutable."""

    @property
    def kind(self) -> Literal["message", "lost"]: ...
    @property
    def peer(self) -> int: ...
    @property
    def message(self) -> bytes:
        """Of a message; empty for a lost peer."""
    @property
    def reason(self) -> str:
        """Why a peer is lost; empty for a message."""

class PeerInfo(TypedDict):
    id: int
    endpoint: bytes  # Endpoint.id of the other side, 16 bytes
    remote: str
    same_host: bool  # bytes are fetched from memory instead of sent
    queued_bytes: int

@final
class Endpoint:
    """One side of any number of transfers: transport/endpoint.h. Thread-safe.

    It writes registered memory into ranges that peers have granted, carries small messages, and lets peers write into
    what it granted to them. Raises ConfigError for an argument that is wrong, TransferError (DeadlineError) for a
    peer that is not there, a limit that is reached (the message names it) or a region that is in use.
    """

    def __init__(
        self,
        *,
        bind: Sequence[str] = ("127.0.0.1:0",),  # numbers only; port 0: a free one; empty: dial only
        source: Sequence[str] = (),  # local addresses of outgoing streams, used in turn
        secret_file: str = "",  # 16 to 4096 bytes; needed beyond loopback
        allow_unauthenticated: bool = False,  # waives the line above
        num_streams: int = 4,  # TCP streams per dialled peer
        num_io_threads: int = 1,
        frame_bytes: int = 262144,
        checksum: bool = True,
        same_host: bool = True,
        rate_bytes_per_s_max: int = 0,  # 0: none
        inflight_bytes_max: int = 67108864,  # per peer
        queued_bytes_max: int = 8589934592,  # per peer
        queued_transfers_max: int = 65536,  # per peer
        inbox_messages_max: int = 65536,
        num_peers_max: int = 1024,
        num_handshakes_max: int = 256,
        num_grants_max: int = 65536,
        heartbeat_s: float = 0.5,
        silence_s: float = 2.0,
        progress_s: float = 10.0,
        handshake_s: float = 2.0,
    ) -> None: ...
    @property
    def id(self) -> bytes:
        """16 random bytes, of this object for ever."""
    @property
    def addresses(self) -> tuple[str, ...]: ...
    def register_region(self, address: int, length: int) -> int:
        """Answers the number by which peers name it. The memory lies still until release_region succeeded."""
    def release_region(self, region: int) -> None:
        """TransferError while a grant or a transfer needs it."""
    def open_grant(
        self,
        regions: NDArray[np.uint32],  # [n]
        offsets: NDArray[np.uint64],  # [n]
        lengths: NDArray[np.uint64],  # [n]; the ranges do not overlap
        holder: bytes | None = None,  # Endpoint.id of the only peer that may use it
    ) -> int:
        """Makes ranges writable. Answers an unguessable number of 64 bits: tell it to the peer."""
    def revoke_grant(self, grant: int) -> Ticket:
        """Done when no byte can land under it any more, whatever the peer does."""
    def connect(self, addresses: Sequence[str], timeout_s: float | None = None) -> int:
        """Blocks until every stream to the endpoint at these addresses is open; answers the number of the peer."""
    def disconnect(self, peer: int) -> None:
        """What is not resolved is cancelled."""
    def submit_write(
        self,
        peer: int,
        grant: int,
        addresses: NDArray[np.uint64],  # [n] in registered regions here
        regions: NDArray[np.uint32],  # [n] of the peer
        offsets: NDArray[np.uint64],  # [n] in these
        lengths: NDArray[np.uint64],  # [n]
        timeout_s: float | None = None,  # nothing is sent after it
    ) -> Ticket:
        """No error once every byte is in the peer's memory and verified. The memory is unchanged until it is done.

        An error "disconnected: ..." leaves open which bytes have landed.
        """
    def submit_message(self, peer: int, message: bytes) -> Ticket:
        """1 to 65536 bytes. Done when they lie in the peer's inbox."""
    def receive(self, count_max: int = 64, timeout_s: float | None = None) -> list[TransportEvent]:
        """Waits for the first event, then takes what is there; empty when the time is over or close() was called."""
    def peers(self) -> list[PeerInfo]: ...
    def stats(self) -> Mapping[str, int]: ...
    def close(self) -> None:
        """Cancels what is not resolved; returns when no byte moves any more."""
