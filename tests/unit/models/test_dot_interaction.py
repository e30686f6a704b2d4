"""The interaction as a differentiable function, against torch's own operations."""

import pytest
import torch

from pibroch.models.interaction import dot_interaction, torch_interaction


def random_inputs(
    batch: int, num_features: int, dim: int, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (batch, dim), (batch, num_features, dim)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("shape", [(0, 2, 3), (1, 1, 1), (7, 26, 16), (300, 5, 10), (3, 40, 64)])
def test_values_and_gradients_are_those_of_torch(shape: tuple[int, int, int]) -> None:
    inputs = random_inputs(*shape)
    out = dot_interaction(*inputs)
    want = torch_interaction(*inputs)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(want)
    torch.testing.assert_close(
        torch.autograd.grad(out, inputs, grad),
        torch.autograd.grad(want, inputs, grad),
        rtol=1e-5,
        atol=1e-4,
    )


def test_strided_inputs_and_gradients() -> None:
    bottom, embedded = random_inputs(6, 4, 8)
    table = torch.randn(6, 4, 9)
    out = dot_interaction(bottom[:, :3], table[:, :, 1:4])
    torch.testing.assert_close(out, torch_interaction(bottom[:, :3], table[:, :, 1:4]))
    dot_interaction(
        bottom, embedded
    ).sum().backward()  # the gradient of a sum is an expanded scalar
    want = torch.autograd.grad(torch_interaction(bottom, embedded).sum(), [bottom, embedded])
    torch.testing.assert_close([bottom.grad, embedded.grad], list(want))


def test_float64_passes_gradcheck() -> None:
    assert torch.autograd.gradcheck(dot_interaction, random_inputs(2, 3, 4, torch.float64))


def test_bfloat16_is_computed_in_float32() -> None:
    bottom, embedded = random_inputs(4, 3, 8)
    half = bottom.bfloat16()
    torch.testing.assert_close(
        dot_interaction(half, embedded), torch_interaction(half.float(), embedded)
    )
    dot_interaction(half, embedded).sum().backward()
    assert bottom.grad is not None
    assert bottom.grad.dtype == torch.float32


def test_second_derivatives_are_refused_not_wrong() -> None:
    bottom, embedded = random_inputs(2, 3, 4)
    (grad,) = torch.autograd.grad(
        dot_interaction(bottom, embedded).square().sum(), bottom, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
