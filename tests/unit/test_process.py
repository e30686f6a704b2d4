import subprocess
import sys

import pytest

REPEAT = """
import resource, sys
import numpy as np
from pibroch.process import tune_process

if sys.argv[1] == "tuned":
    tune_process()
def page_faults_of_a_large_array():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.empty(16 << 20, np.float32).fill(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for _ in range(3):
    page_faults_of_a_large_array()
print(min(page_faults_of_a_large_array() for _ in range(5)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="tunes glibc")
def test_large_arrays_of_a_tuned_process_are_not_faulted_in_again():
    faults = {
        how: int(subprocess.run([sys.executable, "-c", REPEAT, how], capture_output=True, text=True, check=True).stdout)
        for how in ("tuned", "as it is")
    }
    assert faults["tuned"] < 8 < faults["as it is"]
