"""The linear layer against torch's, values and gradients."""

import pytest
import torch
from torch import nn

from pibroch.models.linear import FEW_SAMPLES, Linear
from pibroch.models.mlp import MLP, HiddenOptions

SHAPES = [(1, 1, 1), (7, 3, 5), (64, 13, 512), (33, 512, 16), (20, 367, 96), (5, 256, 1), (0, 4, 3)]


def layer_and_reference(inputs: int, outputs: int, bias: bool = True) -> tuple[Linear, nn.Linear]:
    torch.manual_seed(0)
    layer = Linear(inputs, outputs, bias=bias)
    reference = nn.Linear(inputs, outputs, bias=bias)
    reference.load_state_dict(layer.state_dict())
    return layer, reference


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_torch(
    shape: tuple[int, int, int], bias: bool, relu: bool
) -> None:
    layer, reference = layer_and_reference(*shape[1:], bias=bias)
    x = torch.randn(shape[:2], requires_grad=True)
    out = layer(x, relu=relu)
    want = reference(x)
    want = want.relu() if relu else want
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(want)
    got = torch.autograd.grad(out, [x, *layer.parameters()], grad)
    torch.testing.assert_close(
        got, torch.autograd.grad(want, [x, *reference.parameters()], grad), rtol=1e-4, atol=1e-4
    )


def test_strided_input_and_broadcast_gradient() -> None:
    layer, reference = layer_and_reference(6, 4)
    x = torch.randn(9, 12)[:, ::2].requires_grad_()
    layer(x, relu=True).sum().backward()
    reference(x).relu().sum().backward()
    for got, want in zip(layer.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_frozen_parameters_get_no_gradient() -> None:
    layer, _ = layer_and_reference(6, 4)
    layer.weight.requires_grad_(False)
    layer(torch.randn(3, 6)).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_run_as_in_torch(dtype: torch.dtype) -> None:
    layer, reference = layer_and_reference(6, 4)
    x = torch.randn(3, 6, dtype=dtype)
    assert torch.equal(layer.to(dtype)(x, relu=True), reference.to(dtype)(x).relu())


def test_autocast_and_three_dimensions() -> None:
    layer, reference = layer_and_reference(6, 4)
    x = torch.randn(2, 3, 6)
    assert torch.equal(layer(x), reference(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x[0]).dtype == torch.bfloat16


def test_same_input_same_bits() -> None:
    layer, _ = layer_and_reference(40, 30)
    x = torch.randn(50, 40)
    runs = [
        torch.autograd.grad(layer(x, relu=True).square().sum(), list(layer.parameters()))
        for _ in range(3)
    ]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_not_a_number_is_seen() -> None:
    layer, _ = layer_and_reference(4, 3)
    x = torch.randn(5, 4)
    x[2, 1] = torch.nan
    out = layer(x, relu=True)
    assert out[2].isnan().all()
    assert out[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("last_is_hidden", [False, True])
def test_mlp_is_its_layers(last_is_hidden: bool) -> None:
    torch.manual_seed(0)
    mlp = MLP((5, 7, 6, 2), HiddenOptions(activation="relu"), last_is_hidden)
    x = torch.randn(8, 5)
    want = x
    for i, layer in enumerate(mlp.layers):
        assert isinstance(layer, nn.Linear)
        want = nn.functional.linear(want, layer.weight, layer.bias)
        want = want.relu() if last_is_hidden or i < 2 else want
    torch.testing.assert_close(mlp(x), want)


def test_mlp_of_one_width_is_the_identity() -> None:
    x = torch.randn(3, 5)
    assert MLP((5,), last_is_hidden=True)(x) is x


def test_few_samples_of_a_model_that_serves_go_through_mkl():
    """The numbers agree within rounding, whatever the way.

    NaN passes, and while gradients are computed nothing changes.
    """
    layer = Linear(9, 5)
    for size in (1, FEW_SAMPLES, FEW_SAMPLES + 1):
        x = torch.randn(size, 9)
        with torch.inference_mode():
            layer.few_samples = 0
            expected = [layer(x), layer(x, relu=True)]
            layer.few_samples = FEW_SAMPLES
            outputs = [layer(x), layer(x, relu=True)]
        for one, other in zip(outputs, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
        assert (
            torch.equal(outputs[0], torch.nn.functional.linear(x, layer.weight, layer.bias))
        ) or size > FEW_SAMPLES
    with torch.inference_mode():
        assert layer(torch.full((1, 9), torch.nan), relu=True).isnan().all()
