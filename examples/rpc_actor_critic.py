"""Asynchronous advantage actor-critic on cart-pole.

A learner holds the network. Each actor, at its own pace, (1) fetches the network, (2) balances
poles with it, (3) computes the gradients of its losses, and (4) has the learner apply them. No
actor waits for another (*PyTorch RPC*, Li et al., MLSys 2023, section 4.3).

Run: python examples/rpc_actor_critic.py
On three hosts, N = 0, 1 and 2, with the same PIBROCH_RPC_SECRET:
torchrun --nnodes 3 --node-rank N --master-addr HOST0 --master-port 29500 PROGRAM
"""

import os
import threading

import torch
from torch import nn

from pibroch import rpc
from pibroch.ports import free_port

# updates of each actor
NUM_ACTORS = 2
NUM_UPDATES = 160
# P, T
NUM_POLES = 16
STEPS_PER_UPDATE = 20
MAX_STEPS = 200
DISCOUNT = 0.98


class CartPoles:
    """A batch of carts with a pole on each (Barto, Sutton and Anderson, 1983).

    Push left or right, keep it up.
    """

    def __init__(self) -> None:
        self.state_P4 = torch.zeros(NUM_POLES, 4)  # place, speed, angle, angular speed
        self.age_P = torch.zeros(NUM_POLES)
        self.ended: list[float] = []  # steps that ended poles were up
        self._restart(torch.ones(NUM_POLES, dtype=torch.bool))

    def step(self, action_P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rewards and ends [P] of pushing to the right (1) or left (0) for 20 ms.

        What ended starts anew.
        """
        _, speed, angle, spin = self.state_P4.T
        push = (action_P * 20.0 - 10 + 0.05 * spin**2 * angle.sin()) / 1.1
        spin_up = (9.8 * angle.sin() - angle.cos() * push) / (
            0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1)
        )
        speed_up = push - 0.05 * spin_up * angle.cos() / 1.1
        self.state_P4 = self.state_P4 + 0.02 * torch.stack([speed, speed_up, spin, spin_up], 1)
        self.age_P += 1
        fallen_P = (self.state_P4[:, 0].abs() > 2.4) | (self.state_P4[:, 2].abs() > 0.2095)
        over_P = fallen_P | (self.age_P >= MAX_STEPS)
        self.ended += self.age_P[over_P].tolist()
        self._restart(over_P)
        return 1.0 - fallen_P.float(), over_P.float()

    def _restart(self, which_P: torch.Tensor) -> None:
        self.state_P4[which_P] = torch.rand(int(which_P.sum()), 4) / 10 - 0.05
        self.age_P[which_P] = 0


class ActorCritic(nn.Module):
    """Scores of the two actions and the worth of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh())
        self.actor = nn.Linear(64, 2)
        self.critic = nn.Linear(64, 1)

    def forward(self, state: torch.Tensor) -> tuple[torch.distributions.Categorical, torch.Tensor]:
        x = self.body(state)
        return torch.distributions.Categorical(
            logits=self.actor(x), validate_args=False
        ), self.critic(x).squeeze(-1)


class Learner:
    """The network that all share. Its methods are what actors call."""

    def __init__(self) -> None:
        self.network = ActorCritic()
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=5e-3)
        self.lock = threading.Lock()

    def fetch(self) -> dict[str, torch.Tensor]:
        with self.lock:
            return {name: value.clone() for name, value in self.network.state_dict().items()}

    def apply(self, gradients: list[torch.Tensor]) -> None:
        with self.lock:
            for parameter, gradient in zip(self.network.parameters(), gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()


def loss(network: ActorCritic, poles: CartPoles) -> torch.Tensor:
    """Play some steps; the losses of the critic and the actor on their outcome."""
    played = []
    for _ in range(STEPS_PER_UPDATE):
        policy, value_P = network(poles.state_P4)
        action_P = policy.sample()
        played.append((policy.log_prob(action_P), value_P, policy.entropy(), *poles.step(action_P)))
    log_probs_TP, values_TP, entropies_TP, rewards_TP, overs_TP = map(
        torch.stack, zip(*played, strict=True)
    )
    returns_TP = torch.empty_like(rewards_TP)
    return_P = network(poles.state_P4)[1].detach()
    for step in reversed(range(STEPS_PER_UPDATE)):
        return_P = rewards_TP[step] + DISCOUNT * return_P * (1 - overs_TP[step])
        returns_TP[step] = return_P
    advantages_TP = returns_TP - values_TP
    actor_loss = -(advantages_TP.detach() * log_probs_TP).mean()
    return actor_loss + 0.05 * advantages_TP.square().mean() - 0.01 * entropies_TP.mean()


def act(learner: rpc.RRef) -> list[float]:
    """What an actor does; returns how long its poles were up, in the order in which they fell."""
    network = ActorCritic()
    poles = CartPoles()
    for _ in range(NUM_UPDATES):
        network.load_state_dict(learner.rpc_sync().fetch())
        gradients = torch.autograd.grad(loss(network, poles), list(network.parameters()))
        learner.rpc_sync().apply(list(gradients))
    return poles.ended


def learn() -> None:
    """What the learner's process does: let the actors play, and report."""
    learner = rpc.RRef(Learner())
    actors = [
        rpc.rpc_async(f"actor{index}", act, args=(learner,), timeout=0)
        for index in range(NUM_ACTORS)
    ]
    for index, steps in enumerate(torch.futures.wait_all(actors)):
        first = sum(steps[:50]) / 50
        last = sum(steps[-50:]) / 50
        print(
            f"actor{index}: {first:.0f} steps upright in the first 50 of {len(steps)} episodes,"
            f" {last:.0f} in the last"
        )
        # At first it is 20; an actor that starts late begins with what the other has learned.
        assert last > 60


def work(rank: int) -> None:
    """One worker from start to end."""
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    rpc.init_rpc(
        "learner" if rank == 0 else f"actor{rank - 1}", rank=rank, world_size=NUM_ACTORS + 1
    )
    if rank == 0:
        learn()
    rpc.shutdown()  # waits until all are done


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by torchrun
        work(int(os.environ["RANK"]))
    else:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        torch.multiprocessing.spawn(work, nprocs=NUM_ACTORS + 1)
