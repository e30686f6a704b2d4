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
