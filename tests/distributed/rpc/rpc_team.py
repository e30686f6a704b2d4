"""Worker processes that stay joined by RPC and run functions of test modules when asked."""

import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

from forked import context
from pibroch.ports import free_port

HERE = Path(__file__).parent
TIMEOUT_S = 120  # of one function, on a loaded machine


class Worker:
    """One process that runs functions when asked; ``join`` makes it an RPC worker."""

    def __init__(self, made=None):
        made = made or context()
        self._pipe, child_pipe = made.Pipe()
        self.process = made.Process(target=_serve, args=(child_pipe,), daemon=True)
        self.process.start()
        child_pipe.close()

    @property
    def pid(self):
        return self.process.pid

    def start(self, function, *args, **kwargs):
        """Begin ``function(*args, **kwargs)`` there."""
        self._pipe.send((function.__module__, function.__qualname__, args, kwargs))

    def result(self, timeout_s=TIMEOUT_S):
        assert self._pipe.poll(timeout_s), f"no result within {timeout_s} s"
        result, trace = self._pipe.recv()
        assert trace is None, f"in a worker:\n{trace}"
        return result

    def run(self, function, *args, **kwargs):
        self.start(function, *args, **kwargs)
        return self.result()

    def stop(self):
        """Send SIGSTOP, and wait until no thread runs: one may answer a while after the signal."""
        os.kill(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while any(
            stat.read_text().rpartition(")")[2].split()[0] != "T"
            for stat in Path(f"/proc/{self.pid}/task").glob("*/stat")
        ):
            assert time.monotonic() < deadline, f"process {self.pid} goes on after SIGSTOP"
            time.sleep(0.005)

    def print_stacks(self):
        """On its standard error, of all its threads, whatever they wait for."""
        if self.process.is_alive():
            print(f"stacks of process {self.pid}:", file=sys.stderr, flush=True)
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.5)

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10)

    def close(self):
        self._pipe.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)


class Team:
    """``size`` workers named worker0, worker1, … in one group."""

    def __init__(self, size, **options):
        self.size = size
        self.port = free_port()
        self.options = options
        made = context()
        self.workers = [Worker(made) for _ in range(size)]
        for rank, worker in enumerate(self.workers):
            worker.start(join, f"worker{rank}", rank, size, self.port, options)
        for worker in self.workers:
            worker.result()

    def run(self, rank, function, *args, **kwargs):
        """The result of ``function(*args, **kwargs)`` in worker ``rank``."""
        with self._explained():
            return self.workers[rank].run(function, *args, **kwargs)

    def run_all(self, function, *args, **kwargs):
        """It runs in all workers at once; the results in the order of their ranks."""
        with self._explained():
            for worker in self.workers:
                worker.start(function, *args, **kwargs)
            return [worker.result() for worker in self.workers]

    @contextmanager
    def _explained(self):
        """Show where all workers are when one has waited too long."""
        try:
            yield
        except AssertionError as error:
            if "no result within" in str(error) or "RpcTimeoutError" in str(error):
                for worker in self.workers:
                    worker.print_stacks()
            raise

    def replace(self, rank):
        """Another process comes back under the name of worker ``rank``."""
        self.workers[rank].close()
        self.workers[rank] = Worker()
        self.workers[rank].run(join, f"worker{rank}", rank, self.size, self.port, self.options)

    def close(self):
        for worker in self.workers:
            worker.close()


def join(name, rank, world_size, port, options):
    """Make this process an RPC worker."""
    import torch

    from pibroch import rpc

    torch.set_num_threads(1)
    modules = sorted(path.stem for path in HERE.glob("*.py"))
    given = {
        "allowed_modules": modules,
        "rpc_timeout": 60.0,
        "init_method": f"tcp://127.0.0.1:{port}",
    } | options
    rpc.init_rpc(
        name, rank=rank, world_size=world_size, rpc_backend_options=rpc.RpcBackendOptions(**given)
    )


def leave():
    from pibroch import rpc

    rpc.shutdown()


def _serve(pipe):
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    while True:
        try:
            module, name, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            function = importlib.import_module(module.rpartition(".")[2])
            for part in name.split("."):
                function = getattr(function, part)
            pipe.send((function(*args, **kwargs), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))
