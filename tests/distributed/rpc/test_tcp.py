"""Workers that share no memory, as if they were on different hosts.

Several TCP streams on loopback.
"""

import pytest
import torch
from rpc_team import Team

from pibroch import rpc

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def tcp_pair():
    pair = Team(2, shared_memory=False, num_streams=3)
    yield pair
    pair.close()


def identity(value):
    return value


def call_sizes():
    generator = torch.Generator().manual_seed(1)
    for size in (0, 1, 255, 5000, 100_000, 262_144, 3_000_001):
        sent = torch.randn(size, generator=generator)
        assert torch.equal(rpc.rpc_sync("worker1", identity, (sent,)), sent)
    return True


def call_at_once():
    """Large and small calls under way together; each must get its own answer."""
    generator = torch.Generator().manual_seed(2)
    sent = [torch.randn((3, 500_000) if i % 3 else (7,), generator=generator) for i in range(30)]
    futures = [
        rpc.rpc_async("worker1", identity, ([tensor, i, tensor.to(torch.float64)],))
        for i, tensor in enumerate(sent)
    ]
    for i, (future, tensor) in enumerate(zip(futures, sent, strict=True)):
        first, number, second = future.wait()
        assert number == i
        assert torch.equal(first, tensor) and torch.equal(second, tensor.to(torch.float64))
    return True


def test_tensors_of_all_sizes_come_back(tcp_pair):
    assert tcp_pair.run(0, call_sizes)


def test_chunks_of_many_transfers_find_their_messages(tcp_pair):
    assert tcp_pair.run(0, call_at_once)
