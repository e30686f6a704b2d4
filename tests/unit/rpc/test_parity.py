"""Names, parameters and defaults are those of torch, except for those listed with a reason."""

import ast
import inspect

import pytest
from torch.distributed import autograd as torch_autograd
from torch.distributed import optim as torch_optim
from torch.distributed import rpc as torch_rpc

from pibroch import rpc
from pibroch.rpc import autograd, optim

RREF_METHODS = (
    *("backward", "confirmed_by_owner", "is_owner", "local_value", "owner", "owner_name"),
    *("remote", "rpc_async", "rpc_sync", "to_here"),
)
OURS_AND_TORCHS = {
    **{
        name: (getattr(rpc, name), getattr(torch_rpc, name))
        for name in ("init_rpc", "rpc_sync", "rpc_async", "remote", "shutdown", "get_worker_info")
    },
    **{
        f"RRef.{name}": (getattr(rpc.RRef, name), vars(torch_rpc.RRef.__base__)[name])
        for name in RREF_METHODS
    },
    "RRef": (rpc.RRef.__init__, vars(torch_rpc.RRef.__base__)["__init__"]),
    "WorkerInfo": (rpc.WorkerInfo.__init__, torch_rpc.WorkerInfo.__init__),  # type: ignore[attr-defined]  # torch does not export it by name
    "functions.async_execution": (
        rpc.functions.async_execution,
        torch_rpc.functions.async_execution,
    ),
    "autograd.backward": (autograd.backward, torch_autograd.backward),  # type: ignore[attr-defined]  # torch does not export it by name
    "autograd.get_gradients": (autograd.get_gradients, torch_autograd.get_gradients),  # type: ignore[attr-defined]
    "DistributedOptimizer": (
        optim.DistributedOptimizer.__init__,
        torch_optim.DistributedOptimizer.__init__,
    ),
    "DistributedOptimizer.step": (
        optim.DistributedOptimizer.step,
        torch_optim.DistributedOptimizer.step,
    ),
}
DIFFERENT = {
    ("shutdown", "timeout"): (
        300.0,
        0,
    ),  # a lost worker ends a graceful shutdown instead of hanging it
}
ADDED = {  # by keyword only, behind torch's own
    ("autograd.backward", "timeout"): "every wait has one; torch's backward may hang",
}
NOT_MIRRORED = {
    "AllGatherStates": "inside of torch's shutdown",
    "method_factory": "inside of torch's RRef",
    "new_method": "inside of torch's RRef",
    "backend_registered": "there is one backend",
    "register_backend": "there is one backend",
    "construct_rpc_backend_options": "there is one backend",
    "init_backend": "there is one backend",
    "BackendValue": "there is one backend",
}


@pytest.mark.parametrize("name", OURS_AND_TORCHS)
def test_parameters_and_defaults(name):
    ours, torchs = (parameters(function) for function in OURS_AND_TORCHS[name])
    assert [parameter for parameter in ours if (name, parameter) not in ADDED] == list(torchs)
    for parameter, default in torchs.items():
        expected = DIFFERENT.get((name, parameter), (default, default))
        assert (ours[parameter], default) == expected, parameter


def test_each_listed_difference_is_one():
    for (name, parameter), (default, torchs_default) in DIFFERENT.items():
        assert default != torchs_default
        assert parameter in parameters(OURS_AND_TORCHS[name][0])


def test_what_was_added_is_there_and_given_by_keyword():
    for name, parameter in ADDED:
        signature = inspect.signature(OURS_AND_TORCHS[name][0])
        assert signature.parameters[parameter].kind is inspect.Parameter.KEYWORD_ONLY


def test_names():
    public = set(torch_rpc.__all__)
    assert {name for name in public if not hasattr(rpc, name)} == set(NOT_MIRRORED)
    assert public - set(NOT_MIRRORED) <= set(rpc.__all__)
    assert {name for name in torch_autograd.__all__ if not hasattr(autograd, name)} == {
        "is_available"
    }
    methods = {name for name in vars(torch_rpc.RRef.__base__) if not name.startswith("_")}
    assert methods == set(RREF_METHODS)


def test_what_is_exported_is_there():
    assert [name for name in rpc.__all__ if not hasattr(rpc, name)] == []


def parameters(function):
    """Names and defaults in order, without the object itself.

    C++ functions of torch have them in their docstrings.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return documented(function)
    listed = [*signature.parameters.values()]
    if [str(parameter) for parameter in listed] == ["self", "*args", "**kwargs"]:
        return documented(function)
    return {
        f"{'*' * (parameter.kind - 1) if parameter.kind in (2, 4) else ''}{parameter.name}": (
            parameter.default
        )
        for parameter in listed
        if parameter.name != "self"
    }


def documented(function):
    line = function.__doc__.strip().splitlines()[0]
    arguments = ast.parse(f"def {line}: ...").body[0].args
    names = [argument.arg for argument in arguments.args]
    defaults = [ast.literal_eval(default) for default in arguments.defaults]
    missing = [inspect.Parameter.empty] * (len(names) - len(defaults))
    return {
        name: default
        for name, default in zip(names, missing + defaults, strict=True)
        if name != "self"
    }
