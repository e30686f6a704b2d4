"""Layers and optimizers of torch that peers make and use: how large a layer may be, and which of their methods look first."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from pibroch.errors import NotAllowedError
from pibroch.rpc.checks import MAX_ELEMENTS, Function, check_device, check_values, too_large
from pibroch.rpc.special_checks import check_bags

_MAX_LAYERS = 256


def made_small(cls: type[torch.nn.Module]) -> Function:
    """``cls``, after a look at how many parameters an object of these arguments would have."""

    @functools.wraps(cls, updated=())
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_device(kwargs)
        check_values(args, kwargs)
        for name, value in kwargs.items():
            if "num" in name and "layers" in name and value > _MAX_LAYERS:
                raise too_large(f"{value:,} layers", f"at most {_MAX_LAYERS}")
        _check_layers(cls, args)
        with torch.device("meta"):
            shape = cls(*args, **{**kwargs, **({"device": "meta"} if "device" in kwargs else {})})
        num_elements = sum(each.numel() for each in (*shape.parameters(), *shape.buffers()))
        if num_elements > MAX_ELEMENTS:
            raise too_large(f"{num_elements:,} parameters", f"at most {MAX_ELEMENTS:,}")
        return cls(*args, **kwargs)

    return checked


def _check_layers(cls: type, args: Any) -> None:
    """Layers are made one after the other."""
    place = {torch.nn.RNN: (2,), torch.nn.LSTM: (2,), torch.nn.GRU: (2,), torch.nn.Transformer: (2, 3)}.get(cls, ())
    for number in (args[each] for each in place if each < len(args)):
        if isinstance(number, int) and number > _MAX_LAYERS:
            raise too_large(f"{number:,} layers", f"at most {_MAX_LAYERS}")


def optimizer_of(cls: type[torch.optim.Optimizer]) -> Function:
    """``cls`` without its fused kernels, which trust what a peer says of their state."""

    @functools.wraps(cls, updated=())
    def checked(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("fused"):
            raise NotAllowedError("a fused optimizer", "one without fused", "make it in a function of your own")
        return cls(*args, **kwargs)

    return checked


def load_optimizer_state(optimizer: torch.optim.Optimizer, state_dict: Any) -> None:
    """``Optimizer.load_state_dict``, when the state has the shapes of the parameters, or is a number."""
    own = optimizer.state_dict()["param_groups"]
    for group in state_dict["param_groups"]:
        if any(group.get(name) for name in ("fused", "foreach", "capturable")):
            raise NotAllowedError("a state of fused kernels", "a plain one", "load it in a function of your own")
    shapes = [parameter.shape for group in optimizer.param_groups for parameter in group["params"]]
    for number, state in state_dict["state"].items():
        for value in state.values():
            is_odd = isinstance(value, Tensor) and value.numel() != 1
            if is_odd and not (0 <= number < len(shapes) and value.shape == shapes[number]):
                raise NotAllowedError(f"a state of shape {tuple(value.shape)}", "that of the parameter")
    if len(own) != len(state_dict["param_groups"]):
        raise ValueError("loaded state dict has a different number of parameter groups")
    optimizer.load_state_dict(state_dict)


def call_bag(bag: torch.nn.EmbeddingBag, input: Tensor, offsets: Tensor | None = None, weights: Any = None) -> Any:
    """``EmbeddingBag.forward``, when all ids and offsets lie where they must."""
    check_bags(input, bag.num_embeddings, offsets)
    return bag(input, offsets, weights)


CHECKED_METHODS: dict[type, dict[str, Function]] = {
    torch.nn.EmbeddingBag: {"forward": call_bag, "__call__": call_bag},
    torch.optim.Optimizer: {"load_state_dict": load_optimizer_state},
}
