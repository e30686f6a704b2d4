"""Processes that stay joined over gloo and run functions when asked.

Starting them once costs seconds, once a case minutes.
"""

import os
import pickle
import traceback

from forked import context
from pibroch.ports import free_port

MOST_THREADS = 60  # they would take a tenth of a processor while they wait
TIMEOUT_S = 180  # the first case compiles kernels, on a loaded machine for long


class World:
    """``size`` processes in one process group."""

    def __init__(self, size):
        self.size = size
        port = free_port()
        self._pipes = []
        self._processes = []
        self.num_threads = 0
        for rank in range(size):
            ours, child_pipe = context().Pipe()
            process = context().Process(
                target=_serve, args=(child_pipe, rank, size, port), daemon=True
            )
            process.start()
            child_pipe.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def close(self):
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()

    def run(self, function, *args, **kwargs):
        """Run ``function(channel, *args, **kwargs)`` on all ranks; results in rank order."""
        self.ask(function, *args, **kwargs)
        answers = [self._receive(rank) for rank in range(self.size)]
        self.num_threads = max(num_threads for *_, num_threads in answers)
        return [self._checked(rank, answer) for rank, answer in enumerate(answers)]

    def ask(self, function, *args, **kwargs):
        """Let all ranks begin."""
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__name__, args, kwargs))

    def ask_one(self, rank, function, *args, **kwargs):
        """Let one rank begin; the others wait for what they are asked next."""
        self._pipes[rank].send((function.__module__, function.__name__, args, kwargs))

    def answer(self, rank):
        """What the function returned on a rank."""
        return self._checked(rank, self._receive(rank))

    def _receive(self, rank):
        assert self._pipes[rank].poll(TIMEOUT_S), f"rank {rank} of {self.size} did not answer"
        return pickle.loads(self._pipes[rank].recv_bytes())

    def _checked(self, rank, answer):
        result, trace, _ = answer
        assert trace is None, f"rank {rank} of {self.size}:\n{trace}"
        return result


class Worlds:
    """``worlds(size)`` gives the joined processes of that number.

    Whoever has too many threads is replaced.

    A process group keeps three threads, one of which wakes a hundred times a second, until its
    process ends: nothing else is sure to take them back, because torch's destructor may wait, with
    the GIL, for a thread that needs the GIL.
    """

    def __init__(self):
        self._started = {}

    def __call__(self, size):
        if size in self._started and self._started[size].num_threads > MOST_THREADS:
            self._started.pop(size).close()
        if size not in self._started:
            self._started[size] = World(size)
        return self._started[size]

    def close(self):
        for each in self._started.values():
            each.close()


def _serve(pipe, rank, size, port):
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
        answer = result, trace, len(os.listdir("/proc/self/task"))
        pipe.send_bytes(
            pickle.dumps(answer)
        )  # send() would share each tensor's memory: a descriptor stays open for it
