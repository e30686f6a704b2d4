"""``RemoteModule``: a ``torch.nn.Module`` on another worker, as in ``torch.distributed.nn``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pibroch.errors import ConfigError, ProtocolError
from pibroch.rpc.api import rpc_async, rpc_sync
from pibroch.rpc.calls.agent import current_agent
from pibroch.rpc.calls.futures import Future
from pibroch.rpc.rref import RRef, remote
from pibroch.rpc.values.checks import check_device
from pibroch.rpc.values.methods import find_method

__all__ = ["RemoteModule"]

_UNSUPPORTED = str.split("""
    add_module apply bfloat16 buffers children cpu cuda double extra_repr float half ipu
    load_state_dict modules named_buffers named_children named_modules named_parameters parameters
    register_backward_hook register_buffer register_forward_hook register_forward_pre_hook
    register_parameter requires_grad_ share_memory state_dict to type xpu zero_grad
""")
_MAX_DEVICE_LENGTH = 64
_INSTEAD = {"parameters": ". Please use ``remote_parameters`` instead."}


class RemoteModule(nn.Module):
    """A module that another worker makes and keeps; ``forward`` runs there.

    Gradients flow back in an autograd context. A remote module can be among the arguments or in the
    result of a call: receiver and sender then use the same module. TorchScript interfaces are not
    supported.

    Args:
        remote_device: ``"worker/device"`` or ``"rank:1/device"``; without a device its CPU. Tensors
            among the arguments are moved to an accelerator; results return by way of the CPU,
            unless the owner has ``device_maps``.
        module_cls: makes the module: a class, or a function that both workers can name.
        args: positional arguments of ``module_cls``.
        kwargs: its keyword arguments.

    Raises:
        ConfigError: for a ``remote_device`` that names no worker.
        ValueError: from ``forward``, when ``module_cls`` did not make an ``nn.Module``.
    """

    is_scriptable = False

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[object] | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__()
        self.on, self.device = worker_and_device(remote_device)
        arguments = (module_cls, list(args or ()), dict(kwargs or {}), self.device)
        self.module_rref: RRef[nn.Module] = remote(self.on, make_module, arguments)

    @classmethod
    def _of(cls, on: str | int, device: str, module_rref: RRef[nn.Module]) -> RemoteModule:
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.on = on
        self.device = device
        self.module_rref = module_rref
        return self

    @staticmethod
    def init_from_module_rref(remote_device: str, module_rref: RRef[nn.Module]) -> RemoteModule:
        """A remote module of a module that exists already.

        Args:
            remote_device: worker and device of the module.
            module_rref: a reference to the module.
        """
        return RemoteModule._of(*worker_and_device(remote_device), module_rref)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run the module's ``forward`` at its owner; blocks until it returns."""
        return rpc_sync(
            self.module_rref.owner(), run_forward, (self.module_rref, self.device, args, kwargs)
        )

    def forward_async(self, *args: object, **kwargs: object) -> Future:
        """As ``forward``, but returns a future of the result at once."""
        return rpc_async(
            self.module_rref.owner(), run_forward, (self.module_rref, self.device, args, kwargs)
        )

    def remote_parameters(self, recurse: bool = True) -> list[RRef[Tensor]]:
        """References to the module's parameters, for ``DistributedOptimizer``.

        Without ``recurse`` those of submodules are left out.
        """
        return rpc_sync(self.module_rref.owner(), parameter_rrefs, (self.module_rref, recurse))

    def get_module_rref(self) -> RRef[nn.Module]:
        """A reference to the module."""
        return self.module_rref

    def train(self, mode: bool = True) -> RemoteModule:
        """Set the training mode of the module at its owner."""
        rpc_sync(self.module_rref.owner(), set_training, (self.module_rref, mode))
        return self

    def __rpc_state__(self) -> list[Any]:
        """The state that travels in messages (``values/codec.py``)."""
        return [self.on, self.device, self.module_rref]

    @classmethod
    def __rpc_made__(cls, state: Any) -> RemoteModule:
        """A remote module of the state that arrived.

        Raises:
            ProtocolError: when it does not have the form of ``__rpc_state__``.
        """
        types = [type(each) for each in state] if type(state) is list and len(state) == 3 else []
        if types not in ([str, str, RRef], [int, str, RRef]) or len(state[1]) > _MAX_DEVICE_LENGTH:
            raise ProtocolError(
                "the state of a remote module", "a worker, a device, and a reference to its module"
            )
        return cls._of(*state)

    def __getstate__(self) -> NoReturn:
        raise RuntimeError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when"
            " using RPC"
        )


def _unsupported(name: str) -> Callable[..., NoReturn]:
    @functools.wraps(getattr(nn.Module, name))
    def refuse(self: RemoteModule, *_: object, **__: object) -> NoReturn:
        raise ValueError(
            f"Method ``{name}`` not supported for RemoteModule{_INSTEAD.get(name, '')}"
        )

    return refuse


for _name in _UNSUPPORTED:
    setattr(RemoteModule, _name, _unsupported(_name))


def worker_and_device(remote_device: str) -> tuple[str | int, str]:
    """Name or id of the worker, and its device, of ``"worker/device"`` or ``"rank:1/device"``.

    >>> worker_and_device("trainer0/cuda:1"), worker_and_device("rank:2")
    (('trainer0', 'cuda:1'), (2, 'cpu'))
    """
    worker, _, device = remote_device.partition("/")
    number = worker.removeprefix("rank:")
    if not worker or (number != worker and not number.isdigit()):
        raise ConfigError(
            f"remote device {remote_device!r}", "'worker/device' or 'rank:number/device'"
        )
    return int(number) if number != worker else worker, str(torch.device(device or "cpu"))


# These run at the module's owner. Peers can do nothing with a module here that they could not do by
# its class's name or through a reference.


def make_module(module_cls: Callable[..., Any], args: Any, kwargs: Any, device: str) -> nn.Module:
    """Make the module, at its owner."""
    check_device(device)
    module = current_agent().callables.as_called(module_cls)(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )
    return module.to(device)


def run_forward(module_rref: RRef[nn.Module], device: str, args: Any, kwargs: Any) -> Any:
    """Run ``forward`` of the module on its device."""
    forward = _method(module_rref, "forward")
    if device == "cpu":
        return forward(*args, **kwargs)
    check_device(device)
    result = forward(*_moved(args, device), **_moved(kwargs, device))
    return result if current_agent().options.device_maps else _moved(result, "cpu")


def parameter_rrefs(module_rref: RRef[nn.Module], recurse: bool) -> list[RRef[Tensor]]:
    """References to the module's parameters."""
    return [RRef(each) for each in _method(module_rref, "parameters")(recurse)]


def set_training(module_rref: RRef[nn.Module], mode: bool) -> None:
    """Set the module's training mode."""
    _method(module_rref, "train")(mode)


def _method(module_rref: RRef[nn.Module], name: str) -> Callable[..., Any]:
    """A method of the module, if peers may call it."""
    return find_method(module_rref.local_value(), name, current_agent().callables)


def _moved(value: Any, device: str) -> Any:
    """The value with the tensors in lists, tuples and dicts on another device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) in (list, tuple):
        return type(value)(_moved(each, device) for each in value)
    return (
        {key: _moved(each, device) for key, each in value.items()} if type(value) is dict else value
    )
