"""Checks of layers, optimizers and schedulers of torch that peers construct and use."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import torch
from torch import Tensor

from pibroch.errors import NotAllowedError
from pibroch.rpc.values.checks import (
    MAX_ELEMENTS,
    MAX_WINDOW,
    Function,
    check_device,
    check_elements,
    check_values,
    too_large,
)
from pibroch.rpc.values.result_sizes import product
from pibroch.rpc.values.special_checks import check_bags

_MAX_LAYERS = 256
_MAX_SPATIAL = 1 << 26  # product of sizes and paddings for a layer without parameters
_WINDOWS = ("kernel_size", "stride", "dilation")
_PER_DIM = ("output_size", "size", "padding", "kernel_size", "scale_factor", "output_padding")
# names of the arguments of recurrent layers, whose signature is ``(*args, **kwargs)``
_RECURRENT = ("input_size", "hidden_size", "num_layers")


def module_of(cls: type[torch.nn.Module]) -> Function:
    """The constructor ``cls``, after a check of how many parameters its object would have."""
    signature = inspect.signature(cls)
    is_recurrent = issubclass(cls, torch.nn.RNNBase)
    num_dims = int(cls.__name__[-2]) if cls.__name__[-2:] in ("1d", "2d", "3d") else 2

    @functools.wraps(cls, updated=())
    def checked(*args: object, **kwargs: object) -> object:
        check_device(kwargs)
        check_values(args, kwargs)
        if is_recurrent:
            named = dict(zip(_RECURRENT, args, strict=False)) | kwargs
        else:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            named = dict(bound.arguments)
        numbers = {
            name: _number(value, num_dims if name in _PER_DIM else 1)
            for name, value in named.items()
        }
        for name, number in numbers.items():
            if name.endswith("layers") and number > _MAX_LAYERS:
                raise too_large(f"{number:,} layers", f"at most {_MAX_LAYERS}")
            if name in _WINDOWS and number > MAX_WINDOW:
                raise too_large(f"a window of {number:,}", f"at most {MAX_WINDOW:,}")
        check_elements(_num_parameters(numbers))
        return cls(*args, **kwargs)

    return checked


def _number(value: object, num_dims: int) -> int:
    """A size, or the product of sizes; a single size counts for all ``num_dims`` dimensions."""
    if isinstance(value, (list, tuple)):
        return product(value)
    return (
        max(math.ceil(value), 0) ** num_dims
        if isinstance(value, (int, float)) and math.isfinite(value)
        else 1
    )


def _num_parameters(numbers: dict[str, int]) -> int:
    """An upper bound; ``numbers`` are a constructor's arguments by name.

    >>> _num_parameters({"in_features": 30, "out_features": 40})
    1200
    """

    def of(*names: str) -> int:
        return product(numbers.get(name, 1) for name in names)

    width = max(
        of("d_model"), of("embed_dim"), of("hidden_size"), of("input_size"), of("kdim"), of("vdim")
    )
    layers = of("num_layers") + of("num_encoder_layers") + of("num_decoder_layers")
    wide = [
        of("in_features", "out_features", "in1_features", "in2_features"),
        of("num_embeddings", "embedding_dim"),
        of("in_channels", "out_channels") * of("kernel_size"),
        16 * width * (width + of("dim_feedforward")) * layers,
        of("normalized_shape"),
        of("num_features", "num_channels", "num_parameters"),
    ]
    spatial = of(*_PER_DIM)
    return max(*wide, spatial * (MAX_ELEMENTS // _MAX_SPATIAL))


def scheduler_of(cls: type) -> Function:
    """The constructor ``cls``, after a check of sequences such as milestones."""

    @functools.wraps(cls, updated=())
    def checked(*args: object, **kwargs: object) -> object:
        check_values(args, kwargs)
        return cls(*args, **kwargs)

    return checked


def optimizer_of(cls: type[torch.optim.Optimizer]) -> Function:
    """The constructor ``cls`` without fused kernels, which trust the shapes of a loaded state."""

    @functools.wraps(cls, updated=())
    def checked(*args: Any, **kwargs: Any) -> object:
        if kwargs.get("fused"):
            raise NotAllowedError(
                "a fused optimizer", "one without fused", "make it in a function of your own"
            )
        return cls(*args, **kwargs)

    return checked


def load_optimizer_state(optimizer: torch.optim.Optimizer, state_dict: Any) -> None:
    """``Optimizer.load_state_dict``, if all state has its parameter's shape or is one number."""
    own = optimizer.state_dict()["param_groups"]
    for group in state_dict["param_groups"]:
        if any(group.get(name) for name in ("fused", "foreach", "capturable")):
            raise NotAllowedError(
                "a state of fused kernels", "a plain one", "load it in a function of your own"
            )
    shapes = [parameter.shape for group in optimizer.param_groups for parameter in group["params"]]
    for number, state in state_dict["state"].items():
        for value in state.values():
            is_array = isinstance(value, Tensor) and value.numel() != 1
            if is_array and not (0 <= number < len(shapes) and value.shape == shapes[number]):
                raise NotAllowedError(
                    f"a state of shape {tuple(value.shape)}", "that of the parameter"
                )
    if len(own) != len(state_dict["param_groups"]):
        raise ValueError("loaded state dict has a different number of parameter groups")
    optimizer.load_state_dict(state_dict)


def call_bag(
    bag: torch.nn.EmbeddingBag, input: Tensor, offsets: Tensor | None = None, weights: object = None
) -> object:
    """``EmbeddingBag.forward``, if all ids and offsets are within their bounds."""
    check_bags(input, bag.num_embeddings, offsets)
    return bag(input, offsets, weights)


CHECKED_METHODS: dict[type, dict[str, Function]] = {
    torch.nn.EmbeddingBag: {"forward": call_bag, "__call__": call_bag},
    torch.optim.Optimizer: {"load_state_dict": load_optimizer_state},
}
