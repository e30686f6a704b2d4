"""Reinforcement learning with batched inference.

Observers send frames, the agent answers them all by one pass of its policy.

The answer to each call is a future (``async_execution``) that is set when the last observer's frame
of the step has come. After an episode the agent takes a step of REINFORCE.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workers.rpc_case_sizes import Sizes
from benchmarks.workers.rpc_case_weights import seeded
from benchmarks.workers.rpc_library import rpc

NUM_ACTIONS = 6


def play(agent: Any, observer: int, episode: int, frames: int) -> list[float]:
    """What an observer does: show frames, which follow from its number and the actions.

    Returns its rewards.
    """
    generator = torch.Generator().manual_seed(1000 * episode + observer)
    frame = torch.randint(256, (4, 84, 84), dtype=torch.uint8, generator=generator)
    rewards = []
    for step in range(frames):
        action = agent.rpc_sync().select(observer, frame)
        rewards.append(float(action == (step + observer) % NUM_ACTIONS))
        frame = torch.roll(frame, action + 1, dims=2)
    return rewards


class Agent:
    """The policy and what was played of an episode."""

    def __init__(self, observers: int) -> None:
        self.policy = seeded(
            nn.Sequential(
                nn.Conv2d(4, 16, 8, stride=4),
                nn.ReLU(),
                nn.Conv2d(16, 32, 4, stride=2),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(32 * 9 * 9, 256),
                nn.ReLU(),
                nn.Linear(256, NUM_ACTIONS),
            ),
            0,
        )
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=1e-2)
        self.observers = observers
        self.lock = threading.Lock()
        self.scores: list[Tensor] = []
        self._begin_step()

    def _begin_step(self) -> None:
        self.frames: dict[int, Tensor] = {}
        self.actions: Any = torch.futures.Future()

    @rpc.functions.async_execution
    def select(self, observer: int, frame: Tensor) -> Any:
        """A future of the observer's action."""
        with self.lock:
            actions = self.actions
            own = actions.then(lambda done: int(done.value()[observer]))
            self.frames[observer] = frame
            if len(self.frames) == self.observers:
                batch = torch.stack([self.frames[each] for each in range(self.observers)])
                logits = self.policy(batch.float() / 255)
                chosen = logits.argmax(1)
                self.scores.append(logits.log_softmax(1).gather(1, chosen[:, None]).squeeze(1))
                self._begin_step()
                actions.set_result(chosen)
        return own

    def learn(self, rewards: Tensor) -> float:
        """One step from rewards ``[observers, frames]``; returns the loss."""
        returns = rewards.flip(1).cumsum(1).flip(1) / rewards.shape[1]
        loss = -(torch.stack(self.scores, 1) * (returns + 0.1)).mean()
        self.scores = []
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


class ReinforcementLearning:
    """The driver's side: it is the agent."""

    def __init__(self, workers: list[str], sizes: Sizes) -> None:
        self._workers = workers
        self._sizes = sizes
        self._agent = Agent(len(workers))
        self._reference = rpc.RRef(self._agent)

    def step(self, number: int) -> float:
        """An episode of all observers, and what is learned of it."""
        played = [
            rpc.rpc_async(worker, play, args=(self._reference, place, number, self._sizes.frames))
            for place, worker in enumerate(self._workers)
        ]
        return self._agent.learn(torch.tensor([each.wait() for each in played]))
