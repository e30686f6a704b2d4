"""Send and receive functions, turns and the walk between them, in one process."""

import threading

import pytest
import torch

from pibroch.rpc.autograd.send_receive import (
    Received,
    Sent,
    Walk,
    behind,
    make_receive_function,
    make_send_function,
    run_engine,
    start_of,
)
from pibroch.rpc.info import WorkerInfo

OTHER = WorkerInfo("other", 1)


class Backward:
    """Answers each message with what ``reply`` makes of the gradients of the one before it."""

    def __init__(self, **inbox):
        self.inbox = {int(name[1:]): gradients for name, gradients in inbox.items()}
        self.sent = []
        self.turns = []

    def await_turn(self, sent):
        self.turns.append(sent.message)

    def gradient(self, message, tensor):
        return self.inbox[message][tensor]

    def send(self, received, gradients):
        self.sent.append((received.message, gradients))


@pytest.fixture
def anchor():
    return torch.empty(0, requires_grad=True)


def sent(message, order, *tensors):
    return Sent(
        message,
        OTHER,
        order,
        {place: make_send_function(message, place, each) for place, each in enumerate(tensors)},
    )


def received(message, order, anchor, *tensors):
    note = Received(message, OTHER, order, tuple(range(len(tensors))))
    return note, make_receive_function(note, anchor, tensors)


def test_a_send_function_adds_to_the_local_gradient():
    x = torch.ones(2, requires_grad=True)
    y = x * 3
    message = sent(7, 0, y)
    backward = Backward(m7=[torch.tensor([1.0, 2.0])])
    run_engine(backward, [(y * 5).sum()], [(message, [message.outputs[0]])], [x], False)
    assert x.grad.tolist() == [18, 21] and backward.turns == [7]


def test_a_receive_function_sends_once_what_all_uses_sum_up_to(anchor):
    _, (x,) = received(3, 0, anchor, torch.ones(2))
    assert x.requires_grad and not x.is_leaf and not x._is_view()
    backward = Backward()
    run_engine(backward, [(x * 2).sum(), (x * 5).sum()], [], [anchor], False)
    [(message, (gradient,))] = backward.sent
    assert message == 3 and gradient.tolist() == [7, 7]


def test_unused_tensors_of_a_message_have_no_gradient(anchor):
    _, (x, _) = received(3, 0, anchor, torch.ones(2), torch.ones(2))
    backward = Backward()
    run_engine(backward, [x.sum()], [], [anchor], False)
    assert backward.sent[0][1][1] is None


def test_received_tensors_can_be_worked_on_in_place(anchor):
    _, (x, y) = received(3, 0, anchor, torch.ones(2), torch.ones(2))
    x.mul_(2)
    y[0] = 5.0
    backward = Backward()
    run_engine(backward, [(x * y).sum()], [], [anchor], False)
    [(_, (to_x, to_y))] = backward.sent
    assert to_x.tolist() == [10, 2] and to_y.tolist() == [0, 2]


@pytest.mark.parametrize("num_messages", [2, 5])
def test_turns_come_last_and_newest_first(anchor, num_messages):
    """Every receive function runs before the first turn, whatever thread its graph was made in."""
    x = torch.ones(2, requires_grad=True)
    messages = []
    roots = []

    def build(number):
        y = (x * number).exp().log()
        messages.append(sent(number, 2 * number, y))
        _, (z,) = received(100 + number, 2 * number + 1, anchor, torch.ones(2))
        roots.append((z.sin().cos() + y).sum())

    for number in range(num_messages):
        # the first nodes of a thread have the lowest priority
        thread = threading.Thread(target=build, args=(number,))
        thread.start()
        thread.join()
    log = []
    backward = Backward(**{f"m{number}": [torch.ones(2)] for number in range(num_messages)})
    backward.await_turn = lambda message: log.append(message.message)
    backward.send = lambda note, gradients: log.append(note.message)
    walk = Walk()
    walk.go(start_of(root) for root in roots)
    for message in messages:
        walk.go(behind(message.outputs[0]))
    sends = [(message, [message.outputs[0]]) for message in messages]
    run_engine(backward, roots, sends, [x, anchor], False)
    assert set(log[:num_messages]) == {100 + number for number in range(num_messages)}
    assert log[num_messages:] == [*reversed(range(num_messages))]
    torch.testing.assert_close(x.grad, torch.full((2,), 2.0 * sum(range(num_messages))))


def test_the_walk_ends_at_receive_functions_and_leaves_and_visits_once(anchor):
    a = torch.ones(2, requires_grad=True)
    b = torch.ones(2, requires_grad=True)
    note, (x, y) = received(3, 0, anchor, torch.ones(2), torch.ones(2))
    z = a * x
    for _ in range(50):
        z = z + z  # 2^50 paths
    walk = Walk()
    assert walk.go([start_of(z)]) == [(note, 0)]
    assert [leaf.variable is a for leaf in walk.leaves] == [True]
    num_visited = len(walk.visited)
    assert walk.go([start_of(z)]) == [] and len(walk.visited) == num_visited == 53
    assert walk.go([start_of(y * z * b)]) == [(note, 1)]
    assert walk.received == {note: {0, 1}} and len(walk.leaves) == 2


def test_a_local_pass_is_told_what_to_do(anchor):
    _, (x,) = received(3, 0, anchor, torch.ones(2))
    with pytest.raises(RuntimeError, match=r"autograd\.backward"):
        x.sum().backward()


def test_an_error_in_a_turn_ends_the_pass(anchor):
    x = torch.ones(2, requires_grad=True)
    message = sent(7, 0, x * 2)
    backward = Backward(m7=[torch.ones(2)])

    def fail(message):
        raise KeyError("gone")

    backward.await_turn = fail
    with pytest.raises(KeyError, match="gone"):
        run_engine(backward, [], [(message, [message.outputs[0]])], [x], False)


def test_the_walk_raises_what_has_the_priority_of_turns():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.grad_fn._set_sequence_nr(0)  # as the first node that a thread makes has
    z = y * 2
    before = z.grad_fn._sequence_nr()
    Walk().go([start_of(z)])
    assert y.grad_fn._sequence_nr() > 0 and z.grad_fn._sequence_nr() == before
