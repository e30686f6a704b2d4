import pytest
import torch

from pibroch import rpc

pytestmark = pytest.mark.timeout(120)


def identity(value):
    return value


def call(to, value):
    return rpc.rpc_sync(to, identity, (value,))


def call_sizes():
    for size in (0, 1, 255, 5000, 100_000, 3_000_000):
        sent = torch.arange(size, dtype=torch.float32)
        assert torch.equal(rpc.rpc_sync("worker1", identity, (sent,)), sent)
    return True


def test_a_value_comes_back(workers):
    assert workers(2).run(0, call, "worker1", [1, (2, "three"), {"four": 5.0}, None]) == [
        1,
        (2, "three"),
        {"four": 5.0},
        None,
    ]


def test_tensors_of_all_sizes_come_back(workers):
    assert workers(2).run(0, call_sizes)


def is_returned(*, keep):
    """Whether a large argument that comes back lies where it was sent from.

    Not in memory of the callee's.
    """
    from pibroch.rpc.transport.segments import OwnSegment, borrowed_bytes_of

    sent = torch.rand(100_000)
    received = rpc.rpc_sync("worker1", keep_or_not, (sent, keep))
    assert torch.equal(received, sent)
    return isinstance(borrowed_bytes_of(received).segment, OwnSegment)


_kept: list = []


def keep_or_not(tensor, keep):
    if keep:
        _kept.append(tensor)
    return tensor


def test_an_argument_that_nobody_keeps_goes_back_without_a_copy(workers):
    for _ in range(20):  # on a thread of the pool, then on the network thread
        assert workers(2).run(0, is_returned, keep=False)
    assert not workers(2).run(0, is_returned, keep=True)
