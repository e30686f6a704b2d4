"""``DistributedDataParallel`` inside of distributed autograd.

Its layers' gradients in the context are the average.
"""

import pytest
import torch
import torch.distributed as dist
from autograd_cases import close, live_counts, scaled, weight
from rpc_team import Team
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pibroch import rpc
from pibroch.ports import free_port
from pibroch.rpc import autograd, optim

pytestmark = pytest.mark.timeout(120)
NUM_STEPS = 3
# torch's destructor of a gloo group waits, with the GIL, for threads that may need the GIL to end
KEPT_GROUPS: list = []


@pytest.fixture(scope="module")
def trainers():
    team = Team(3)
    team.run_all(live_counts)  # loads the module
    yield team
    team.close()


def data(rank, step):
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(4, 3, dtype=torch.float64, generator=generator)


def dense():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def train(rank, port, as_views):
    """Rows from worker2, layers here and at the other trainer.

    Returns layers after the last step and old ``.grad``.
    """
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    KEPT_GROUPS.append(dist.group.WORLD)
    layers = dense()
    model = DistributedDataParallel(layers, gradient_as_bucket_view=as_views)
    parameters = [rpc.RRef(each) for each in layers.parameters()]
    optimizer = optim.DistributedOptimizer(torch.optim.Adam, parameters, lr=0.1)
    own = [torch.full_like(each, 7.0) for each in layers.parameters()]
    for step in range(NUM_STEPS):
        with autograd.context() as context:
            rows = rpc.rpc_sync("worker2", scaled, (data(rank, step), "ddp", 2))
            loss = (model(rows) ** 2).mean()
            for parameter, gradient in zip(layers.parameters(), own, strict=True):
                parameter.grad = gradient
            autograd.backward(context, [loss])
            for parameter, gradient in zip(layers.parameters(), own, strict=True):
                assert parameter.grad is gradient, (parameter.grad, gradient, step)
                assert (gradient == 7).all(), (gradient, step)
                parameter.grad = None
            optimizer.step(context)
            gradients = autograd.get_gradients(context)
            assert set(gradients) == set(layers.parameters())
    dist.destroy_process_group()
    return [each.detach().clone() for each in layers.parameters()], [
        gradients[each] for each in layers.parameters()
    ]


@pytest.mark.parametrize("as_views", [False, True])
def test_averages(trainers, as_views):
    port = free_port()
    for rank in range(2):
        trainers.workers[rank].start(train, rank, port, as_views)
    (first, gradients), (second, others) = (trainers.workers[rank].result() for rank in range(2))
    layers = dense()
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            ((layers(data(rank, step) * weight("ddp", 2).detach()) ** 2).mean() / 2).backward()
        optimizer.step()
    close(first, [each.detach() for each in layers.parameters()])
    close(second, first)
    close(gradients, [each.grad for each in layers.parameters()])
    close(others, gradients)
