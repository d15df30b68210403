"""What prefill and decode servers tell each other, and nothing that believes it unchecked.

    Registration  decode -> prefill, once per pair of ranks: where its buffers are, and what lies in them
    Request       decode -> prefill, once per request and rank: the pages, rows and grant of that request
    Status        prefill -> decode: how a request ended, or that its KV is ready to be asked for
    Hello         prefill -> decode, over a data connection that was just opened: whose connection it is

A message is one byte that names the version, and a MessagePack array that begins with the message's kind. A peer of
another version is refused with both versions named. `decode` raises MessageError for all that is no message of ours.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from sglang_tpusync.errors import TransferError

__all__ = [
    "VERSION",
    "Buffer",
    "Hello",
    "MessageError",
    "Registration",
    "Request",
    "State",
    "Status",
    "decode",
    "encode",
    "indices",
]

VERSION = 1
MESSAGE_BYTES_MAX = 64 << 20  # 16 million pages of a request

_Size = Annotated[int, Meta(ge=0, le=2**62)]
_Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Width = Annotated[int, Meta(ge=1, le=65536)]
_Room = int
_Word = Annotated[int, Meta(ge=0)]
_Port = Annotated[int, Meta(ge=1, le=65535)]
_Text = Annotated[str, Meta(max_length=1024)]
_EndpointId = Annotated[bytes, Meta(min_length=16, max_length=16)]


class MessageError(TransferError):
    """Bytes that are no message of this version, or one whose fields contradict each other."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    pass


class Buffer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Registered memory of a decode server: items of equal size, one after the other."""

    region: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    num_bytes: _Size
    item_bytes: Annotated[int, Meta(ge=1, le=2**40)]  # of a page of KV, of a row of metadata or state
    layer: int  # global number, -1 where SGLang names none


class State(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A pool beside KV that travels with the last chunk: SWA, Mamba, DSA indexer."""

    kind: _Text
    buffers: Annotated[tuple[Buffer, ...], Meta(max_length=65536)]


class Registration(_Message, frozen=True, kw_only=True, tag="registration"):
    endpoint: _EndpointId
    addresses: Annotated[tuple[_Text, ...], Meta(min_length=1, max_length=64)]  # of the endpoint
    host: _Text  # where the decode rank hears control messages
    port: _Port
    tp_size: _Width
    tp_rank: _Count
    page_size: _Width  # tokens
    kv_dtype: _Text
    layout: _Text  # order of the elements of a page
    namespace: _Text  # digest of the weights; empty: unknown
    kv: Annotated[tuple[Buffer, ...], Meta(max_length=65536)]
    rows: Annotated[tuple[Buffer, ...], Meta(min_length=1, max_length=256)]  # SGLang's metadata buffers
    ready_row: _Count  # which of them says that all is there
    states: Annotated[tuple[State, ...], Meta(max_length=64)]


class Request(_Message, frozen=True, kw_only=True, tag="request"):
    room: _Room
    endpoint: _EndpointId
    host: _Text
    port: _Port
    num_targets: _Width  # decode ranks that this prefill rank serves for the room
    dummy: bool = False  # this rank has nothing to write, and only needs to know of the room
    grant: _Word = 0
    row: _Count = 0
    pages: bytes = b""  # int32, little-endian: the numbers of the decode server's pages, in the order of tokens
    states: Annotated[tuple[bytes, ...], Meta(max_length=64)] = ()  # the same for each state
    prefix_tokens: _Size = 0  # the decode server has these, and wants what follows


class Status(_Message, frozen=True, kw_only=True, tag="status"):
    room: _Room
    status: Annotated[int, Meta(ge=0, le=4)]  # SGLang's KVPoll
    rank: _Count  # of the prefill server
    reason: Annotated[str, Meta(max_length=4096)] = ""


class Hello(_Message, frozen=True, kw_only=True, tag="hello"):
    host: _Text  # where the prefill rank hears control messages
    port: _Port


_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Registration | Request | Status | Hello)


def encode(message: Registration | Request | Status | Hello) -> bytes:
    return bytes([VERSION]) + msgspec.msgpack.encode(message)


def decode(data: bytes) -> Any:
    """The message in `data`. Raises MessageError that says what is wrong with it."""
    if not 1 <= len(data) <= MESSAGE_BYTES_MAX:
        raise MessageError(f"a message of {len(data)} bytes: allowed are 1 to {MESSAGE_BYTES_MAX}")
    if data[0] != VERSION:
        raise MessageError(
            f"the peer speaks version {data[0]} of these messages, this process version {VERSION}: install the same one"
        )
    try:
        return _decoder.decode(memoryview(data)[1:])
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"a message of {len(data)} bytes is none of ours: {error}") from error


def indices(data: bytes, what: str, count: int) -> NDArray[np.int64]:
    """int64[n] of item numbers below `count`. Raises MessageError."""
    if len(data) % 4:
        raise MessageError(f"{what}: {len(data)} bytes are no int32 numbers")
    out = np.frombuffer(data, "<i4").astype(np.int64)
    if len(out) and (out.min() < 0 or out.max() >= count):
        raise MessageError(f"{what}: numbers from {out.min()} to {out.max()}, allowed are 0 to {count - 1}")
    return out
