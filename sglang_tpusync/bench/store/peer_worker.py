"""The other side of PeerArm: runs under a peer's interpreter, with numpy and the peer, without this package.

The argument is the plan as JSON. Standard input has lines {"do": "write" | "read" | "drop", "round": N}; each is
answered by a line {"seconds": S} on standard output, the first one means that the peer is ready.
"""

import importlib.util
import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def aligned(num_bytes: int) -> Any:
    raw = np.zeros(num_bytes + 4096, dtype=np.uint8)
    start = -raw.ctypes.data % 4096
    return raw[start : start + num_bytes]


class SglangFile:
    """SGLang's HiCacheFile: a file per page, through the page cache."""

    def __init__(self, plan: dict[str, Any]) -> None:
        import torch
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

        known = set(HiCacheStorageConfig.__dataclass_fields__)
        values = {
            "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
            "is_mla_model": False, "model_name": "bench", "enable_storage_metrics": False, "is_page_first_layout": True,
        }  # fmt: skip
        config = HiCacheStorageConfig(**{name: value for name, value in values.items() if name in known})
        self._store = HiCacheFile(config, plan["directory"])
        self._tensor = torch.from_numpy

    def write(self, keys: list[str], pages: list[Any], batch: int) -> None:
        assert self._store.batch_set(keys, [self._tensor(page) for page in pages])

    def read(self, keys: list[str], pages: list[Any], batch: int) -> None:
        read = self._store.batch_get(keys, [self._tensor(page) for page in pages])
        assert all(page is not None for page in read)

    def drop(self, keys: list[str]) -> None:
        for key in keys:
            os.unlink(os.path.join(self._store.file_path, f"{self._store._get_suffixed_key(key)}.bin"))


class LmcacheNative:
    """LMCache's native file client with O_DIRECT: a file per page, four threads, its default number."""

    def __init__(self, plan: dict[str, Any]) -> None:
        import torch  # noqa: F401  # the client is linked against it

        package = importlib.util.find_spec("lmcache")
        assert package is not None
        assert package.submodule_search_locations
        (library,) = Path(package.submodule_search_locations[0]).glob("lmcache_fs*.so")
        spec = importlib.util.spec_from_file_location("lmcache.lmcache_fs", library)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._client = module.LMCacheFSClient(plan["directory"], 4, "", plan["direct"], 0)

    def _names(self, keys: list[str]) -> list[str]:
        return [f"bench@1@0@{key}" for key in keys]

    def _wait(self, number: int) -> None:
        while True:
            select.select([self._client.event_fd()], [], [])
            os.eventfd_read(self._client.event_fd())
            for done in self._client.drain_completions():
                if done[0] == number:
                    assert done[1], done
                    return

    def write(self, keys: list[str], pages: list[Any], batch: int) -> None:
        self._wait(self._client.submit_batch_set(self._names(keys), [memoryview(page) for page in pages]))

    def read(self, keys: list[str], pages: list[Any], batch: int) -> None:
        self._wait(self._client.submit_batch_get(self._names(keys), [memoryview(page) for page in pages]))

    def drop(self, keys: list[str]) -> None:
        self._wait(self._client.submit_batch_delete(self._names(keys)))


class NixlPosix:
    """NIXL's POSIX plugin through io_uring and O_DIRECT, into one file that is allocated before."""

    def __init__(self, plan: dict[str, Any]) -> None:
        from nixl_cu12 import nixl_agent, nixl_agent_config

        self._page_bytes, self._batch_pages = plan["page_bytes"], plan["batch_pages"]
        size = plan["page_bytes"] * plan["num_pages"]
        self._agent = nixl_agent("bench", nixl_agent_config(backends=[]))
        self._agent.create_backend("POSIX", {"use_uring": "true"})
        self._file = os.open(os.path.join(plan["directory"], "nixl"), os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, size)
        self._agent.register_memory([(0, size, self._file, "")], "FILE")
        self._registered: set[int] = set()

    def _move(self, operation: str, pages: list[Any], batch: int) -> None:
        first = pages[0].ctypes.data
        length = self._page_bytes
        offset = batch * self._batch_pages * length
        memory = self._agent.get_xfer_descs([(first + i * length, length, 0) for i in range(len(pages))], "DRAM")
        places = self._agent.get_xfer_descs(
            [(offset + i * length, length, self._file) for i in range(len(pages))], "FILE"
        )
        handle = self._agent.initialize_xfer(operation, memory, places, "bench")
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        assert state == "DONE", state
        self._agent.release_xfer_handle(handle)

    def use(self, memory: Any) -> None:
        self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")

    def write(self, keys: list[str], pages: list[Any], batch: int) -> None:
        self._move("WRITE", pages, batch)

    def read(self, keys: list[str], pages: list[Any], batch: int) -> None:
        self._move("READ", pages, batch)

    def drop(self, keys: list[str]) -> None:
        """The next round writes over the file."""


def main() -> None:
    plan = json.loads(sys.argv[1])
    page_bytes, num_pages, batch_pages = plan["page_bytes"], plan["num_pages"], plan["batch_pages"]
    source, target = aligned(page_bytes * num_pages), aligned(page_bytes * num_pages)
    source.view(np.uint64)[:] = np.random.default_rng(page_bytes).integers(
        0, 2**64, source.nbytes // 8, dtype=np.uint64
    )
    kinds = {"file": SglangFile, "lmcache": LmcacheNative, "nixl": NixlPosix}
    peer: Any = kinds[plan["kind"]](plan)
    for memory in (source, target):
        if hasattr(peer, "use"):
            peer.use(memory)

    def pages_of(memory: Any, batch: int) -> list[Any]:
        first = batch * batch_pages
        return [memory[i * page_bytes : (i + 1) * page_bytes] for i in range(first, first + batch_pages)]

    def run(what: str, number: int) -> float:
        memory = source if what == "write" else target
        batches = [
            ([f"{number:06d}{i:058d}" for i in range(b * batch_pages, (b + 1) * batch_pages)], pages_of(memory, b), b)
            for b in range(num_pages // batch_pages)
        ]
        if what == "read":
            target.fill(0)
        move = getattr(peer, what) if what != "drop" else lambda keys, pages, batch: peer.drop(keys)
        begin = time.perf_counter()
        for keys, pages, batch in batches:
            move(keys, pages, batch)
        seconds = time.perf_counter() - begin
        assert what != "read" or np.array_equal(source, target), "what was read is not what was written"
        return seconds

    print(json.dumps({"seconds": 0.0}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps({"seconds": run(request["do"], request["round"])}), flush=True)


if __name__ == "__main__":
    main()
