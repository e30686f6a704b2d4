"""Each latency policy alone can be switched off, and calls give the same results without it."""

import dataclasses

import pytest
import torch

from pibroch import rpc
from pibroch.rpc.calls.agent import current_agent
from pibroch.rpc.policies import POLICIES, LatencyPolicies

NAMES = [field.name for field in dataclasses.fields(LatencyPolicies)]


def test_all_are_on():
    assert dataclasses.asdict(POLICIES) == dict.fromkeys(NAMES, True)


@pytest.mark.parametrize("name", NAMES)
def test_a_worker_without_one_works(name, monkeypatch, tmp_path):
    monkeypatch.setattr(POLICIES, name, False)
    options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/meet", rpc_timeout=30)
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    try:
        results = [rpc.rpc_sync("me", torch.add, (torch.ones(3), each)) for each in range(20)]
        spin_s = current_agent().reactor.spin_s
    finally:
        rpc.shutdown()
    assert all(torch.equal(result, torch.ones(3) + each) for each, result in enumerate(results))
    assert name != "spin" or spin_s == 0.0
