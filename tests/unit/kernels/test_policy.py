import os
import subprocess
import sys
import threading
import time

from pibroch.kernels.compile_lock import COMPILE_TIMEOUT_S, locked

PROGRAM = """
import sys
import numpy as np
from pibroch.kernels.placement import numba as kernels
print("ready", flush=True)
sys.stdin.readline()
kernels.nearer_shards(1.0 - np.eye(3))
print(sum(kernels.nearer_shards.stats.cache_misses.values()))
"""


def test_processes_that_need_a_kernel_at_once_compile_it_once(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("NUMBA_DISABLE_JIT", raising=False)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        compiled = [int(process.communicate(timeout=120)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    assert sorted(compiled) == [0, 0, 1]


def test_a_process_that_is_forked_while_a_kernel_is_compiled_does_not_keep_its_lock(tmp_path):
    path = str(tmp_path / "kernel.lock")
    reader, writer = os.pipe()
    with locked(path, threading.Lock()):
        child = os.fork()
        if child == 0:  # lives until the pipe is closed
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
    try:
        start = time.monotonic()
        with locked(path, threading.Lock()):
            assert time.monotonic() - start < COMPILE_TIMEOUT_S / 10
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(child, 0)
