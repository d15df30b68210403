"""The reading process of `bench transfer`: python -m sglang_tpusync.bench.transfer_reader SET_BYTES NUM_STREAMS.

Answers one line of JSON on standard output when it is ready, and one for each line on standard input: `cpu` (CPU
seconds of this process), `crc` (CRC-32 of its memory), `clear`. Ends with standard input.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
import zlib

import numpy as np
from numpy.typing import NDArray

from sglang_tpusync._core import Endpoint

__all__ = ["main"]

CHUNK_BYTES = 1 << 20


def main(set_bytes: int, num_streams: int) -> None:
    target = np.zeros(set_bytes, np.uint8)
    target[:] = 1  # touch every page before anybody measures
    listener = socket.create_server(("127.0.0.1", 0))
    hello: dict[str, object] = {"raw_port": listener.getsockname()[1]}
    endpoints = []
    for way in ("tcp", "same-host"):
        endpoint = Endpoint(num_streams=num_streams, same_host=way == "same-host")
        region = endpoint.register_region(target.ctypes.data, set_bytes)
        whole = (np.array([region], np.uint32), np.array([0], np.uint64), np.array([set_bytes], np.uint64))
        hello[way] = {"addresses": endpoint.addresses, "region": region, "grant": endpoint.open_grant(*whole)}
        endpoints.append(endpoint)
    threading.Thread(target=_serve_raw, args=(listener, target), daemon=True).start()
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        print(json.dumps({"value": _answer(line.strip(), target)}), flush=True)
    for endpoint in endpoints:
        endpoint.close()


def _answer(question: str, target: NDArray[np.uint8]) -> float | int | None:
    if question == "cpu":
        return time.process_time()
    if question == "crc":
        return zlib.crc32(target.data)
    target[:] = 0
    return None


def _serve_raw(listener: socket.socket, target: NDArray[np.uint8]) -> None:
    memory = target.data.cast("B")
    for index in range(1 << 30):
        connection, _ = listener.accept()
        start = index % 4 * (len(memory) // 4)
        threading.Thread(target=_sink, args=(connection, memory[start : start + len(memory) // 4]), daemon=True).start()


def _sink(connection: socket.socket, memory: memoryview) -> None:
    """Reads `total` bytes into the memory, over and over, and answers a byte after each `answer_every`."""
    with connection:
        header = connection.recv(16, socket.MSG_WAITALL)
        answer_every, total = int.from_bytes(header[:8], "little"), int.from_bytes(header[8:], "little")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        place = received = 0
        while received < total:
            wanted = min(CHUNK_BYTES, len(memory) - place, answer_every - received % answer_every)
            count = connection.recv_into(memory[place : place + wanted])
            if count == 0:
                return
            received += count
            place = (place + count) % len(memory)
            if received % answer_every == 0:
                connection.sendall(b"\0")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
