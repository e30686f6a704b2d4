"""The kernels' own tests once more without the compiler.

What numba runs is also right as Python, bounds checks included.
"""

import os
import subprocess
import sys
from pathlib import Path

# long rows take seconds in Python, and the same lines as short ones
NOT_HERE = "not distribution and not 512"
KERNEL_TESTS = Path(__file__).parent / "kernels"


def test_kernels_are_right_as_python():
    command = [sys.executable, "-m", "pytest", str(KERNEL_TESTS), "-W", "ignore", "-k", NOT_HERE]
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, env=environment
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert " passed" in ran.stdout
