"""Layer norm against torch's, and the same bits with any number of threads."""

import pytest
import torch
from torch import nn

from pibroch.models.layer_norm import LayerNorm

SHAPES = [(64,), (39, 16), (5,)]


def run(norm: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    norm.zero_grad()
    x = x.clone().requires_grad_()
    out = norm(x)
    out.backward(grad)
    assert x.grad is not None
    return [
        out.detach(),
        x.grad,
        *(p.grad.clone() for p in norm.parameters() if p.grad is not None),
    ]


def random_norm(*shape: int) -> LayerNorm:
    torch.manual_seed(0)
    norm = LayerNorm(*shape)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


@pytest.mark.parametrize("batch", [0, 1, 7])
def test_values_and_gradients_are_those_of_torch(batch: int) -> None:
    norm = random_norm(5)
    reference = nn.LayerNorm(5)
    reference.load_state_dict(norm.state_dict())
    x = torch.randn(batch, 5)
    grad = torch.randn(batch, 5)
    torch.testing.assert_close(run(norm, x, grad), run(reference, x, grad))


def test_each_vector_has_its_own_weights() -> None:
    norm = random_norm(3, 4)
    x = torch.randn(6, 3, 4)
    for field in range(3):
        want = nn.functional.layer_norm(x[:, field], (4,), norm.weight[field], norm.bias[field])
        torch.testing.assert_close(norm(x)[:, field], want)


@pytest.mark.parametrize("shape", SHAPES)
def test_threads_change_no_bit(shape: tuple[int, ...]) -> None:
    norm = random_norm(*shape)
    x = torch.randn(3000, *shape)
    grad = torch.randn(3000, *shape)
    one = run(norm, x, grad)
    torch.set_num_threads(2)
    assert all(torch.equal(a, b) for a, b in zip(run(norm, x, grad), one, strict=True))
