"""A part of torch's own RPC suites with ``pibroch.rpc`` in torch's place.

All of them: see ``torch_suites.py``.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).with_name("torch_suites.py")
NAMED = ["debug_info"]  # they look at what is inside
EVERY = int(os.environ.get("PIBROCH_SOAK_TORCH_SUITES_EVERY", "6"))
NUM_AT_LEAST = 40
LIMIT_S = 240 * 6 // EVERY  # generous, for loaded machines


@pytest.mark.timeout(LIMIT_S + 30)
def test_a_part_of_torchs_own_suites():
    done = subprocess.run(
        [sys.executable, RUNNER, *NAMED, "--every", str(EVERY), "--jobs", "1", "--verbose"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert done.stdout.count("passed") >= NUM_AT_LEAST and "failed" not in done.stdout.split()
