import pytest
import torch
from autograd_cases import close, live_counts, scaled, weight

from pibroch import rpc
from pibroch.rpc import autograd
from pibroch.rpc.optim import DistributedOptimizer

pytestmark = pytest.mark.timeout(120)


def parameter(name, worker):
    """A reference to a leaf of this worker."""
    return rpc.RRef(weight(name, worker))


def value_of(name, worker):
    return weight(name, worker).detach().clone()


def has_own_gradient(name, worker):
    grad = weight(name, worker).grad
    return None if grad is None else grad.tolist()


def set_own_gradient(name, worker, value):
    leaf = weight(name, worker)
    leaf.grad = None if value is None else torch.full_like(leaf, value)


def ask(worker, function, *args):
    return rpc.rpc_sync(f"worker{worker}", function, args)


def copies(name, workers):
    return [ask(worker, value_of, name, worker).requires_grad_() for worker in workers]


def loss_of(x, name):
    y = ask(1, scaled, x * weight(name, 0), name, 1)
    return ask(2, scaled, y, name, 2).pow(2).sum()


def steps_like_a_local_optimizer(optimizer_class, options):
    """Three workers' leaves, several steps with state, and one that is never used."""
    name = f"{optimizer_class.__name__}"
    ours = copies(name, (0, 1, 2, 0))
    local = optimizer_class(ours, **options)
    references = [ask(worker, parameter, name, worker) for worker in (0, 1, 2)]
    unused = ask(1, parameter, name + " unused", 1)
    before = ask(1, value_of, name + " unused", 1)
    optimizer = DistributedOptimizer(optimizer_class, [*references, unused], **options)
    assert len(optimizer.remote_optimizers) == 3
    x = torch.full((3,), 0.5, dtype=torch.float64)
    ask(1, set_own_gradient, name, 1, 9.0)
    for _ in range(4):
        local.zero_grad()
        (x * ours[0] * ours[1] * ours[2]).pow(2).sum().backward()
        local.step()
        with autograd.context() as context:
            autograd.backward(context, [loss_of(x, name)])
            optimizer.step(context)
        for worker in range(3):
            close(ask(worker, value_of, name, worker), ours[worker].detach())
    assert (
        ask(1, has_own_gradient, name, 1) == [9.0] * 3 and ask(2, has_own_gradient, name, 2) is None
    )
    close(ask(1, value_of, name + " unused", 1), before)


def step_with_no_call_before():
    """An owner that no call of the context has reached has nothing to step."""
    optimizer = DistributedOptimizer(torch.optim.SGD, [ask(2, parameter, "calm", 2)], lr=1.0)
    before = ask(2, value_of, "calm", 2)
    with autograd.context() as context:
        optimizer.step(context)
    close(ask(2, value_of, "calm", 2), before)
    with pytest.raises(RuntimeError, match="not open"):
        optimizer.step(context)


class Picky(torch.optim.SGD):
    def step(self, closure=None):
        raise ArithmeticError(f"at {rpc.get_worker_info().name}")


def errors_of_all_owners():
    references = [ask(worker, parameter, "picky", worker) for worker in (1, 2)]
    with pytest.raises(ValueError, match="learning rate") as caught:
        DistributedOptimizer(torch.optim.SGD, references, lr=-1.0)
    assert "worker2" in caught.value.__notes__[0]
    optimizer = DistributedOptimizer(Picky, references, lr=1.0)
    with autograd.context() as context:
        autograd.backward(
            context, [ask(1, scaled, torch.ones(3, dtype=torch.float64), "picky", 1).sum()]
        )
        with pytest.raises(ArithmeticError, match="at worker1") as caught:
            optimizer.step(context)
        assert "'worker2': ArithmeticError: at worker2" in caught.value.__notes__[0]
    assert ask(1, has_own_gradient, "picky", 1) is None
    with pytest.raises(ValueError, match="no parameters"):
        DistributedOptimizer(torch.optim.SGD, [], lr=1.0)


def train_shared(num_steps):
    """Every worker steps the same leaf of worker1, with its own optimizer."""
    optimizer = DistributedOptimizer(torch.optim.SGD, [ask(1, parameter, "shared", 1)], lr=0.5)
    for _ in range(num_steps):
        with autograd.context() as context:
            autograd.backward(
                context, [ask(1, scaled, torch.ones(3, dtype=torch.float64), "shared", 1).sum()]
            )
            optimizer.step(context)


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.Adam, {"lr": 0.05}),
        (torch.optim.Adagrad, {"lr": 0.05}),
    ],
)
def test_steps_like_a_local_optimizer(workers, optimizer_class, options):
    team = workers(3)
    team.run_all(live_counts)
    team.run(0, steps_like_a_local_optimizer, optimizer_class, options)


def test_an_owner_without_gradients(workers):
    workers(3).run(0, step_with_no_call_before)


def test_errors_of_all_owners(workers):
    team = workers(3)
    team.run_all(parameter_loaded)
    team.run(0, errors_of_all_owners)


def parameter_loaded():
    return parameter.__name__


def test_concurrent_steps_lose_nothing(workers):
    """Plain gradient descent with a constant gradient: each step counts, in any order."""
    team = workers(3)
    team.run_all(parameter_loaded)
    before = team.run(1, value_of, "shared", 1)
    team.run_all(train_shared, 10)
    close(team.run(1, value_of, "shared", 1), before - 0.5 * 30)
