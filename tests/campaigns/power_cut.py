"""Power cuts on a simulated disk, for each fsync policy: nothing promised is lost, nothing wrong is served.

Builds the C++ tests of the store and runs those of power cuts `runs` times; they draw from the seed.
"""

from __future__ import annotations

import os
import re
import subprocess

from sglang_tpusync.bench.report import Row
from tests.campaigns.campaign import as_count, build_target, fraction, main


def run(seed: int, runs: int) -> list[Row]:
    test = build_target("tpusync_flash_test")
    environment = {**os.environ, "TPUSYNC_TEST_ROUNDS": str(runs), "TPUSYNC_TEST_SEED": str(seed)}
    command = [str(test), "--gtest_filter=*PowerCut*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        print(done.stdout[-4000:])
    passed = re.search(r"\[  PASSED  \] (\d+) test", done.stdout)
    held = int(passed[1]) if passed else 0
    ran = re.search(r"Running (\d+) test", done.stdout)
    return [
        as_count("power cuts", [runs * held]),
        fraction("properties that hold over all power cuts", held, int(ran[1]) if ran else 0, "all of them"),
    ]


if __name__ == "__main__":
    main("power_cut", run, runs=500)
