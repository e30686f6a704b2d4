"""Embedding servers, an oracle or data processors as processes of the tests' own.

All worlds of trainers may join them.
"""

import os

import cases
from forked import context
from pibroch.ports import free_port
from pibroch.servers import ORACLE_NAME, join, leave

TIMEOUT_S = 120


class RoleTeam:
    """``size`` processes that call ``serve(meet, number, opens)``.

    Attributes:
        rendezvous: where they are found.
    """

    def __init__(self, size, serve, rendezvous=None):
        opens = rendezvous is None
        self.rendezvous = rendezvous or f"tcp://127.0.0.1:{free_port()}"
        self.size = size
        self._processes = []
        for number in range(size):
            ours, child_pipe = context().Pipe()
            process = context().Process(
                target=_serve,
                args=(child_pipe, serve, self.rendezvous, number, opens and number == 0),
                daemon=True,
            )
            process.start()
            child_pipe.close()
            self._processes.append((process, ours))
        for _, pipe in self._processes:
            assert pipe.poll(TIMEOUT_S) and pipe.recv() == "ready"

    @property
    def pids(self):
        return [process.pid for process, _ in self._processes]

    def signal(self, number, which):
        os.kill(self._processes[number][0].pid, which)

    def close(self):
        for process, _ in self._processes:
            process.kill()
            process.join()


def _serve(pipe, serve, rendezvous, number, opens):
    import torch

    torch.set_num_threads(1)
    serve(rendezvous, number, opens)
    pipe.send("ready")
    try:
        pipe.recv()
    except EOFError:
        os._exit(0)


def run(channel, rendezvous, num_servers, function, *args, central=False, **options):
    """Run a function, of the cases if by name, with rows on servers and a central oracle.

    Each where it is asked for.
    """
    servers = join(rendezvous, num_servers, channel.ranks.rank, with_oracle=central)
    options |= {"oracle": ORACLE_NAME} if central else {}
    try:
        called = getattr(cases, function) if isinstance(function, str) else function
        result = called(channel, *args, exchange="lookahead", servers=servers, **options)
        channel.barrier()  # nobody leaves while others are at work
    finally:
        leave()
    return result
