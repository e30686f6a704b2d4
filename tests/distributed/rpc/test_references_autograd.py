"""References in distributed autograd.

What is made, fetched and called through them belongs to the context.
"""

import pytest
import reference_cases as cases
import torch

from pibroch import rpc
from pibroch.rpc import autograd

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def team(workers):
    """Four workers, which must refer to nothing when the test is over."""
    team = workers(4)
    yield team
    assert team.run_all(cases.settle) == [{}] * 4


class Scale:
    """``x * weight``, with a weight that stays at the owner."""

    def __init__(self, weight):
        self.weight = torch.tensor(weight, requires_grad=True)

    def forward(self, x):
        x = x.to_here() if isinstance(x, rpc.RRef) else x
        return x * self.weight

    def gradient(self, context):
        return autograd.get_gradients(context)[self.weight].item()


def through_references():
    """The result of one worker goes to another one without coming here: y = sum(3 (2 x))."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    first = rpc.remote("worker1", Scale, (2.0,))
    second = rpc.remote("worker2", Scale, (3.0,))
    with autograd.context() as context:
        middle = first.remote().forward(x)
        y = second.remote().forward(middle).to_here().sum()
        autograd.backward(context, [y])
        gradient = autograd.get_gradients(context)[x].tolist()
        return gradient, first.rpc_sync().gradient(context), second.rpc_sync().gradient(context)


def test_values_that_never_come_here_are_differentiated(team):
    assert team.run(0, through_references) == ([6.0, 6.0], 9.0, 6.0)


def squared_sum(x):
    return (x * x).sum()


def backward_at_the_owner(owner):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with autograd.context() as context:
        loss = rpc.remote(owner, squared_sum, (x,))
        loss.backward(context, retain_graph=True)
        first = autograd.get_gradients(context)[x].tolist()
        loss.backward(context)
        return first, autograd.get_gradients(context)[x].tolist()


@pytest.mark.parametrize("owner", ["worker1", "worker0"])
def test_backward_starts_at_the_owner(team, owner):
    assert team.run(0, backward_at_the_owner, owner) == ([2.0, 4.0], [4.0, 8.0])


def backward_without_a_context():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    rpc.RRef(squared_sum(x)).backward()
    return x.grad.tolist()


def test_backward_of_an_own_value_is_local_without_a_context(team):
    assert team.run(0, backward_without_a_context) == [2.0, 4.0]


def backward_of_no_tensor():
    errors = []
    for rref in (rpc.RRef(3), rpc.remote("worker1", cases.identity, (3,))):
        with autograd.context() as context:
            try:
                rref.backward(context)
            except RuntimeError as error:
                errors.append(str(error))
    return errors


def test_backward_needs_a_tensor(team):
    assert (
        team.run(0, backward_of_no_tensor) == ["RRef should contain a tensor for .backward()"] * 2
    )
