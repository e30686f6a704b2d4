"""Each latency policy alone can be switched off, and calls give the same results without it."""

import pytest
import torch
from benchmarks.latency_policies import SWITCHED_OFF

from pibroch import rpc
from pibroch.rpc.calls.agent import current_agent


@pytest.mark.parametrize("name", SWITCHED_OFF)
def test_a_worker_without_one_works(name, monkeypatch, tmp_path):
    target, attribute, off = SWITCHED_OFF[name]
    assert getattr(target, attribute), "on, unless the benchmark switches it off"
    monkeypatch.setattr(target, attribute, off)
    options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/meet", rpc_timeout=30)
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    try:
        results = [rpc.rpc_sync("me", torch.add, (torch.ones(3), each)) for each in range(20)]
        spin_s = current_agent().reactor.spin_s
    finally:
        rpc.shutdown()
    assert all(torch.equal(result, torch.ones(3) + each) for each, result in enumerate(results))
    assert name != "spin" or spin_s == 0.0
