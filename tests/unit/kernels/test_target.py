import os
import subprocess
import sys


def test_names_and_vectors_can_be_chosen():
    program = "from pibroch.kernels.target import compile_target; print(compile_target())"
    settings = {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": "+fma,-avx512f,+avx2,+bmi"}
    said = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    assert said.stdout == "x86-64-v3 avx2 fma\n", said.stderr
