"""Federated averaging over RPC.

The server sends its model, clients train it on samples of their own, the server takes the mean.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workers.rpc_case_sizes import Sizes
from benchmarks.workers.rpc_case_weights import seeded
from benchmarks.workers.rpc_library import rpc

# wide layers bear no larger rate
NUM_CLASSES = 10
WIDTH = 128
SAMPLES = 16
LEARNING_RATE = 0.001


def make_model(sizes: Sizes) -> nn.Sequential:
    """Two layers of about so many parameters."""
    hidden = max(8, sizes.parameters // (WIDTH + NUM_CLASSES))
    return seeded(
        nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, NUM_CLASSES)), 0
    )


class Client:
    """Samples, which stay where they are."""

    def __init__(self, place: int, sizes: Sizes) -> None:
        self.sizes = sizes
        self.model = make_model(sizes)
        generator = torch.Generator().manual_seed(place)
        self.samples = torch.randn(SAMPLES, WIDTH, generator=generator)
        self.labels = torch.randint(NUM_CLASSES, (SAMPLES,), generator=generator)

    def train(self, weights: list[Tensor]) -> tuple[list[Tensor], float]:
        """Some steps from the server's weights; returns ours and the first loss."""
        parameters = list(self.model.parameters())
        with torch.no_grad():
            for parameter, weight in zip(parameters, weights, strict=True):
                parameter.copy_(weight)
        losses = []
        for _ in range(self.sizes.local_steps):
            loss = nn.functional.cross_entropy(self.model(self.samples), self.labels)
            losses.append(loss.item())
            for parameter, gradient in zip(
                parameters, torch.autograd.grad(loss, parameters), strict=True
            ):
                parameter.data.sub_(gradient, alpha=LEARNING_RATE)
        return [parameter.detach() for parameter in parameters], losses[0]


class FederatedAveraging:
    """The driver's side: it is the server."""

    def __init__(self, workers: list[str], sizes: Sizes) -> None:
        self._clients: list[Any] = [
            rpc.remote(worker, Client, args=(place, sizes)) for place, worker in enumerate(workers)
        ]
        self._weights = [parameter.detach() for parameter in make_model(sizes).parameters()]

    def step(self, number: int) -> float:
        """A round of all clients."""
        calls = [client.rpc_async(timeout=0).train(self._weights) for client in self._clients]
        answers = [call.wait() for call in calls]
        self._weights = [
            torch.stack(other).mean(0) for other in zip(*(each for each, _ in answers), strict=True)
        ]
        return float(sum(loss for _, loss in answers)) / len(answers)
