"""Listed functions called by name.

What would become large or slow is refused before, and the everyday calls work.
"""

import time

import numpy as np
import pytest
import torch

from pibroch.errors import NotAllowedError
from pibroch.rpc.values.callables import Callables
from pibroch.rpc.values.known_callables import checked_callables

CALLABLES = Callables(())
ONE = torch.ones(1)
ROW = torch.ones(1, 1 << 20)
COLUMN = torch.ones(1 << 20, 1)
LARGE = 1 << 40


def call(name, *args, **kwargs):
    return CALLABLES.to_call(name)(*args, **kwargs)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("builtins:pow", (7, 10**8)),
        ("builtins:pow", (1 << 5000, 1 << 5000, 1 << 5000)),
        ("operator:pow", (7, 10**8)),
        ("operator:lshift", (1, 10**12)),
        ("operator:mul", ("a", LARGE)),
        ("operator:mul", (LARGE, [1])),
        ("operator:mul", (np.int64(LARGE), (1,))),
        ("operator:mul", (np.ones((1 << 17, 1)), np.ones((1, 1 << 17)))),
        ("operator:mod", ("%1000000000000d", 1)),
        ("operator:contains", (range(LARGE), 1.5)),
        ("operator:countOf", (range(LARGE), 1)),
        ("operator:indexOf", (range(LARGE), -1)),
        ("operator:getitem", (ONE, range(LARGE))),
        ("operator:getitem", (np.ones(3), range(LARGE))),
        ("builtins:sum", (range(LARGE),)),
        ("builtins:sum", ([[1]] * 3, [])),
        ("builtins:list", (range(LARGE),)),
        ("builtins:list", (ONE.expand(1 << 30),)),
        ("builtins:sorted", (range(LARGE),)),
        ("builtins:max", (range(LARGE),)),
        ("builtins:set", (range(LARGE),)),
        ("builtins:dict", (range(LARGE),)),
        ("builtins:bytes", (LARGE,)),
        ("builtins:bytes", (torch.tensor([LARGE]),)),
        ("builtins:round", (5, torch.tensor(-(10**9)))),
        ("operator:mul", ([1], torch.tensor(LARGE))),
        ("builtins:bytes", ("x", "punycode")),
        ("builtins:str", (b"x", "idna")),
        ("builtins:int", ("1" * 10**6, 16)),
        ("builtins:round", (5, -(10**9))),
        ("torch:ones", (1 << 20, 1 << 20)),
        ("torch:zeros", ([1] * 1000,)),
        ("torch:empty", ((LARGE,),)),
        ("torch:Tensor", (LARGE,)),
        ("torch:Size", (range(LARGE),)),
        ("torch:tensor", (range(LARGE),)),
        ("torch:tensor", ([range(LARGE)],)),
        ("torch:tensor", ([ONE.expand(1 << 30)],)),
        ("torch:arange", (LARGE,)),
        ("torch:linspace", (0, 1, LARGE)),
        ("torch:eye", (1 << 20,)),
        ("torch:randperm", (LARGE,)),
        ("torch:hann_window", (LARGE,)),
        ("torch:add", (ROW, COLUMN)),
        ("torch:outer", (ROW[0], ROW[0])),
        ("torch:cartesian_prod", (ROW[0], ROW[0])),
        ("torch:einsum", ("ij,kl->ijkl", ROW, ROW)),
        ("torch:combinations", (ROW[0], 3)),
        ("torch:diag", (ROW[0],)),
        ("torch:tile", (ONE, (LARGE,))),
        ("torch:repeat_interleave", (ONE, LARGE)),
        ("torch:repeat_interleave", (torch.tensor([LARGE]),)),
        ("torch:bincount", (torch.tensor([LARGE]),)),
        ("torch.nn.functional:one_hot", (torch.tensor([LARGE]),)),
        ("torch.nn.functional:pad", (ONE, (0, LARGE))),
        ("torch.nn.functional:interpolate", (torch.ones(1, 1, 1), LARGE)),
        ("torch.nn.functional:conv1d", (torch.ones(1, 1, 3), torch.ones(1, 1, 1), None, 1, LARGE)),
        ("torch.fft:fft", (ONE, LARGE)),
        ("torch.nn:Linear", (1 << 20, 1 << 20)),
        ("torch.nn:LSTM", (1, 1, 10**9)),
        ("torch.nn:MaxPool1d", (1 << 40,)),
        ("torch:max_pool1d", (torch.ones(3, 2), 1 << 62, 1, 1)),
        ("torch.nn.functional:avg_pool2d", (torch.ones(1, 2, 2), [1 << 40, 1])),
        ("torch:matrix_power", (torch.ones(2, 2), -(2**63))),
        ("torch.linalg:eigvals", (torch.full((4, 4), float("nan")),)),
        ("torch.optim.lr_scheduler:MultiStepLR", (None, range(LARGE))),
        ("torch.nn:Embedding", (LARGE, 100)),
        ("torch.nn:ConvTranspose3d", (1000, 1000, 1000)),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 50 else "",
)
def test_what_would_become_large_or_slow_is_refused_before(name, args):
    began = time.process_time()
    with pytest.raises((NotAllowedError, RuntimeError)):
        call(name, *args)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("torch:zeros", (2,), {"device": "meta"}),
        ("torch:zeros", (2,), {"out": ONE}),
        ("torch:Tensor.to", (ONE, "meta"), {}),
        ("torch:device", ("meta",), {}),
        ("builtins:sorted", ([1],), {"key": len}),
        ("torch.optim:Adam", ([ONE],), {"fused": True}),
    ],
)
def test_ways_around_the_checks_are_refused(name, args, kwargs):
    with pytest.raises(NotAllowedError):
        call(name, *args, **kwargs)


def test_an_address_is_no_tensor():
    with pytest.raises(TypeError):
        call("torch:Tensor", cdata=123456)


def test_empty_tensors_are_zeros():
    assert call("torch:empty", 1000).count_nonzero() == 0
    assert call("torch:empty_like", torch.ones(1000)).count_nonzero() == 0
    assert call("torch:Tensor", 10, 10).shape == (10, 10)


@pytest.mark.parametrize(
    ("name", "args", "result"),
    [
        ("torch:add", (torch.ones(2), 1), torch.full((2,), 2.0)),
        ("torch:ones", (2, 3), torch.ones(2, 3)),
        ("torch:zeros", ((2, 3),), torch.zeros(2, 3)),
        ("torch:arange", (3,), torch.arange(3)),
        ("torch:tensor", ([1, 2],), torch.tensor([1, 2])),
        ("torch:Tensor", ([1, 2],), torch.tensor([1.0, 2.0])),
        ("torch:cat", ([ONE, ONE],), torch.ones(2)),
        ("torch:matmul", (torch.ones(2, 3), torch.ones(3, 1)), torch.full((2, 1), 3.0)),
        ("torch:chunk", (torch.ones(1 << 20), 2), (torch.ones(1 << 19), torch.ones(1 << 19))),
        ("torch:split", (torch.ones(4), 2), (torch.ones(2), torch.ones(2))),
        ("torch:Tensor.view", (torch.ones(4), 2, 2), torch.ones(2, 2)),
        ("torch:Tensor.expand", (ONE, 3), torch.ones(3)),
        ("torch:Tensor.repeat", (ONE, 3), torch.ones(3)),
        ("torch:Tensor.to", (ONE, torch.float64), torch.ones(1, dtype=torch.float64)),
        (
            "torch:Tensor.__getitem__",
            (torch.arange(9).view(3, 3), (0, torch.tensor([1, 2]))),
            torch.tensor([1, 2]),
        ),
        ("torch.nn.functional:one_hot", (torch.tensor([1]), 3), torch.tensor([[0, 1, 0]])),
        (
            "torch.nn.functional:embedding_bag",
            (torch.tensor([0, 1]), torch.ones(2, 3), torch.tensor([0])),
            torch.ones(1, 3),
        ),
        (
            "torch:repeat_interleave",
            (torch.tensor([1, 2]), torch.tensor([1, 2])),
            torch.tensor([1, 2, 2]),
        ),
        ("torch.fft:fft", (ONE,), torch.ones(1, dtype=torch.complex64)),
        ("builtins:pow", (2, 10), 1024),
        ("builtins:pow", (2, 10, 7), 2),
        ("builtins:sum", ([1, 2],), 3),
        ("builtins:sum", ([ONE, ONE],), torch.full((1,), 2.0)),
        ("builtins:sorted", ([2, 1],), [1, 2]),
        ("builtins:dict", ([(1, 2)],), {1: 2}),
        ("builtins:list", (range(3),), [0, 1, 2]),
        ("builtins:str", (b"a", "utf-8"), "a"),
        ("builtins:round", (1.26, 1), 1.3),
        ("operator:mul", ([1], 2), [1, 1]),
        ("operator:mul", (ONE, 2), torch.full((1,), 2.0)),
        ("operator:mod", (7, 4), 3),
        ("operator:getitem", ([5, 6], 1), 6),
        ("operator:contains", (range(1 << 40), 5), True),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_everyday_calls_work(name, args, result):
    found = call(name, *args)
    assert (
        found == result
        if isinstance(result, str)
        else torch.testing.assert_close(found, result) is None
    )


def test_a_division_that_ends_the_process_is_refused():
    smallest = torch.tensor([-(2**63)])
    for name in ("torch:div", "torch:divide", "torch:Tensor.div", "torch:Tensor.div_"):
        for divisor in (-1, torch.tensor([3, -1])):
            with pytest.raises(NotAllowedError):
                call(name, smallest, divisor, rounding_mode="trunc")
        assert call(name, torch.tensor([7]), -1, rounding_mode="trunc") == -7
    assert call("torch:div", smallest, -1) == 2.0**63


def test_layers_work():
    assert call("torch.nn:Linear", 2, 3)(torch.ones(1, 2)).shape == (1, 3)
    assert call("torch.nn:EmbeddingBag", 10, 3).weight.device.type == "cpu"
    state = torch.get_rng_state()
    first = call("torch.nn:Linear", 4, 5, dtype=torch.float64).weight
    torch.set_rng_state(state)
    # the look before draws no numbers
    assert torch.equal(first, torch.nn.Linear(4, 5, dtype=torch.float64).weight)
    assert call("torch.nn:LSTM", 2, 3, num_layers=2)(torch.ones(1, 1, 2))[0].shape == (1, 1, 3)


@pytest.mark.parametrize(
    "number", [np.int64(1 << 40), torch.tensor(1 << 40)], ids=["NumPy", "tensor"]
)
def test_numbers_of_other_kinds_are_sizes_too(number):
    for name, args in [
        ("torch:max_pool1d", [torch.ones(1, 2, 3), number]),
        ("torch:ones", [(number, 1)]),
    ]:
        with pytest.raises(NotAllowedError):
            checked_callables()[name](*args)
