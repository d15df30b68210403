"""Regions, stacks and stores that are open when the interpreter ends, whoever holds them: it ends in order."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# What a process leaves open, with a get under way.
SETUP = """
import gc, sys, threading
import numpy as np
from sglang_tpusync import _core

_core.take_log_lines()  # keeps them from standard error
root, how = sys.argv[1], sys.argv[2]
PIECES, KEYS = [4096, 8192], bytes(range(64)) + bytes(range(64, 128))

region = _core.HostRegion(root=root + "/dram", namespace=b"n" * 32, piece_bytes=PIECES, num_slots=16, reserve_bytes=0)
store = _core.FlashStore(
    path=root + "/flash", namespace=b"n" * 32, namespace_json="{}", page_bytes=sum(PIECES),
    capacity_bytes=64 << 20, floor_bytes=0, allow_tmpfs=True,
)
stack = _core.TierStack(region=region, store=store)
memory = region.memory()
memory[:] = 5

def addresses_of(slots):
    base = memory.ctypes.data
    return np.array([[base + s * 4096, base + 16 * 4096 + s * 8192] for s in slots.tolist()], np.uint64)

def work():
    slots = region.alloc(4)
    assert not stack.put(KEYS, b"", slots).any()
    region.free(slots)
    assert stack.match(KEYS, b"")[0] == 4
    promised = stack.promise(KEYS[:64], b"", 60)
    assert promised.num_pages == 2
    slots = region.alloc(4)
    ticket = stack.submit_get(KEYS, b"", addresses_of(slots), slots)
    return promised, ticket

promised, ticket = work()
"""

ENDS = {
    "globals": "",
    "closed": "ticket.wait(); stack.close(); store.close()",
    "store closed first": "store.close()",
    "memory outlives": "ticket.wait(); del promised, ticket, stack, region, store; assert (memory[:10] == 5).all()",
    "stack dropped last": "kept = [memory, region, store, stack, promised, ticket]\n"
    "del memory, region, store, promised, ticket, stack",
    "cycle": """
class Node: pass
node = Node()
node.parts = [stack, region, store, memory, promised, ticket]
node.me = node
del stack, region, store, memory, promised, ticket, node
if len(how) % 2: gc.collect()
""",
    "module attribute": "sys.modules['sglang_tpusync'].kept = (ticket, promised, stack, store, region)\n"
    "del ticket, promised, stack, store, region",
    "immortal": """
import ctypes
for left in (stack, region, store, memory):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(left))
""",
    "traceback": """
def fail():
    mine = (stack, region, store, promised)
    raise ValueError
try:
    fail()
except ValueError as error:
    kept = error
""",
    "threads call": """
def fetch():
    while True:
        slots = region.alloc(4)
        if slots is None:
            continue
        stack.submit_get(KEYS, b"", addresses_of(slots), slots).wait()
        region.free(slots)

def ask():
    while True:
        stack.match(KEYS, b"")
        stack.flush(1)
        stack.clear()

for target in (fetch, fetch, ask):
    threading.Thread(target=target, daemon=True).start()
""",
}


@pytest.mark.parametrize("how", ENDS)
def test_the_interpreter_ends_in_order_with_everything_open(tmp_path: Path, how: str) -> None:
    script = SETUP + ENDS[how] + "\nprint('end')\n"
    for i in range(5):
        (tmp_path / f"{i}").mkdir()
        (tmp_path / f"{i}" / "dram").mkdir(mode=0o700)
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / f"{i}"), how],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", ""), (done.returncode, done.stderr)
