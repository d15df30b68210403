"""What prefill and decode ranks tell each other and which bytes they exchange, without a model: real endpoints."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from sglang_tpusync.disagg import control, messages
from sglang_tpusync.disagg.courier import Sending
from sglang_tpusync.disagg.messages import Buffer, Hello, MessageError, Registration, Request, State, Status
from sglang_tpusync.disagg.pairing import pair, runs
from sglang_tpusync.errors import ConfigError, UnsupportedError
from tests.transfer_ranks import PAGES, READY, Node, Rank, chunk


@pytest.fixture
def make() -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def build(*widths: int, **options: Any) -> Node:
        nodes.append(Node(*widths, **options))
        return nodes[-1]

    yield build
    for node in nodes:
        node.close()


@pytest.mark.parametrize("same_host", [False, True])
@pytest.mark.parametrize(
    ("prefill", "decode", "heads"), [(1, 1, 4), (2, 1, 4), (1, 2, 4), (4, 2, 8), (2, 4, 8), (4, 1, 2), (1, 4, 2)]
)
def test_every_byte_arrives_where_it_belongs(
    make: Callable[..., Node], prefill: int, decode: int, heads: int, same_host: bool
) -> None:
    node = make(prefill, decode, heads, same_host=same_host)
    here, there = [7, 2, 3, 4, 9], [1, 2, 8, 0, 5]
    requests = [node.request(number, 1, there) for number in range(decode)]
    for courier, links in zip(node.couriers, node.links, strict=True):
        sending = Sending(1, [(link, requests[number]) for number, link in links.items()])
        courier.send(sending, chunk(here[:2], 0, False))
        courier.send(sending, chunk(here[2:], 2, True))
    assert node.wait(1, prefill) == [None] * prefill
    for rank in node.decode:
        expected = np.zeros_like(rank.kv)
        expected[:, there] = node.whole[:, here, :, rank.first : rank.first + rank.held]
        np.testing.assert_array_equal(rank.kv, expected)
        for ours, theirs in zip(rank.rows, node.prefill[0].rows, strict=True):
            np.testing.assert_array_equal(ours[3], theirs[1])
            assert not ours[[0, 1, 2, 4, 5]].any()
        np.testing.assert_array_equal(rank.state[4], node.prefill[0].state[2])
        assert not rank.state[:4].any()


def test_the_ready_row_is_written_when_all_the_rest_is_there(make: Callable[..., Node]) -> None:
    """Beside it, somebody looks all the time."""
    node = make(1, 1, 4, same_host=False, frame_bytes=4096, rate_bytes_per_s_max=60_000)
    rank, pages = node.decode[0], list(range(PAGES))
    seen: list[bool] = []

    def look() -> None:
        while not rank.rows[READY][3].any():
            time.sleep(0.0005)
        seen.append(bool((rank.kv == node.whole).all() and rank.rows[0][3].any() and rank.state[4].any()))

    looker = threading.Thread(target=look)
    looker.start()
    sending = Sending(1, [(node.links[0][0], node.request(0, 1, pages))])
    node.couriers[0].send(sending, chunk(pages, 0, True))
    assert node.wait(1) == [None]
    looker.join(10)
    assert seen == [True]


def test_after_a_revocation_nothing_lands_and_the_room_fails(make: Callable[..., Node]) -> None:
    node = make(1, 1, 4, same_host=False, frame_bytes=4096, rate_bytes_per_s_max=20_000)
    pages = list(range(PAGES))
    sending = Sending(1, [(node.links[0][0], node.request(0, 1, pages))])
    node.couriers[0].send(sending, chunk(pages, 0, True))
    time.sleep(0.2)
    node.grants[0].revoke(1)
    until = time.monotonic() + 10
    while not node.grants[0].is_quiet(1):
        assert time.monotonic() < until
    frozen = node.decode[0].kv.copy()
    (reason,) = node.wait(1)
    assert reason is not None
    np.testing.assert_array_equal(node.decode[0].kv, frozen)
    assert len(node.grants[0]) == 0


def test_a_dropped_sending_says_nothing_and_others_go_on(make: Callable[..., Node]) -> None:
    node = make(1, 1, 4, same_host=False, rate_bytes_per_s_max=100_000)
    first = Sending(1, [(node.links[0][0], node.request(0, 1, [0, 1, 2, 3]))])
    second = Sending(2, [(node.links[0][0], node.request(0, 2, [4, 5], row=4))])
    node.couriers[0].send(first, chunk([0, 1, 2, 3], 0, True))
    node.couriers[0].send(second, chunk([8, 9], 0, True))
    node.couriers[0].drop(first)
    assert node.wait(2) == [None]
    until = time.monotonic() + 10
    while node.couriers[0].num_active:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert 1 not in node.over


def test_a_lost_peer_fails_its_rooms_and_is_found_again(make: Callable[..., Node]) -> None:
    node = make(1, 1, 4, same_host=False, frame_bytes=4096, rate_bytes_per_s_max=20_000)
    pages = list(range(PAGES))
    node.couriers[0].send(Sending(1, [(node.links[0][0], node.request(0, 1, pages))]), chunk(pages, 0, True))
    time.sleep(0.3)
    for info in node.readers[0].peers():
        node.readers[0].disconnect(info["id"])
    (reason,) = node.wait(1)
    assert reason is not None
    node.couriers[0].send(Sending(2, [(node.links[0][0], node.request(0, 2, [1], row=4))]), chunk([3], 0, True))
    assert node.wait(2) == [None]
    node.readers[0].close()
    time.sleep(0.2)
    third = Request(**{**msgspec.structs.asdict(node_request(node)), "room": 3})
    node.couriers[0].send(Sending(3, [(node.links[0][0], third)]), chunk([3], 0, True))
    (reason,) = node.wait(3)
    assert "cannot be reached" in str(reason)


def node_request(node: Node) -> Request:
    return Request(
        room=0, endpoint=node.registrations[0].endpoint, host="127.0.0.1", port=1, num_targets=1, grant=1, row=1,
        pages=np.array([1], "<i4").tobytes(), states=(np.array([4], "<i4").tobytes(),),
    )  # fmt: skip


def test_more_than_was_asked_for_is_not_sent(make: Callable[..., Node]) -> None:
    node = make(1, 1, 4)
    node.couriers[0].send(Sending(1, [(node.links[0][0], node.request(0, 1, [1]))]), chunk([3, 4], 0, True))
    assert "asked for 1" in str(node.wait(1)[0])
    for changes in (
        {"pages": np.array([PAGES], "<i4").tobytes()},
        {"row": 6},
        {"pages": b"abc"},
        {"states": (b"", b"")},
    ):
        with pytest.raises(Exception, match=r"allowed are|no int32|states were asked"):
            Sending(2, [(node.links[0][0], node.request(0, 2, [1], **{"row": 5, **changes}))])
    assert not node.decode[0].kv.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 8}, "page size differs: prefill has 4, decode has 8"),
        ({"kv_dtype": "fp8"}, "KV dtype differs: prefill has bfloat16, decode has fp8"),
        ({"layout": "hnd"}, "layout of a page differs: prefill has rows, decode has hnd"),
        ({"tp_size": 3, "tp_rank": 1}, "TP widths do not divide each other: prefill has 2, decode has 3"),
        ({"tp_rank": 2}, "TP rank 2 of 2"),
        ({"ready_row": 3}, "ready row 3 of 3"),
        ({"states": ()}, "number of states differs: prefill has 1, decode has 0"),
        ({"rows": (Buffer(0, 384, 64, -1),)}, "number of metadata buffers differs: prefill has 3, decode has 1"),
        (
            {"namespace": "b" * 64},
            "the models differ: prefill has weights aaaaaaaaaaaaaaaa, decode has bbbbbbbbbbbbbbbb",
        ),
        ({"states": (State("mamba", ()),)}, "state 0 differs: prefill has 1 buffers of dsa, decode has 0 of mamba"),
        ({"kv": (Buffer(0, 384, 64, -1),)}, "numbers of KV buffers differ"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values(changes: dict[str, Any], message: str) -> None:
    rank = Rank(0, 2, 4)
    with pytest.raises(UnsupportedError, match=message):
        pair(rank.source(namespace="a" * 64), rank.registration(**changes))


def test_states_that_nobody_knows_are_refused() -> None:
    rank = Rank(0, 1, 4)
    buffers = rank.source().states[0][1]
    for kind, tp_size, message in (("dream", 1, "state 0 is 'dream'"), ("mamba", 2, "equal TP widths")):
        source = rank.source(states=((kind, buffers),), tp_size=tp_size)
        state = State(kind, rank.registration().states[0].buffers)
        with pytest.raises(UnsupportedError, match=message):
            pair(source, rank.registration(states=(state,)))


def test_a_stage_of_a_pipeline_writes_its_own_layers() -> None:
    rank = Rank(0, 1, 4)
    stage = rank.source(kv=(*rank.source().kv[1:3], *rank.source().kv[4:6]), start_layer=1)  # layers 1 and 2 of 3
    pieces = pair(stage, rank.registration()).kv.pieces(np.array([0]), np.array([0]))
    assert pieces.regions.tolist() == [1, 2, 4, 5]
    named = [buffer._replace(layer=layer) for buffer, layer in zip(stage.kv, (1, 2, 1, 2), strict=True)]
    target = [
        Buffer(b.region, b.num_bytes, b.item_bytes, layer)
        for b, layer in zip(rank.registration().kv, (2, 1, 0) * 2, strict=True)
    ]
    by_layer = pair(rank.source(kv=tuple(named)), rank.registration(kv=tuple(target)))
    assert by_layer.kv.pieces(np.array([0]), np.array([0])).regions.tolist() == [1, 0, 4, 3]


@given(st.lists(st.integers(0, 60), max_size=40))
def test_runs_cover_a_set_once(numbers: list[int]) -> None:
    first, count = runs(np.array(numbers, np.int64))
    covered = [
        number for start, length in zip(first, count, strict=True) for number in range(int(start), int(start + length))
    ]
    assert covered == sorted(set(numbers))
    assert all(int(a + n) < int(b) for a, n, b in zip(first, count, first[1:], strict=False))


MESSAGES = [
    Rank(0, 2, 4).registration(),
    Request(room=2**63 + 1, endpoint=bytes(16), host="h", port=1, num_targets=2, grant=2**64 - 1, pages=b"1234"),
    Status(room=-1, status=4, rank=0, reason="x"),
    Hello(host="::1", port=65535),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_are_read_as_they_were_written(message: Any) -> None:
    assert messages.decode(messages.encode(message)) == message
    with pytest.raises(MessageError, match="version 2 of these messages, this process version 1"):
        messages.decode(b"\x02" + messages.encode(message)[1:])


def test_bytes_that_are_no_message_are_refused() -> None:
    """A hundred thousand of them: random ones, and messages with bytes changed, cut off or added."""
    generator = np.random.default_rng(3)
    whole = [messages.encode(message) for message in MESSAGES]
    refused = 0
    for number in range(100_000):
        data = bytearray(whole[number % 4]) if number % 3 else bytearray(generator.bytes(generator.integers(0, 80)))
        for _ in range(generator.integers(1, 4)):
            if data:
                data[generator.integers(0, len(data))] = generator.integers(0, 256)
        if number % 5 == 0:
            data = data[: generator.integers(0, len(data) + 1)]
        try:
            found = messages.decode(bytes(data))
        except MessageError:
            refused += 1
            continue
        assert messages.decode(messages.encode(found)) == found
        if isinstance(found, Request):
            for what in (found.pages, *found.states):
                with contextlib.suppress(MessageError):
                    assert all(0 <= item < 5 for item in messages.indices(what, "pages", 5))
        if isinstance(found, Registration):
            with contextlib.suppress(UnsupportedError):
                pair(Rank(0, 2, 4).source(), found)
    assert refused > 50_000


@pytest.mark.parametrize(
    ("values", "message"),
    [({"port": 0}, "port|>= 1"), ({"status": 5}, "<= 4"), ({"endpoint": b"x"}, ">= 16"), ({"pages": "text"}, "bytes")],
)
def test_fields_out_of_their_range_are_refused(values: dict[str, Any], message: str) -> None:
    (which,) = [m for m in MESSAGES[1:3] if next(iter(values)) in m.__struct_fields__]
    wrong = type(which)(**{**msgspec.structs.asdict(which), **values})
    with pytest.raises(MessageError, match=message):
        messages.decode(messages.encode(wrong))


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(0)  # and its sockets


def write_secret(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_only_who_knows_the_secret_is_heard(context: zmq.Context[Any], tmp_path: Path) -> None:
    right = write_secret(tmp_path / "right", "0123456789abcdef\n")
    wrong = write_secret(tmp_path / "wrong", "0123456789abcdeF\n")
    keys = {
        name: control.derive_keys(path, host="192.0.2.1", allow_unauthenticated=False)
        for name, path in (("right", right), ("wrong", wrong))
    }
    socket, port = control.listen(context, "127.0.0.1", keys["right"])
    refused: list[str] = []
    refusals = control.Refusals(context, refused.append)
    refusals.watch("here", socket)
    senders: list[zmq.Socket[bytes]] = []
    for name in ("wrong", None, "right"):
        sender = context.socket(zmq.PUSH)
        control.secure_sender(sender, keys[name] if name else None)
        sender.connect(f"tcp://127.0.0.1:{port}")
        sender.send_multipart([b"from", str(name).encode()])
        senders.append(sender)
    assert socket.poll(10_000)
    assert socket.recv_multipart() == [b"from", b"right"]
    assert not socket.poll(1000)
    until = time.monotonic() + 10
    while not refused:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert set(refused) == {"here"}
    plain, plain_port = control.listen(context, "127.0.0.1", None)
    sender = context.socket(zmq.PUSH)
    control.secure_sender(sender, keys["right"])
    sender.connect(f"tcp://127.0.0.1:{plain_port}")
    sender.send(b"to nobody")
    assert not plain.poll(1000)
    refusals.close()
    for one in (*senders, sender, socket, plain):
        one.close(0)


def test_a_socket_that_is_closed_is_watched_no_longer(context: zmq.Context[Any]) -> None:
    refusals = control.Refusals(context, lambda name: None)
    for number in range(20):
        socket = context.socket(zmq.PUSH)
        refusals.watch(f"number {number}", socket)
        time.sleep(0.02)
        socket.close(0)
    until = time.monotonic() + 10
    while refusals.num_watched:
        assert time.monotonic() < until
        time.sleep(0.05)
    refusals.close()


def test_a_secret_is_needed_where_others_can_reach_it(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "::1", "[::1]", "localhost"):
        assert control.derive_keys(None, host=host, allow_unauthenticated=False) is None
    with pytest.raises(ConfigError, match=r"'transfer_secret_file' is needed: this server is reached at 10\.0\.0\.1"):
        control.derive_keys(None, host="10.0.0.1", allow_unauthenticated=False)
    assert control.derive_keys(None, host="10.0.0.1", allow_unauthenticated=True) is None
    for path, message in (
        (write_secret(tmp_path / "short", "short"), "5 bytes"),
        (str(tmp_path / "none"), "No such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            control.derive_keys(path, host="127.0.0.1", allow_unauthenticated=False)
