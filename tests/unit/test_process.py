import os
import select
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
        how: int(
            subprocess.run(
                [sys.executable, "-c", REPEAT, how], capture_output=True, text=True, check=True
            ).stdout
        )
        for how in ("tuned", "as it is")
    }
    assert faults["tuned"] < 8 < faults["as it is"]


LAUNCHER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import time
from pibroch.launch.child import die_with_launcher
die_with_launcher()
print("ready", flush=True)
time.sleep(100)
'''], stdout=subprocess.PIPE, env=os.environ | {"TORCHELASTIC_RUN_ID": "x"})
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(100)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_rank_that_torchrun_started_dies_with_it():
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE) as launcher:
        rank = int(launcher.stdout.readline())
        handle = os.pidfd_open(rank)
        launcher.kill()
    with os.fdopen(handle):
        assert select.select([handle], [], [], 60)[0], "it lives on"
