"""A dense model on another device: batches from there, embeddings there, gradients back.

Rows in host memory.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pibroch as pb
from pibroch.errors import ConfigError

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TABLES = [
    pb.Table("a", 9, 4, features=("x",)),
    pb.Table("b", 9, 8),
    pb.Table("s", 9, 4, pooling="none"),
]


def keyed(device, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3 * 5,), generator=generator)
    values = torch.randint(0, 9, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(values), generator=generator).to(device)
    return SimpleNamespace(
        keys=lambda: ["x", "b", "s"],
        values=lambda: values.to(device),
        lengths=lambda: lengths.to(device),
        stride=lambda: 5,
        weights_or_none=lambda: weights,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("learns", [False, True])
def test_the_same_steps_as_on_the_host(device, learns):
    host = pb.Embeddings(TABLES, pb.Adagrad(lr=0.1), seed=1)
    there = pb.Embeddings(TABLES, pb.Adagrad(lr=0.1), seed=1, device=device)
    for step in range(3):
        ends = []
        for embeddings, where in ((host, "cpu"), (there, device)):
            batch = keyed(where, step)
            weights = batch.weights_or_none().requires_grad_(learns)
            out = embeddings(batch)
            assert all(out[name].device.type == where for name in ("x", "b"))
            padded = out["s"].padded(4)
            assert padded.device.type == where and out["s"].mask(4).device.type == where
            ((out.cat() ** 2).sum() + (padded**2).sum()).backward()
            ends.append(
                [
                    out.cat().detach().cpu(),
                    padded.detach().cpu(),
                    *([weights.grad.cpu()] if learns else []),
                ]
            )
        for right, result in zip(*ends, strict=True):
            torch.testing.assert_close(result, right)
    for right, result in zip(host.pieces(), there.pieces(), strict=True):
        np.testing.assert_allclose(result.weights, right.weights, rtol=1e-6)
    with torch.no_grad():
        assert there(keyed(device, 9))["x"].device.type == device


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="device xpu"):
        pb.Embeddings(TABLES, pb.SGD(lr=0.1), device="xpu")
