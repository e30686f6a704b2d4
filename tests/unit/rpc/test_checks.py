"""Listed functions called by name.

What would become large or kill the process is refused before, and the everyday calls work.
"""

import operator
import time

import numpy as np
import pytest
import torch

from pibroch.errors import NotAllowedError
from pibroch.rpc.values.callables import Callables
from pibroch.rpc.values.known_callables import known_callables

CALLABLES = Callables(())
ROW = torch.ones(1, 1 << 20)
COLUMN = torch.ones(1 << 20, 1)


def call(name, *args, **kwargs):
    return CALLABLES.to_call(name)(*args, **kwargs)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("torch:add", (ROW, COLUMN)),
        ("torch:eq", (ROW, COLUMN)),
        ("torch:clamp", (ROW, COLUMN)),
        ("torch:Tensor.mul", (ROW, COLUMN)),
        ("operator:add", (ROW, COLUMN)),
        ("operator:truediv", (np.ones((1 << 17, 1)), np.ones((1, 1 << 17)))),
        ("operator:eq", ([ROW], [COLUMN])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_become_large_is_refused_before(name, args):
    began = time.process_time()
    with pytest.raises(NotAllowedError, match="a result of up to"):
        call(name, *args)
    assert time.process_time() - began < 0.5


def test_the_bound_is_that_of_the_worker():
    narrow = Callables((), max_result_bytes=8 * 100).to_call("torch:add")
    assert narrow(torch.ones(100), torch.ones(100)).sum() == 200
    assert narrow(torch.ones(10, 1), torch.ones(1, 10)).sum() == 200
    for args in (
        (torch.ones(101), 1),
        (torch.ones(10, 1), torch.ones(1, 11)),
        (torch.ones(51, dtype=torch.complex128), 1),
    ):
        with pytest.raises(NotAllowedError):
            narrow(*args)


def test_a_bound_counts_arguments_by_name():
    narrow = Callables((), max_result_bytes=8 * 100).to_call("torch:add")
    with pytest.raises(NotAllowedError):
        narrow(torch.ones(10, 1), other=torch.ones(1, 11))


@pytest.mark.filterwarnings("ignore:This overload of")
def test_no_listed_function_takes_the_size_of_its_result():
    """A large number makes none of them allocate: torch refuses it, or gives what it got."""
    x = torch.ones(2, 2)
    for name, function in known_callables().items():
        if isinstance(function, type) or name.startswith("operator:"):
            continue
        for numbers in ((1 << 40,), (1 << 40, 1 << 40), ([1 << 40] * 2,)):
            try:
                result = call(name, x.clone(), *numbers)
            except (TypeError, RuntimeError, IndexError, ValueError, NotAllowedError):
                continue
            each = result[0] if isinstance(result, tuple) else result
            if isinstance(each, torch.Tensor):
                assert each.untyped_storage().nbytes() <= 16 * x.numel(), name


@pytest.mark.parametrize(
    ("name", "args", "result"),
    [
        ("torch:add", (torch.ones(2), 1), torch.full((2,), 2.0)),
        ("torch:div", (torch.ones(2), 2), torch.full((2,), 0.5)),
        ("torch:sum", (torch.ones(2, 3), 0), torch.full((3,), 2.0)),
        ("torch:softmax", (torch.zeros(2), 0), torch.full((2,), 0.5)),
        ("torch:unsqueeze", (torch.ones(2), 0), torch.ones(1, 2)),
        ("torch:Tensor.add_", (torch.ones(2), 1), torch.full((2,), 2.0)),
        ("torch:Tensor.size", (torch.ones(2),), torch.Size([2])),
        ("torch:Tensor.item", (torch.tensor(3),), 3),
        ("builtins:len", ([1, 2],), 2),
        ("operator:add", ([1], [2]), [1, 2]),
        ("operator:sub", (torch.ones(1), 2), torch.full((1,), -1.0)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_everyday_calls_work(name, args, result):
    torch.testing.assert_close(call(name, *args), result)


def test_a_division_that_ends_the_process_is_refused():
    smallest = torch.tensor([-(2**63)])
    for name in ("torch:div", "torch:Tensor.div", "torch:Tensor.div_"):
        for mode in ("trunc", "floor"):
            with pytest.raises(NotAllowedError):
                call(name, smallest, torch.tensor([-1]), rounding_mode=mode)
    assert call("torch:div", smallest, -1) == 2.0**63


@pytest.mark.parametrize(
    "name",
    [
        *("torch:ones", "torch:zeros", "torch:empty", "torch:Tensor", "torch:tensor"),
        *("torch:arange", "torch:outer", "torch:einsum", "torch:matmul", "torch:cat"),
        *("torch:repeat_interleave", "torch:bincount", "torch:matrix_power", "torch:where"),
        *("torch:Tensor.expand", "torch:Tensor.repeat", "torch:Tensor.to", "torch:Tensor.tolist"),
        *("torch:Tensor.numpy", "torch:Tensor.view", "torch:Tensor.unfold"),
        *("torch.nn:Linear", "torch.nn.functional:pad", "torch.linalg:eig", "torch.fft:fft"),
        *("builtins:pow", "builtins:sum", "builtins:list", "builtins:bytes", "builtins:dict"),
        *("builtins:sorted", "builtins:int", "builtins:str", "builtins:max", "builtins:round"),
        *("operator:pow", "operator:lshift", "operator:mul", "operator:mod", "operator:getitem"),
        *("operator:contains", "operator:countOf", "operator:indexOf", "operator:matmul"),
    ],
)
def test_what_takes_sizes_long_or_text_is_not_listed_and_can_be_allowed(name):
    with pytest.raises(NotAllowedError, match="allowed_modules"):
        CALLABLES.to_call(name)
    allowing = Callables((name,))
    assert allowing.to_call(name) is allowing.resolve(name)


@pytest.mark.parametrize(
    "function",
    [
        *(torch.ones, torch.matmul, torch.einsum, torch.Tensor.view, torch.nn.Linear, max),
        *(torch.nn.functional.linear, torch.nn.functional.relu, operator.mul),
    ],
    ids=lambda function: function.__name__,
)
def test_a_caller_names_what_its_callee_allows(function):
    """Also where only the callee's options have the name."""
    name = Callables(()).name(function)
    assert Callables((name,)).to_call(name) is function


def test_a_class_may_be_allowed_by_its_public_name():
    sent = Callables(()).name(torch.nn.Linear)
    assert Callables(("torch.nn:Linear",)).to_call(sent) is torch.nn.Linear
    assert Callables(("torch.nn",)).to_call(sent) is torch.nn.Linear
