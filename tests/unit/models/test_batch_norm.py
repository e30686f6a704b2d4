"""Batch norm in one process, and its formulas over ranks against torch's.

Those are for a world of one.
"""

from typing import Any

import pytest
import torch
from torch import nn

from pibroch.errors import DataError
from pibroch.models import BatchNorm


def pair(**options: Any) -> tuple[BatchNorm, nn.BatchNorm1d]:
    torch.manual_seed(0)
    norm = BatchNorm(5, **options)
    reference = nn.BatchNorm1d(5, **options)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    reference.load_state_dict(norm.state_dict())
    return norm, reference


def run(norm: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = norm(x)
    out.backward(grad)
    assert x.grad is not None
    return [
        out.detach(),
        x.grad,
        *(parameter.grad for parameter in norm.parameters()),
        *norm.buffers(),
    ]


def test_one_process_gets_the_bits_of_torch() -> None:
    norm, reference = pair()
    for _ in range(2):
        x = torch.randn(7, 5)
        grad = torch.randn(7, 5)
        assert all(
            torch.equal(a, b)
            for a, b in zip(run(norm, x, grad), run(reference, x, grad), strict=True)
        )
    assert torch.equal(norm.eval()(x), reference.eval()(x))


@pytest.mark.parametrize("batch", [0, 1])
def test_a_batch_without_variance_passes_by(batch: int) -> None:
    norm, reference = pair()
    x = torch.randn(batch, 5)
    for gather in (None, lambda vector: vector[None]):
        norm.gather = gather
        assert torch.equal(norm(x), reference.eval()(x))
        assert int(norm.num_batches_tracked or 0) == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"affine": False},
        {"momentum": None},
        {"track_running_stats": False},
        {"eps": 0.5, "momentum": 0.4},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formulas_over_ranks_are_those_of_torch(
    options: dict[str, object], dtype: torch.dtype
) -> None:
    norm, reference = pair(**options)
    norm.gather = lambda vector: vector[None]
    for _ in range(3):
        x = torch.randn(8, 5, dtype=dtype) * 3 + 1
        grad = torch.randn(8, 5, dtype=dtype)
        rounding = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        for got, want in zip(run(norm, x, grad), run(reference, x, grad), strict=True):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, rtol=rounding, atol=rounding)


def test_three_dimensions_are_refused_over_ranks() -> None:
    norm, _ = pair()
    norm.gather = lambda vector: vector[None]
    with pytest.raises(DataError, match=r"\[B, C\]"):
        norm(torch.randn(2, 5, 3))
