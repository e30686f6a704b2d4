"""One of two processes, each a rank and a worker, which say what becomes of the other one.

Both step together, by a barrier of ranks; rank 0 has two calls under way for many seconds, one
with a large argument and one with a large result. When those are answered, both end.
"""

import os
import sys
import threading

import torch

from pibroch import rpc
from pibroch.collectives.world import world_of_environment
from pibroch.rpc.calls.agent import current_agent

LARGE = 25_000_000  # floats, 100 MB


def total(numbers: torch.Tensor) -> float:
    return numbers.sum().item()


def ones(size: int) -> torch.Tensor:
    return torch.ones(size)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def calls(has_answers: threading.Event) -> None:
    """Have both calls answered, or say why not."""
    try:
        taken = rpc.rpc_async("worker1", total, args=(torch.ones(LARGE),), timeout=120)
        given = rpc.rpc_async("worker1", ones, args=(LARGE,), timeout=120)
        say("under way")
        assert taken.wait() == given.wait().sum().item() == LARGE
        say("answered")
        has_answers.set()
    except Exception as error:
        say("call", type(error).__name__, error)


def main() -> None:
    rank = int(os.environ["RANK"])
    with world_of_environment(lambda error: say("rank", error)) as world:
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
        current_agent().when_lost(lambda worker, _: say("worker", worker.name))
        say("pid", os.getpid())
        has_answers = threading.Event()
        if rank == 0:
            threading.Thread(target=calls, args=[has_answers]).start()
        step = 0
        while not world.control.gather(has_answers.is_set())[0]:
            step += 1
            world.enter(step)
        rpc.shutdown()
    say("ended")


if __name__ == "__main__":
    main()
