import os
import subprocess
import sys
import threading
import time

import pytest

from pibroch.kernels import policy
from pibroch.kernels.compile_lock import COMPILE_TIMEOUT_S, locked

PROGRAM = """
import sys
import numpy as np
from pibroch.planner.kernels.placement import numba as kernels
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


class CacheOfOne:
    """As numba's of a kernel: an index on disk with one signature, loaded by compiling it."""

    def __init__(self, index_error=None, compile_error=None):
        self.__name__ = "kernel"
        self.overloads = {}
        self.targetctx = self._cache = self._cache_file = self
        self._errors = index_error, compile_error

    def codegen(self):
        return self

    def _load_index(self):
        if self._errors[0] is not None:
            raise self._errors[0]
        return {("float64",): "a file"}

    def _index_key(self, signature, codegen):
        return (signature,)

    def compile(self, signature):
        if self._errors[1] is not None:
            raise self._errors[1]
        self.overloads[signature] = self


@pytest.mark.parametrize("place", ["index_error", "compile_error"])
@pytest.mark.parametrize(
    "error", [OSError(), EOFError(), ValueError(), RuntimeError("LLVM IR parsing error")]
)
def test_files_that_cannot_be_read_are_left_to_who_calls_the_kernel(monkeypatch, place, error):
    kernels = [CacheOfOne(), CacheOfOne(**{place: error}), CacheOfOne()]
    monkeypatch.setattr(policy, "_KERNELS", kernels)
    assert sum(1 for _ in policy.load_compiled()) == 2
    assert [bool(each.overloads) for each in kernels] == [True, False, True]
    assert sum(1 for _ in policy.load_compiled()) == 0, "what is loaded is not loaded again"


@pytest.mark.parametrize("place", ["index_error", "compile_error"])
def test_a_mistake_of_our_own_is_not_silent(monkeypatch, place):
    monkeypatch.setattr(policy, "_KERNELS", [CacheOfOne(**{place: AssertionError("ours")})])
    with pytest.raises(AssertionError, match="ours"):
        list(policy.load_compiled())


def test_what_is_raised_between_two_kernels_is_not_taken_for_an_unreadable_file(monkeypatch):
    monkeypatch.setattr(policy, "_KERNELS", [CacheOfOne(), CacheOfOne()])
    loading = policy.load_compiled()
    next(loading)
    with pytest.raises(ValueError, match="of a child"):
        loading.throw(ValueError("of a child"))
