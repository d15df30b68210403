"""The native core, as Python sees it. Every call that may block releases the GIL.

Arrays are C-contiguous numpy arrays of the dtype named here; anything else is a TypeError. Keys are raw bytes:
`n` keys are one bytes object of `n * KEY_BYTES`. Addresses are those of memory that the caller keeps alive and
unmoved until the ticket is done. Codes of base/error.h arrive as the exceptions of `sglang_tpusync.errors`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, final

import numpy as np
from numpy.typing import NDArray

KEY_BYTES: int  # 32, a SHA-256

# Outcome of one page of a batch: 0 ok, else a code of base/error.h. OUTCOME_NAMES[code] is its name.
OUTCOME_NAMES: tuple[str, ...]

def take_log_lines() -> list[tuple[Literal["debug", "info", "warning", "error"], str]]:
    """What the core had to say since the last call, oldest first, at most the newest 256 lines. From the first call on
    nothing goes to standard error any more.
    """

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
        num_threads: int = 0,
        allow_tmpfs: bool = False,
        ttl_s: float | None = None,  # since a page was written, in whole seconds; after it the page is a miss
        latency_budget_s: float = 2.0,  # of one transfer: a slower one counts as a failure of the disk
        memory: Sequence[tuple[int, int]] = (),  # (address, bytes) of what most pages are in: io_uring registers it,
        # which makes all of it present, where the limit on locked memory lets it; mapped until close()
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
class HostRegion:
    """A pool of host DRAM in a named shared file: pages that are sealed stay readable by the node after their slot is
    freed, until it is allocated again, and are adopted by the next process of the namespace. One writer, thread-safe.

    The constructor adopts a region that has no living writer, else makes one. Raises ConfigError (a value out of its
    range, a directory that may not be used) or StorageError (no room: the message has the arithmetic).
    """

    def __init__(
        self,
        *,
        root: str,  # directory of the node's regions, in memory: mode 0700
        namespace: bytes,  # 32 bytes, the digest of the identity
        piece_bytes: Sequence[int],  # the pieces of a page; piece p of slot s begins at the sum of num_slots *
        # piece_bytes[:p], plus s * piece_bytes[p]: a tensor of shape [pieces][slots][...]
        num_slots: int,  # pages
        cap_bytes: int | None = None,  # of all regions under root; None: what the memory allows
        reserve_bytes: int = 1 << 30,  # memory left to others
        numa_node: int = -1,  # -1: wherever
        num_threads: int = 4,  # that make memory present
    ) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def available(self) -> int:
        """Slots that alloc can give now."""
    def memory(self) -> NDArray[np.uint8]:
        """The pool's bytes, writable, no copy; the array keeps the region open."""
    def alloc(self, count: int) -> NDArray[np.int64] | None:
        """Slots, in the order of eviction; what was sealed in them is gone. None if there are not enough. O(count)."""
    def free(self, slots: NDArray[np.int64]) -> None:
        """In prefix order: the first is evicted last. ConfigError, and nothing is freed, if one is not in use."""
    def free_all(self) -> None: ...
    def seal(self, keys: bytes, prefix: bytes, slots: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Declares that the slots hold these pages; the bytes are summed up, not copied. One outcome per page.

        ok: the page is readable now, here or in another slot that is in use; invalid: the slot is not in use;
        cancelled: it was freed meanwhile. All three are counted: host_seals_total and host_seals_already_total,
        host_seals_not_in_use_total, host_seals_cancelled_total. ConfigError: not as many slots as keys.
        """
    def match(self, keys: bytes, prefix: bytes) -> int: ...
    def contains(self, keys: bytes) -> NDArray[np.bool_]: ...
    def remove(self, keys: bytes) -> int: ...
    def clear(self) -> int: ...
    def keys(self) -> bytes: ...
    def stats(self) -> Mapping[str, int | float | str]:
        """Counters and gauges by name: host_pages_adopted_total when it was opened, host_pages_evicted_total
        unsealed because their slot was allocated, host_sealed_bytes_total, and others."""

@final
class PromisedPages:
    """Pages that stay in DRAM, verified, until release() or the end of this object."""

    @property
    def num_pages(self) -> int: ...
    def release(self) -> None: ...

@final
class TierStack:
    """Own DRAM, the DRAM of the node's other processes, and flash, as one. Thread-safe.

    Keeps region and store open. ConfigError for a value out of its range. Close it, or drop it, before the store is
    closed: then everything it has read is delivered.
    """

    def __init__(
        self,
        *,
        region: HostRegion,
        store: FlashStore | None,
        spill: Literal["never", "through", "selective", "lazy"] = "through",
        num_copy_threads: int = 2,
        pin_lifetime_s: float = 30.0,  # of a page that a lookup reported and nobody fetched
        # A match is no longer than flash delivers in time, if all three figures are given (0 to 86400 each, some
        # of them only: ConfigError) and it is not switched off.
        limit_promises: bool | None = None,
        deadline_base_s: float | None = None,  # what a prefetch may take, as SGLang counts it,
        deadline_per_page_s: float | None = None,  # and how much more for each page
        recompute_per_page_s: float | None = None,  # a load that is slower is declined; 0: unknown
    ) -> None: ...
    def match(self, keys: bytes, prefix: bytes) -> tuple[int, int, int, int]:
        """Leading pages, and how many of them are nearest in own DRAM, in a peer's, on flash."""
    def submit_get(
        self,
        keys: bytes,
        prefix: bytes,
        addresses: NDArray[np.uint64],  # [n, pieces]
        slots: NDArray[np.int64] | None = None,  # of the region, in use, where the addresses point
        timeout_s: float | None = None,
    ) -> Ticket:
        """Outcome ok: the bytes are those that were sealed. With slots, pages are sealed where they land, each only
        if its slot has not been freed since this call. ConfigError: a slot that is not in use, named twice, or not
        where its addresses point; after close() every outcome is cancelled."""
    def put(self, keys: bytes, prefix: bytes, slots: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Seals, outcomes as HostRegion.seal; the way to flash is the spill policy's."""
    def promise(self, keys: bytes, prefix: bytes, timeout_s: float | None = None) -> PromisedPages: ...
    def flush(self, timeout_s: float | None = None) -> bool: ...
    def remove(self, keys: bytes) -> tuple[int, int]:
        """Drops pages from the region and from flash; answers how many there were in each. A get or put of the same
        page that runs meanwhile may bring it back. Regions of other processes keep theirs."""
    def clear(self) -> tuple[int, int]:
        """Drops all pages, of what is under way, too: nothing from before is in the region or on flash afterwards."""
    def close(self) -> None:
        """Waits for what is under way and joins all threads; later calls find nothing and seal nothing."""
    def stats(self) -> Mapping[str, int | float | str]: ...

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
    def device(
        *, num_layers: int, num_slots: int, row_bytes: int, row_stride_bytes: int, page_size: int
    ) -> PageGeometry:
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

class evict:  # a submodule: replays of requests against the eviction of the store, see sglang_tpusync/bench/evict.py
    @staticmethod
    def replay(
        pages: NDArray[np.uint32],  # of all requests, one behind the other: numbers below their count
        ends: NDArray[np.uint64],  # request i ends before ends[i]
        *,
        policy: Literal["reuse", "leaf_lru", "lru", "s3_fifo"],
        num_slots: int,
        front_pages: int,  # of a cache in front that hides its hits; 0: none
        requests_after_crash: int,  # what they find in the store alone, after each twentieth of all; 0: no crash
    ) -> dict[str, Any]:
        """pages, front_hits, hits, written and hit_rate_after_crash. Raises ConfigError for bad numbers."""
    @staticmethod
    def optimum(pages: NDArray[np.uint32], ends: NDArray[np.uint64], *, num_slots: int) -> int:
        """The hits of a cache that knows the future."""

class layout:  # a submodule; sglang_tpusync/layout.py says what it means
    KERNELS: tuple[str, ...]  # implementations of the inner loops that run here, the best last
    DTYPES: tuple[tuple[str, int], ...]  # name, bits

    @final
    class TiledLayout:
        @staticmethod
        def parse(text: str, dtype: str, dims: list[int]) -> layout.TiledLayout: ...
        @staticmethod
        def linear(dtype: str, dims: list[int]) -> layout.TiledLayout: ...
        @property
        def text(self) -> str: ...
        @property
        def dtype(self) -> str: ...
        @property
        def dtype_bits(self) -> int: ...
        @property
        def dims(self) -> tuple[int, ...]: ...
        @property
        def minor_to_major(self) -> tuple[int, ...]: ...
        @property
        def tiles(self) -> tuple[tuple[int, ...], ...]: ...
        @property
        def memory_space(self) -> int: ...
        @property
        def element_bits(self) -> int: ...
        @property
        def padded_bytes(self) -> int: ...
        @property
        def page_bytes(self) -> int | None: ...
        def offset_bits(self, index: list[int]) -> int: ...
        def runs(self, origin: list[int], extent: list[int]) -> NDArray[np.uint64]:
            """[num_runs, 4]: offset, length, count, stride in bytes."""
        def tile(
            self,
            tiled: NDArray[np.uint8],
            codes: NDArray[np.unsignedinteger[Any]],
            fill: int,
            num_threads: int,
            kernels: str | None = None,
        ) -> None: ...
        def untile(
            self,
            codes: NDArray[np.unsignedinteger[Any]],
            tiled: NDArray[np.uint8],
            num_threads: int,
            kernels: str | None = None,
        ) -> None: ...
        def live_mask(self) -> NDArray[np.uint8]: ...

    @final
    class Plan:
        @property
        def src_bytes(self) -> list[int]: ...
        @property
        def dst_bytes(self) -> list[int]: ...
        @property
        def moved_bytes(self) -> int: ...
        @property
        def steps(self) -> list[tuple[int, int, int]]: ...
        def apply(
            self,
            src: list[NDArray[np.uint8]],
            dst: list[NDArray[np.uint8]],
            num_threads: int,
            kernels: str | None = None,
        ) -> None: ...
        def describe(self) -> str: ...
        def encode(self) -> bytes: ...
        @staticmethod
        def decode(data: bytes) -> layout.Plan: ...

    @staticmethod
    def plan(
        src_dims: list[int],
        src_dtype: str,
        src: list[tuple[list[int], list[int], list[int], layout.TiledLayout, list[list[int]]]],
        dst_dims: list[int],
        dst_dtype: str,
        dst: list[tuple[list[int], list[int], list[int], layout.TiledLayout, list[list[int]]]],
    ) -> layout.Plan: ...

class store:  # a submodule; sglang_tpusync/store/ says what it means. Raises StorageError for what cannot be read
    FORMAT_VERSION: int

    @staticmethod
    def view(path: str) -> dict[str, Any]:
        """Names, sizes, headers and locks of a store directory; writes nothing."""
    @staticmethod
    def limits(
        *,
        path: str,
        capacity_bytes: int | None,
        floor_bytes: int | None,
        write_budget_bytes_per_day: int | None,
    ) -> dict[str, int | None]:
        """The limits that a process with these options would have, and what is left of the day's budget."""
    @staticmethod
    def summarize(base_path: str, namespace: bytes | None, num_trees_max: int) -> dict[str, Any]:
        """Entries of a region, and its largest trees of pages that continue each other."""
    @staticmethod
    def remove_region(path: str, base_path: str) -> None: ...
    @staticmethod
    def remove_orphans(path: str, *, dry_run: bool) -> list[str]: ...
    @staticmethod
    def view_dram(root: str) -> list[dict[str, Any]]:
        """Every DRAM region under a directory, which is made if it is missing; writes to none of them."""
    @staticmethod
    def dram_keys(path: str, namespace: bytes) -> bytes:
        """Keys of the pages of a DRAM region, 32 bytes each."""
    @staticmethod
    def remove_dram(root: str, path: str) -> bool:
        """Removes a DRAM region; False, and it stays, if a process writes it."""

    @final
    class DramCheck:
        """As RegionCheck, for a DRAM region; repairs nothing: who reads a damaged page drops it."""

        def __init__(self, path: str, namespace: bytes) -> None: ...
        def step(self, num_bytes: int) -> bool: ...
        @property
        def progress(self) -> dict[str, int]: ...
        @property
        def findings(self) -> list[dict[str, Any]]: ...

    @final
    class RegionCheck:
        """Compares all that a region says with what it holds. For one thread at a time."""

        def __init__(self, base_path: str, namespace: bytes | None) -> None: ...
        def step(self, num_bytes: int) -> bool:
            """Goes on for about `num_bytes` of payload; False once all is done."""
        @property
        def progress(self) -> dict[str, int]: ...
        @property
        def findings(self) -> list[dict[str, Any]]: ...
        def repair(self, path: str, base_path: str) -> int:
            """Settles the findings of a finished check, unless the region has a writer; answers how many."""

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
        checksum: bool = True,  # of payload through a socket: made, and demanded
        same_host: bool = True,
        rate_bytes_per_s_max: int = 0,  # 0: none
        inflight_bytes_max: int = 67108864,  # per peer
        queued_bytes_max: int = 8589934592,  # per peer
        queued_transfers_max: int = 65536,  # per peer
        inbox_messages_max: int = 4096,  # of one peer
        inbox_bytes_max: int = 16777216,  # of one peer
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

        An error leaves open which bytes have landed; after "disconnected" and "cancelled" some may be on their way,
        until the peer has revoked the grant.
        """
    def submit_message(self, peer: int, message: bytes) -> Ticket:
        """1 to 65536 bytes. Done when they lie in the peer's inbox."""
    def receive(self, count_max: int = 64, timeout_s: float | None = None) -> list[TransportEvent]:
        """Waits for the first event, then takes what is there; empty when the time is over or close() was called."""
    def peers(self) -> list[PeerInfo]: ...
    def stats(self) -> Mapping[str, int]: ...
    def close(self) -> None:
        """Cancels what is not resolved; returns when no byte moves any more."""
