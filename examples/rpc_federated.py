"""Federated averaging over clients that come and go.

Each client has samples that never leave it, mostly of one class. In a round the server sends its
model to the clients that are there, each trains it on its own samples, and the server takes the
mean of the results, weighted by the numbers of samples. One client leaves after some rounds,
another one comes later: nobody is restarted for that (*PyTorch RPC*, Li et al., MLSys 2023,
section 4.6).

Run: python examples/rpc_federated.py
On four hosts, N = 0 to 3, with the same PIBROCH_RPC_SECRET:
torchrun --nnodes 4 --node-rank N --master-addr HOST0 --master-port 29500 examples/rpc_federated.py
"""

import os
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pibroch import rpc
from pibroch.ports import free_port

NUM_CLASSES = 3
WIDTH = 8
NUM_ROUNDS = 20
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Client:
    """What the process of that rank has, and the rounds in which it takes part."""

    num_samples: int
    main_class: int
    rounds: range


CLIENTS = {
    1: Client(600, 0, range(20)),
    2: Client(300, 1, range(14)),
    3: Client(200, 2, range(6, 20)),
}


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, NUM_CLASSES))


def make_samples(
    seed: int, num_samples: int, main_class: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples and labels; with a main class, nine of ten are of that class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
    if main_class is not None:
        labels[torch.rand(num_samples, generator=generator) < 0.85] = main_class
    centres = torch.randn(NUM_CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))
    return centres[labels] + torch.randn(num_samples, WIDTH, generator=generator), labels


class Trainer:
    """A client's side: it stays on the client, and so do the samples."""

    def __init__(self, rank: int) -> None:
        self.client = CLIENTS[rank]
        self.samples, self.labels = make_samples(
            rank, self.client.num_samples, self.client.main_class
        )

    def train(self, round: int, weights: Weights) -> tuple[Weights, int]:
        """Some steps from the server's weights.

        Returns ours, and the number of samples that they stand for.
        """
        if round not in self.client.rounds:
            raise RuntimeError("I am about to leave")
        model = make_model()
        model.load_state_dict(weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(self.samples), self.labels).backward()
            optimizer.step()
        return model.state_dict(), len(self.labels)


# The server's side: what clients call, and what it does.
newcomers: queue.SimpleQueue[tuple[str, rpc.RRef]] = queue.SimpleQueue()
begun = [torch.futures.Future() for _ in range(NUM_ROUNDS + 1)]  # the last one: all is over


def enrol(name: str, trainer: rpc.RRef) -> None:
    newcomers.put((name, trainer))


@rpc.functions.async_execution
def wait_for(round: int) -> torch.futures.Future:
    """Answers when that round begins; no thread waits for it."""
    return begun[round]


def from_all(trainers: dict[str, rpc.RRef], ask: Callable[[str], Any]) -> dict[str, Any]:
    """``ask(name)`` for every client; strikes off who is gone, and the others go on."""
    answers = {}
    for name in list(trainers):
        try:
            answers[name] = ask(name)
        except RuntimeError:  # as all errors of RPC are: it has left; or it is about to
            del trainers[name]
    return answers


def average(round: int, model: nn.Module, trainers: dict[str, rpc.RRef]) -> list[str]:
    """One round; returns who took part."""
    weights = model.state_dict()
    # All at once: every client trains while the others do.
    calls = from_all(trainers, lambda name: trainers[name].rpc_async().train(round, weights))
    results = from_all(trainers, lambda name: calls[name].wait())
    total = sum(num_samples for _, num_samples in results.values())
    mean = {
        key: sum(trained[key] * (count / total) for trained, count in results.values())
        for key in weights
    }
    model.load_state_dict(mean)
    return sorted(results)


def serve() -> None:
    model = make_model()
    trainers = {}
    # Of all classes alike, as no client has them.
    samples, labels = make_samples(seed=100, num_samples=1_000)
    seen = set()
    for round in range(NUM_ROUNDS):
        begun[round].set_result(None)
        # Wait for those that are due: a round takes less time than joining.
        num_due = sum(round in client.rounds for client in CLIENTS.values())
        while len(trainers) < num_due or not newcomers.empty():
            name, trainers[name] = newcomers.get(timeout=60)
        names = average(round, model, trainers)
        accuracy = (model(samples).argmax(1) == labels).float().mean().item()
        print(f"round {round}: accuracy {accuracy:.3f} with {', '.join(names)}", flush=True)
        seen.add(tuple(names))
    begun[NUM_ROUNDS].set_result(None)
    assert accuracy > 0.8
    # Before client3 joined, with all, after client2 had left.
    assert len(seen) >= 3


def meet_server(timeout_s: float = 60) -> None:
    """A group without a size waits for nobody: the server may come after its clients."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            rpc.get_worker_info("server")
            return
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def take_part(rank: int) -> None:
    """What a client does: come, have its trainer called, and leave without a word."""
    client = CLIENTS[rank]
    meet_server()
    rpc.rpc_sync("server", wait_for, args=(client.rounds.start,), timeout=0)
    rpc.rpc_sync("server", enrol, args=(f"client{rank}", rpc.RRef(Trainer(rank))))
    rpc.rpc_sync("server", wait_for, args=(client.rounds.stop,), timeout=0)


def work(rank: int) -> None:
    """One process from start to end. Without a world size, workers may come and go."""
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    rpc.init_rpc("server" if rank == 0 else f"client{rank}", rank=rank)
    if rank == 0:
        serve()
        rpc.shutdown()
    else:
        take_part(rank)
        rpc.shutdown(graceful=False)


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by torchrun
        work(int(os.environ["RANK"]))
    else:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        torch.multiprocessing.spawn(work, nprocs=1 + len(CLIENTS))
