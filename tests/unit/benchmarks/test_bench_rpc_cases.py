"""Programs over remote calls.

Losses of both libraries agree, and one of them is computed anew without any.
"""

from dataclasses import replace

import pytest
import torch
from benchmarks.agreement import compare
from benchmarks.load import ForeignLoad
from benchmarks.rpc_pairs import pairs
from benchmarks.runner import measure
from benchmarks.topics import rpc_cases as topic
from benchmarks.workers.rpc_case_pipeline import LEARNING_RATE, Stage, sequences
from benchmarks.workers.rpc_case_sizes import QUICK, VARIABLE, as_text, sizes
from torch import nn

SMALL = replace(QUICK, workers=2)


def test_the_environment_makes_cases_larger(monkeypatch):
    monkeypatch.setenv(VARIABLE, "workers=5,width=128")
    assert (sizes(True).workers, sizes(False).width, sizes(True).rows) == (5, 128, QUICK.rows)
    monkeypatch.setenv(VARIABLE, as_text(QUICK))
    assert sizes(False) == QUICK
    monkeypatch.setenv(VARIABLE, "breadth=2")
    with pytest.raises(ValueError, match="breadth"):
        sizes(False)


def test_both_libraries_train_alike_and_as_without_calls():
    with pairs(topic.specs(SMALL), None, ForeignLoad(), SMALL.workers + 1) as running:
        for group in running:
            group.setup(topic.NO_BATCHES)
        values = {group.spec.label: group.check(2) for group in running}
        rows = topic.rows_of("federated", measure(running, "federated", topic.QUICK))
    assert set(compare(values).largest) == {f"loss {phase}" for phase in topic.PHASES}
    assert values[topic.TORCH]["loss pipeline"] == pytest.approx(pipeline_losses(2), rel=1e-5)
    assert [row["contender"] for row in rows] == [topic.OURS, topic.TORCH]
    assert rows[0]["over_pibroch"] == 1 and set(topic.COLUMNS) <= set(rows[0])


def pipeline_losses(steps):
    """Of the transformer in one process, batches whole."""
    stages = [Stage(place, SMALL) for place in range(SMALL.workers)]
    parameters = [each for stage in stages for each in stage.parameters()]
    losses = []
    for step in range(steps):
        tokens_BL = sequences(step, SMALL)
        x = tokens_BL[:, :-1]
        for stage in stages:
            x = stage.layer_by_layer(x)
        loss = nn.functional.cross_entropy(x.flatten(0, 1), tokens_BL[:, 1:].flatten())
        losses.append(loss.item())
        with torch.no_grad():
            for parameter, gradient in zip(
                parameters, torch.autograd.grad(loss, parameters), strict=True
            ):
                parameter -= LEARNING_RATE * gradient
    return losses
