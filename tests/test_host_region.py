"""DRAM regions and tiers across the language and process boundary."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from sglang_tpusync import _core, errors

PIECES = [4096, 8192]
NAMESPACE = b"n" * 32


def open_region(root: Path, num_slots: int = 8, **options: object) -> _core.HostRegion:
    root.mkdir(mode=0o700, exist_ok=True)
    return _core.HostRegion(
        root=str(root), namespace=NAMESPACE, piece_bytes=PIECES, num_slots=num_slots, reserve_bytes=0, **options
    )  # type: ignore[arg-type]


def keys_of(*numbers: int) -> bytes:
    return b"".join(np.random.default_rng(number).bytes(32) for number in numbers)


def page_of(region: _core.HostRegion, slot: int) -> list[np.ndarray]:
    memory, views, offset = region.memory(), [], 0
    for piece in PIECES:
        views.append(memory[offset + slot * piece : offset + (slot + 1) * piece])
        offset += piece * region.num_slots
    return views


def fill(region: _core.HostRegion, slot: int, number: int) -> None:
    for view in page_of(region, slot):
        view[:] = np.random.default_rng(number).integers(0, 256, len(view), dtype=np.uint8)


def holds(region: _core.HostRegion, slot: int, number: int) -> bool:
    expected = [np.random.default_rng(number).integers(0, 256, piece, dtype=np.uint8) for piece in PIECES]
    return all(np.array_equal(a, b) for a, b in zip(page_of(region, slot), expected, strict=True))


def put(region: _core.HostRegion, *numbers: int) -> np.ndarray:
    slots = region.alloc(len(numbers))
    assert slots is not None
    for slot, number in zip(slots.tolist(), numbers, strict=True):
        fill(region, slot, number)
    assert not region.seal(keys_of(*numbers), b"", slots).any()
    return slots


def fetch(stack: _core.TierStack, region: _core.HostRegion, *numbers: int) -> int:
    slots = region.alloc(len(numbers))
    assert slots is not None
    addresses = np.array([[view.ctypes.data for view in page_of(region, slot)] for slot in slots.tolist()], np.uint64)
    ticket = stack.submit_get(keys_of(*numbers), b"", addresses, slots)
    assert ticket.wait(60)
    good = 0
    for slot, number, outcome in zip(slots.tolist(), numbers, ticket.outcomes().tolist(), strict=True):
        if outcome == 0:
            assert holds(region, slot, number)
            good += 1
    region.free(slots)
    return good


def test_pages_survive_their_slot_and_their_process(tmp_path: Path) -> None:
    region = open_region(tmp_path / "r")
    slots = put(region, 1, 2, 3)
    region.free(slots)
    assert region.match(keys_of(1, 2, 3, 4), b"") == 3
    path = region.path
    del region
    region = open_region(tmp_path / "r")
    assert region.path == path
    assert region.stats()["host_pages_adopted_total"] == 3
    stack = _core.TierStack(region=region, store=None)
    assert fetch(stack, region, 1, 2, 3) == 3
    assert stack.match(keys_of(1, 2, 9), b"") == (2, 2, 0, 0)


def test_memory_keeps_the_region_open(tmp_path: Path) -> None:
    memory = open_region(tmp_path / "r").memory()
    assert memory.size == 8 * sum(PIECES)
    memory[:] = 7
    assert open_region(tmp_path / "r").path.endswith("-1.region")
    del memory
    assert open_region(tmp_path / "r").path.endswith("-0.region")


def write_until_killed(root: Path, sender: Connection) -> None:
    region = open_region(root)
    put(region, 1, 2, 3, 4)
    sender.send("sealed")
    signal.pause()


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_pages_of_a_stopped_or_killed_process_are_hits_in_another(tmp_path: Path, how: signal.Signals) -> None:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    writer = context.Process(target=write_until_killed, args=(tmp_path / "r", sender))
    writer.start()
    try:
        assert writer.pid is not None
        # Its region first, so that this process does not adopt it.
        assert receiver.recv() == "sealed"
        region = open_region(tmp_path / "r")
        os.kill(writer.pid, how)
        stack = _core.TierStack(region=region, store=None)
        assert stack.match(keys_of(1, 2, 3, 4, 5), b"") == (4, 0, 4, 0)
        assert fetch(stack, region, 1, 2, 3, 4) == 4
        assert stack.match(keys_of(1, 2, 3, 4, 5), b"") == (4, 4, 0, 0)
    finally:
        writer.kill()
        writer.join()
        receiver.close()
        sender.close()


def test_evicted_pages_come_back_from_flash(tmp_path: Path) -> None:
    store = _core.FlashStore(
        path=str(tmp_path / "flash"), namespace=NAMESPACE, namespace_json="{}", page_bytes=sum(PIECES),
        capacity_bytes=64 << 20, floor_bytes=0, allow_tmpfs=True,
    )  # fmt: skip
    region = open_region(tmp_path / "r", 4)
    stack = _core.TierStack(region=region, store=store)
    slots = region.alloc(4)
    assert slots is not None
    for slot, number in zip(slots.tolist(), (1, 2, 3, 4), strict=True):
        fill(region, slot, number)
    assert not stack.put(keys_of(1, 2, 3, 4), b"", slots).any()
    assert stack.flush(60)
    region.free(slots)
    region.free(put(region, 11, 12, 13, 14))
    assert stack.match(keys_of(1, 2, 3, 4), b"") == (4, 0, 0, 4)
    assert fetch(stack, region, 1, 2, 3, 4) == 4
    with_promise = stack.promise(keys_of(1, 2, 3, 4), b"", 60)
    assert with_promise.num_pages == 4
    assert region.alloc(1) is None
    with_promise.release()
    assert region.alloc(1) is not None
    store.close()


def test_a_region_that_does_not_fit_says_why(tmp_path: Path) -> None:
    with pytest.raises(errors.StorageError, match=r"slots of .* needed, .* available, .* missing"):
        open_region(tmp_path / "r", 1000, cap_bytes=1 << 20)


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="num_slots: 0"):
        open_region(tmp_path / "r", 0)
    region = open_region(tmp_path / "r")
    with pytest.raises(errors.ConfigError, match="slot 3 is freed"):
        region.free(np.array([3], np.int64))
    with pytest.raises(errors.ConfigError, match="keys: 31 bytes"):
        region.match(b"x" * 31, b"")
    with pytest.raises(errors.ConfigError, match="slots: 1 of them for 2 keys"):
        region.seal(keys_of(1, 2), b"", np.array([0], np.int64))
    with pytest.raises(errors.ConfigError, match="spill"):
        _core.TierStack(region=region, store=None, spill="sometimes")  # type: ignore[arg-type]
    assert _core.OUTCOME_NAMES[region.seal(keys_of(1), b"", np.array([-1], np.int64))[0]] == "invalid"


def test_promises_are_limited_only_by_three_figures_that_make_sense(tmp_path: Path) -> None:
    region = open_region(tmp_path / "r")
    figures = {"deadline_base_s": 1.0, "deadline_per_page_s": 0.1, "recompute_per_page_s": 0.0}

    def message_for(**options: object) -> str:
        with pytest.raises(errors.ConfigError) as raised:
            _core.TierStack(region=region, store=None, **options)  # type: ignore[arg-type]
        return str(raised.value)

    for options in ({}, {"limit_promises": False}, figures, {**figures, "limit_promises": False}):
        _core.TierStack(region=region, store=None, **options)  # type: ignore[arg-type]
    for missing in figures:
        some = {key: value for key, value in figures.items() if key != missing}
        assert message_for(**some).startswith(f"{missing}: None beside ")
        assert "allowed are 0 to 86400" in message_for(**some)
        for value in (-1.0, 90000.0, float("nan"), float("inf")):
            assert message_for(**{**figures, missing: value}) == f"{missing}: {value:g}, allowed are 0 to 86400"
    assert message_for(limit_promises=True).startswith("deadline_base_s: None beside limit_promises")
    no_time = {"deadline_base_s": 0.0, "deadline_per_page_s": 0.0}
    assert message_for(**{**figures, **no_time}).startswith("deadline_base_s: 0 with deadline_per_page_s 0")
    assert message_for(num_copy_threads=0) == "num_copy_threads: 0, allowed are 1 to 256"


def test_every_page_of_a_put_is_answered_and_counted(tmp_path: Path) -> None:
    region = open_region(tmp_path / "r")
    stack = _core.TierStack(region=region, store=None)
    slots = region.alloc(2)
    assert slots is not None
    for slot in slots.tolist():
        fill(region, slot, slot)
    outcomes = stack.put(keys_of(1, 2, 3), b"", np.array([*slots, 7], np.int64))
    assert [_core.OUTCOME_NAMES[outcome] for outcome in outcomes] == ["ok", "ok", "invalid"]
    stats = region.stats()
    assert (stats["host_seals_total"], stats["host_seals_not_in_use_total"]) == (2, 1)
    assert stats["host_sealed_bytes_total"] == 2 * sum(PIECES)
    assert stack.remove(keys_of(2, 9)) == (1, 0)
    assert stack.clear() == (1, 0)
    assert stack.match(keys_of(1, 2), b"") == (0, 0, 0, 0)


def test_a_closed_stack_answers_and_does_nothing(tmp_path: Path) -> None:
    region = open_region(tmp_path / "r")
    slots = put(region, 1, 2)
    stack = _core.TierStack(region=region, store=None)
    assert stack.match(keys_of(1, 2), b"") == (2, 2, 0, 0)
    stack.close()
    stack.close()
    assert stack.match(keys_of(1, 2), b"") == (0, 0, 0, 0)
    assert stack.promise(keys_of(1), b"").num_pages == 0
    assert (stack.clear(), stack.remove(keys_of(1)), stack.flush()) == ((0, 0), (0, 0), True)
    cancelled = _core.OUTCOME_NAMES.index("cancelled")
    assert stack.put(keys_of(3), b"", slots[:1]).tolist() == [cancelled]
    ticket = stack.submit_get(keys_of(1), b"", np.zeros((1, 2), np.uint64))
    assert ticket.done
    assert ticket.outcomes().tolist() == [cancelled]
    assert stack.stats()["tier_pinned_pages"] == 0
    assert region.match(keys_of(1, 2), b"") == 2
