"""Processes that stay joined over gloo and run functions when asked.

Starting them once costs seconds, once a case minutes.
"""

import faulthandler
import os
import pickle
import signal
import tempfile
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from forked import context
from pibroch.ports import free_port

MOST_THREADS = 60  # they would take a tenth of a processor while they wait
TIMEOUT_S = 180  # the first case compiles kernels, on a loaded machine for long
GRACE_S = 10  # for the other ranks to answer, after one has failed


class World:
    """``size`` processes in one process group.

    Attributes:
        is_broken: whether a rank has failed, so that the others may wait for what it never sends.
    """

    def __init__(self, size):
        self.size = size
        self.is_broken = False
        self._stacks = tempfile.TemporaryDirectory()
        port = free_port()
        self._pipes = []
        self._processes = []
        self.num_threads = 0
        for rank in range(size):
            ours, child_pipe = context().Pipe()
            process = context().Process(
                target=_serve,
                args=(child_pipe, rank, size, port, self._stacks_of(rank)),
                daemon=True,
            )
            process.start()
            child_pipe.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def close(self):
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0.5 if self.is_broken else 5)
            if process.is_alive():
                process.kill()
                process.join()
        self._stacks.cleanup()

    def run(self, function, *args, **kwargs):
        """Run ``function(channel, *args, **kwargs)`` on all ranks; results in rank order."""
        self.ask(function, *args, **kwargs)
        answers = self._all_answers()
        self.num_threads = max(num_threads for *_, num_threads in answers.values())
        return [answers[rank][0] for rank in range(self.size)]

    def ask(self, function, *args, **kwargs):
        """Let all ranks begin."""
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__name__, args, kwargs))

    def ask_one(self, rank, function, *args, **kwargs):
        """Let one rank begin; the others wait for what they are asked next."""
        self._pipes[rank].send((function.__module__, function.__name__, args, kwargs))

    def answer(self, rank):
        """What the function returned on a rank."""
        if not self._pipes[rank].poll(TIMEOUT_S):
            self._fail(f"rank {rank} of {self.size} did not answer\n{self._where([rank])}")
        result, trace, _ = self._receive(rank)
        if trace is not None:
            self._fail(f"rank {rank} of {self.size}:\n{trace}")
        return result

    def _all_answers(self):
        """The answer of each rank; fails with the first trace, whoever waits for that rank."""
        answers, traces = {}, []
        end = time.monotonic() + TIMEOUT_S
        while missing := [rank for rank in range(self.size) if rank not in answers]:
            ready = wait([self._pipes[rank] for rank in missing], max(end - time.monotonic(), 0))
            for rank in [rank for rank in missing if self._pipes[rank] in ready]:
                answers[rank] = self._receive(rank)
                if answers[rank][1] is not None:
                    traces.append(f"rank {rank} of {self.size}:\n{answers[rank][1]}")
                    end = min(end, time.monotonic() + GRACE_S)
            if not ready:
                traces.append(f"ranks {missing} did not answer\n{self._where(missing)}")
                break
        if traces:
            self._fail("\n".join(traces))
        return answers

    def _receive(self, rank):
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            self.is_broken = True
            raise

    def _fail(self, message):
        self.is_broken = True
        raise AssertionError(message)

    def _stacks_of(self, rank):
        return str(Path(self._stacks.name) / str(rank))

    def _where(self, ranks):
        """The stacks of all threads of these ranks."""
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(1)
        return "\n".join(f"rank {r}:\n{Path(self._stacks_of(r)).read_text()}" for r in ranks)


class Worlds:
    """``worlds(size)`` gives the joined processes of that number.

    Whoever has too many threads is replaced, and so is a group of which a rank has failed.

    A process group keeps three threads, one of which wakes a hundred times a second, until its
    process ends: nothing else is sure to take them back, because torch's destructor may wait, with
    the GIL, for a thread that needs the GIL.
    """

    def __init__(self):
        self._started = {}

    def __call__(self, size):
        started = self._started.get(size)
        if started and (started.is_broken or started.num_threads > MOST_THREADS):
            self._started.pop(size).close()
        if size not in self._started:
            self._started[size] = World(size)
        return self._started[size]

    def close(self):
        for each in self._started.values():
            each.close()


def _serve(pipe, rank, size, port, stacks):
    stacks_file = open(stacks, "w")  # noqa: SIM115  open as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=True)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
    }
    import importlib

    import torch
    import torch.distributed as dist

    from pibroch.collectives import Ranks

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    channel = Ranks.joined(TIMEOUT_S).open_channel()
    while True:
        try:
            module, name, args, kwargs = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            result = getattr(importlib.import_module(module), name)(channel, *args, **kwargs)
            trace = None
        except Exception:
            result = None
            trace = traceback.format_exc()
        finish_messages(channel.ranks)
        answer = result, trace, len(os.listdir("/proc/self/task"))
        pipe.send_bytes(
            pickle.dumps(answer)
        )  # send() would share each tensor's memory: a descriptor stays open for it


def finish_messages(ranks):
    """Let what was begun end: the next function uses the same channel at once."""
    communication = ranks._process.communication
    if communication is not None:
        with suppress(Exception):  # it has told the function
            communication.flush()
