"""Memory of a step, beside what torch's profiler says of one."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pibroch.models import build_model
from pibroch.models.activations import activation_bytes

SAMPLES = 2048
FEATURES = 26
NUM_DENSE = 13
DIM = 16


def peak_of_step(model):
    """Bytes of tensors of a step at their most, gradients of parameters left out."""

    def step():
        embedded = torch.randn(SAMPLES, FEATURES, model.table_dim(DIM)).requires_grad_()
        model(torch.rand(SAMPLES, NUM_DENSE), embedded).sum().backward()

    step()  # gradients of parameters are there
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    now = 0
    most = 0
    for _, num_bytes in changes:
        now += num_bytes
        most = max(most, now)
    return most


@pytest.mark.parametrize("name", ["dlrm", "dcnv2", "deepfm", "finalmlp", "masknet"])
def test_a_step_takes_what_was_found(name):
    model = build_model(name, NUM_DENSE, FEATURES, dim=DIM)
    measured = peak_of_step(model)
    assert activation_bytes(model) * SAMPLES == pytest.approx(measured, rel=0.1)
