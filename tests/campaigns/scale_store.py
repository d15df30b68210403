"""A store of `runs` million entries, tables real and payloads sparse: RAM, look-ups, and the time to open it again.

And the same for 1 TB of 2 MB pages.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from sglang_tpusync.bench.report import Row
from tests.campaigns.campaign import bound, build_target, main

BYTES_PER_ENTRY = 96.0
LOOKUP_US = 50.0  # of 128 keys
TERABYTE_OPEN_S = 2.0
TERABYTE_PAGE = 2_000_000


def run(seed: int, runs: int) -> list[Row]:
    del seed  # the entries are what they are
    program = build_target("tpusync_store_scale")
    entries = runs * 1_000_000
    many = _measure(program, entries, 4096)
    rows = [
        bound(f"RAM of one of {entries} entries", many["bytes_per_entry"], "bytes", BYTES_PER_ENTRY),
        bound(f"look-up of 128 keys among {entries}, median", many["lookup_us"], "us", LOOKUP_US),
        Row(case="the same, 99th percentile", value=many["lookup_p99_us"], unit="us", better="lower"),
        Row(case=f"opening {entries} entries", value=many["open_s"], unit="s", better="lower"),
    ]
    large = _measure(program, 10**12 // TERABYTE_PAGE, TERABYTE_PAGE)
    return [*rows, bound("opening 1 TB of 2 MB pages", large["open_s"], "s", TERABYTE_OPEN_S)]


def _measure(program: Path, entries: int, page_bytes: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=program.parent) as directory:
        command = [str(program), f"{directory}/store", str(entries), str(page_bytes)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name: float(value) for name, value in (line.split() for line in done.stdout.splitlines())}


if __name__ == "__main__":
    main("scale_store", run, runs=10)
