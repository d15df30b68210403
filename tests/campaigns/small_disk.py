"""A real server whose store has a tenth of what the workload writes, on a small file system that also fills up.

`runs` prompts are asked, each followed by one that was asked before; in the middle third somebody else fills the disk.
Needs root, for a loop device.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sglang_tpusync.bench.report import Row
from sglang_tpusync.bench.serving.prompts import prompt_ids
from sglang_tpusync.errors import UnsupportedError
from sglang_tpusync.testing.models import build_model
from sglang_tpusync.testing.server import Generation, Server, ServerError
from tests.campaigns.campaign import ROOT, as_count, fraction, main
from tests.campaigns.pages import disk_bytes

PROMPT_TOKENS = 1024
BYTES_PER_TOKEN = 8192  # of the long-context model
RECENT = 3  # how far back the second prompt of a pair goes: the store holds about a tenth of all
FILE_SYSTEM_BYTES = 400 << 20


def run(seed: int, runs: int) -> list[Row]:
    choice = random.Random(seed)
    capacity = runs * PROMPT_TOKENS * BYTES_PER_TOKEN // 10
    tally = dict.fromkeys(("asked", "answered", "hits", "same", "compared", "looks", "below"), 0)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as directory, _small_disk(Path(directory)) as disk:
        store = disk / "store"
        answers: dict[int, Generation] = {}
        with _start(store, Path(directory) / "server.log", capacity) as server:
            for number in range(runs):
                if number == runs // 3:
                    _fill(disk / "filler")
                elif number == 2 * runs // 3:
                    (disk / "filler").unlink()
                for wanted in (number, max(0, number - choice.randrange(1, RECENT + 1))):
                    _ask(server, seed, wanted, answers, tally)
                tally["looks"] += 1
                tally["below"] += disk_bytes(store) <= capacity
        verify = "from sglang_tpusync.cli.main import main; main()"
        verified = subprocess.run(
            [sys.executable, "-c", verify, "verify", str(store)], capture_output=True, check=False
        )
    return [
        as_count("prompts asked", [tally["asked"]]),
        fraction("requests answered", tally["answered"], tally["asked"], "all of them"),
        fraction("answers equal to the first one", tally["same"], tally["compared"], "all of them"),
        fraction("looks that found the store below its cap", tally["below"], tally["looks"], "all of them"),
        as_count("answers with a prefix from the store", [tally["hits"]]),
        fraction("the store is sound, and had hits", int(verified.returncode == 0 and tally["hits"] > 0), 1, "it is"),
    ]


def _ask(server: Server, seed: int, number: int, answers: dict[int, Generation], tally: dict[str, int]) -> None:
    """From the store or anew: a flush, which waits for backups, empties device and host first."""
    tally["asked"] += 1
    with contextlib.suppress(ServerError, OSError):
        server.flush_cache()
        answer = server.generate(prompt_ids(seed, "small", number, num_tokens=PROMPT_TOKENS), max_new_tokens=4)
        tally["answered"] += 1
        tally["hits"] += int(answer.cached_details.get("storage", 0)) > 0
        if number in answers:
            tally["compared"] += 1
            first = answers[number]
            tally["same"] += (first.output_ids, first.logprobs) == (answer.output_ids, answer.logprobs)
        answers.setdefault(number, answer)


def _start(store: Path, log: Path, capacity: int) -> Server:
    options = {"path": str(store), "capacity": capacity, "floor": 0, "write_budget_per_day": "unlimited"}
    arguments = ["--hicache-storage-backend", "tpusync", "--hicache-ratio", "2", "--max-total-tokens", "8192"]
    arguments += ["--hicache-storage-prefetch-policy", "wait_complete"]
    arguments += ["--hicache-storage-backend-extra-config", json.dumps(options)]
    return Server(build_model("long-llama"), args=arguments, log_path=log, timeout_s=900.0)


@contextlib.contextmanager
def _small_disk(directory: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        raise UnsupportedError("small_disk mounts a file system of its own: it needs root and mkfs.ext4")
    image, place = directory / "image", directory / "disk"
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(FILE_SYSTEM_BYTES)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def _fill(file: Path) -> None:
    """All that is left of the disk."""
    with open(file, "wb") as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(1 << 20))
            filler.flush()


if __name__ == "__main__":
    main("small_disk", run, runs=60)
