"""Dropout by counter as a module."""

import copy

import pytest
import torch

from pibroch.errors import ConfigError
from pibroch.models import MODELS, Dropout, build_model, set_place


def masks(
    model: torch.nn.Module, x: torch.Tensor, seed: int, step: int, first_sample: int
) -> torch.Tensor:
    set_place(model, seed, step, first_sample)
    return model(x)


def test_the_place_decides_the_mask() -> None:
    model = Dropout(0.5)
    x = torch.ones(7, 40)
    first = masks(model, x, 1, 5, 0)
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(masks(model, x, 1, 5, 0), first)
    assert torch.equal(model(x), first)
    assert torch.equal(masks(model, x[3:], 1, 5, 3), first[3:])
    for other in ((2, 5, 0), (1, 6, 0), (1, 5, 1)):
        assert not torch.equal(masks(model, x, *other), first)


def test_layers_differ() -> None:
    model = torch.nn.ModuleList([Dropout(0.5), Dropout(0.5)])
    set_place(model, 1, 1)
    x = torch.ones(7, 40)
    assert not torch.equal(model[0](x), model[1](x))


def test_without_a_place_torch_seeds_it() -> None:
    model = Dropout(0.5)
    x = torch.ones(7, 40)
    torch.manual_seed(4)
    first = model(x)
    second = model(x)
    assert not torch.equal(first, second)
    torch.manual_seed(4)
    assert torch.equal(model(x), first)


@pytest.mark.parametrize("shape", [(0, 3), (6, 5, 4), (6,), (3000, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gradient_goes_through_the_same_mask(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    model = Dropout(0.25)
    set_place(model, 1, 2, 3)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    out = model(x)
    assert out.dtype == dtype
    out.backward(torch.ones_like(out))
    assert x.grad is not None
    assert torch.equal(x.grad, model(torch.ones(shape, dtype=dtype)))
    torch.testing.assert_close(out, x * x.grad)


def test_threads_change_no_bit() -> None:
    model = Dropout(0.25)
    x = torch.randn(3000, 400)
    set_place(model, 1, 2, 3)
    one = model(x)
    torch.set_num_threads(2)
    assert torch.equal(model(x), one)


def test_strided_input_and_second_derivatives() -> None:
    model = Dropout(0.5)
    set_place(model, 1, 2, 3)
    x = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model, x)
    assert torch.autograd.gradgradcheck(model, x)
    strided = torch.randn(12, 5).T
    torch.testing.assert_close(model(strided), model(strided.contiguous()))


def test_evaluation_and_zero_pass_through() -> None:
    x = torch.randn(3, 4)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x


def test_copies_go_their_own_way() -> None:
    model = Dropout(0.5)
    x = torch.ones(7, 40)
    first = masks(model, x, 1, 5, 0)
    other = copy.deepcopy(model)
    set_place(other, 1, 6, 0)
    assert torch.equal(model(x), first)
    assert not model.state_dict()


@pytest.mark.parametrize("p", [-0.1, 1.0])
def test_bad_probabilities_are_named(p: float) -> None:
    with pytest.raises(ConfigError, match=str(p)):
        Dropout(p)


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.pools])
def test_a_model_gives_a_sample_its_logit_in_any_part_of_the_batch(name: str) -> None:
    model = build_model(
        name, 4, 5, dim=3, bottom=(8,), top=(9, 7), dropout=0.3, embedding_dropout=0.2
    )
    dense = torch.randn(10, 4)
    embedded = torch.randn(10, 5, model.table_dim(3))
    set_place(model, 1, 2, 0)
    whole = model(dense, embedded)
    parts = []
    for begin, end in ((0, 4), (4, 4), (4, 10)):
        set_place(model, 1, 2, begin)
        parts.append(model(dense[begin:end], embedded[begin:end]))
    torch.testing.assert_close(torch.cat(parts), whole)
