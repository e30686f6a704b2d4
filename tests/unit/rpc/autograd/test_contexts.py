import threading

import pytest
import torch

from pibroch.rpc.autograd.contexts import Contexts


def test_a_closed_context_is_not_opened_again_by_a_late_message():
    contexts = Contexts()
    context = contexts.open(5, (0, 1))
    assert contexts.open(5, (0, 1)) is context is contexts.get(5)
    assert contexts.close(5) is context and contexts.close(5) is None
    assert contexts.open(5, (0, 1)) is None and contexts.all() == []
    with pytest.raises(RuntimeError, match="not open on this worker"):
        contexts.get(5)


def test_closed_ids_are_remembered_within_bounds():
    contexts = Contexts()
    for context_id in range(10_000):
        contexts.close(context_id)
    assert contexts.open(9_999, (0, 1)) is None
    assert contexts.open(0, (0, 1)) is not None


def test_each_thread_has_its_own_current_context():
    contexts = Contexts()
    seen = []
    with contexts.entered(1):
        thread = threading.Thread(target=lambda: seen.append(contexts.current()))
        thread.start()
        thread.join()
        with contexts.entered(2):
            assert contexts.current() == 2
        assert contexts.current() == 1
    assert contexts.current() is None and seen == [None]


def test_sums_leave_earlier_ones_as_they_were():
    context = Contexts().open(5, (0, 1))
    leaf = torch.ones(2, requires_grad=True)
    context.accumulate({leaf: torch.ones(2)})
    first = context.gradients()[leaf]
    context.accumulate({leaf: torch.ones(2)})
    assert first.tolist() == [1, 1] and context.gradients()[leaf].tolist() == [2, 2]
