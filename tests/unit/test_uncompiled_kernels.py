"""The kernels' own tests once more without the compiler.

What numba runs is also right as Python, bounds checks included.
"""

import os
import subprocess
import sys
from pathlib import Path

# long rows take seconds in Python, and the same lines as short ones
LONG_ROWS = os.environ.get("PIBROCH_SOAK_LONG_ROWS") == "1"
CHOICE = [] if LONG_ROWS else ["-k", "not distribution and not 512"]
LIMIT_S = 7200 if LONG_ROWS else 280
KERNEL_TESTS = sorted(map(str, Path(__file__).parent.glob("**/kernels")))


def test_kernels_are_right_as_python():
    command = [sys.executable, "-m", "pytest", *KERNEL_TESTS, "-W", "ignore", *CHOICE]
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert " passed" in ran.stdout
