"""Leaves' gradients shown in ``.grad`` for the time of a pass, as DDP wants them."""

import threading

import pytest
import torch
from torch.autograd.graph import GradientEdge

from pibroch.rpc.autograd.ddp import leaf_gradients
from pibroch.rpc.autograd.send_receive import run_engine, start_of

TIMEOUT_S = 60


class Backward:
    """A pass without messages."""


def watched_pass(root, leaf, change=None, shows=True):
    """The gradient of ``leaf`` in a pass of its own.

    ``change()`` runs behind the function that accumulates.
    """
    node = start_of(leaf)[0]

    def after(inputs, outputs):
        change()

    handle = node.register_hook(after) if change else None
    backward = Backward()
    with leaf_gradients(backward, [node], shows) as shown:
        run_engine(backward, [root], [], [GradientEdge(node, 0)], False)
    if handle:
        handle.remove()
    return shown[leaf]


@pytest.fixture
def leaf():
    leaf = torch.ones(2, requires_grad=True)
    leaf.grad = torch.full((2,), 9.0)
    return leaf


def test_what_was_there_comes_back(leaf):
    before = leaf.grad
    seen = []
    assert watched_pass(
        (leaf * 3).sum(), leaf, lambda: seen.append(leaf.grad.tolist())
    ).tolist() == [3, 3]
    assert seen == [[3, 3]] and leaf.grad is before and before.tolist() == [9, 9]


def test_what_is_written_into_it_counts(leaf):
    assert watched_pass((leaf * 3).sum(), leaf, lambda: leaf.grad.mul_(10)).tolist() == [30, 30]


def test_what_is_put_in_its_place_counts(leaf):
    memory = torch.arange(8.0)

    def replace():
        leaf.grad = memory[2:4]

    gradient = watched_pass((leaf * 3).sum(), leaf, replace)
    memory.zero_()
    assert gradient.tolist() == [2, 3] and leaf.grad.tolist() == [9, 9]


def test_an_error_brings_it_back_too(leaf):
    def fail():
        raise KeyError("hook")

    before = leaf.grad
    with pytest.raises(KeyError):
        watched_pass((leaf * 3).sum(), leaf, fail)
    assert leaf.grad is before


def test_passes_at_once_on_one_leaf(leaf):
    """Both are in the middle at the same time; each has its own gradient."""
    before = leaf.grad
    both = threading.Barrier(2, timeout=TIMEOUT_S)
    results = {}

    def work(factor):
        class Rendezvous(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * factor

            @staticmethod
            def backward(ctx, gradient):
                both.wait()
                return gradient * factor

        results[factor] = watched_pass(Rendezvous.apply(leaf).sum(), leaf)

    threads = [threading.Thread(target=work, args=(factor,)) for factor in (2, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert {factor: gradient.tolist() for factor, gradient in results.items()} == {
        2: [2, 2],
        5: [5, 5],
    }
    assert leaf.grad is before


def test_a_whole_pass_within_another_leaves_that_ones_gradient_alone(leaf):
    """The inner one shows its gradient last and ends first."""
    before = leaf.grad
    inner = []

    def work():
        inner.append(watched_pass((leaf * 5).sum(), leaf))

    threads = [threading.Thread(target=work)]

    def meanwhile():
        if threads:  # the inner pass comes by here, too
            thread = threads.pop()
            thread.start()
            thread.join(TIMEOUT_S)

    outer = watched_pass((leaf * 2).sum(), leaf, meanwhile)
    assert (outer.tolist(), inner[0].tolist()) == ([2, 2], [5, 5]) and leaf.grad is before


@pytest.mark.parametrize("shows", [True, False])
def test_a_local_pass_meanwhile_is_not_touched(leaf, shows):
    """A backward pass of the user's, while the hooks are there, accumulates as ever."""
    with leaf_gradients(Backward(), [start_of(leaf)[0]], shows) as shown:
        (leaf * 2).sum().backward()
    assert leaf.grad.tolist() == [11, 11] and shown == {}


def test_hooks_on_the_function_that_accumulates_are_called_and_grad_stays(leaf):
    """Those before it see the gradient and may change it.

    Those behind it come after, and nothing was accumulated.
    """
    seen = []
    before = leaf.grad
    node = start_of(leaf)[0]
    node.register_prehook(lambda gradients: (gradients[0] * 10,))
    node.register_hook(lambda inputs, outputs: seen.append(leaf.grad is before))
    gradient = watched_pass((leaf * 2).sum(), leaf, shows=False)
    assert gradient.tolist() == [20, 20] and seen == [True] and leaf.grad is before
    assert leaf.grad.tolist() == [9, 9]
