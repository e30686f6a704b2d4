"""A torch optimizer's state by the names of its parameters.

Plain values, and tensors named ``<parameter>/<field>``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pibroch.collectives.ownership import is_within
from pibroch.config.base import Section
from pibroch.errors import CheckpointError
from pibroch.state.files import CHECKPOINT
from pibroch.state.values import decode, encode
from pibroch.untrusted import checked

_BY_PARAMETER = (
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
)
"""Optimizers whose tensors are a number, or of the shape of their parameter."""
_DO = "make the optimizer as it was when the checkpoint was saved, over the same model"


class _Saved(Section):
    """What :func:`encode_optimizer` gives."""

    kind: str
    state: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]


def names_of_parameters(
    optimizer: torch.optim.Optimizer, models: Mapping[str, nn.Module]
) -> list[str]:
    """Of the optimizer's parameters in their order; ``group.place`` for those that no model has.

    Args:
        optimizer: any.
        models: by what is put before their parameters' names.
    """
    names = {
        id(each): prefix + name
        for prefix, model in models.items()
        for name, each in model.named_parameters()
    }
    return [
        names.get(id(each), f"{number}.{place}")
        for number, group in enumerate(optimizer.param_groups)
        for place, each in enumerate(group["params"])
    ]


def encode_optimizer(
    optimizer: torch.optim.Optimizer, names: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """State and settings as JSON takes them, and the tensors that they name.

    Args:
        optimizer: any whose state is made of plain values and tensors.
        names: of its parameters, in their order.

    Raises:
        ConfigError: for a state that cannot be stored.
    """
    state = optimizer.state_dict()
    tensors = dict[str, Tensor]()
    by_name = {
        names[place]: {
            field: encode(value, f"{names[place]}/{field}", tensors)
            for field, value in fields.items()
            if value is not None
        }
        for place, fields in state["state"].items()
    }
    groups = [
        {
            **{
                key: encode(value, f"group {number}/{key}", tensors)
                for key, value in group.items()
                if key != "params"
            },
            "params": [names[place] for place in group["params"]],
        }
        for number, group in enumerate(state["param_groups"])
    ]
    return {"kind": type(optimizer).__name__, "state": by_name, "groups": groups}, tensors


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    tensors: Mapping[str, Tensor],
    saved: Mapping[str, Any] | None,
    elsewhere: Collection[str] = (),
) -> None:
    """Fill an optimizer from what :func:`encode_optimizer` gave.

    Args:
        optimizer: over the same parameters.
        names: of its parameters, in their order.
        tensors: by name.
        saved: state and settings; ``None`` where only tensors were kept: settings stay as they are.
        elsewhere: parts of the model that other ranks hold.

    Raises:
        CheckpointError: when it is another optimizer, or over other parameters.
    """
    groups = optimizer.state_dict()["param_groups"]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    state = dict[str, dict[str, Any]]()
    if saved is None:
        for key, tensor in tensors.items():
            name, _, field = key.rpartition("/")
            state.setdefault(name, {})[field] = tensor
    else:
        tree: _Saved = checked(_Saved, saved, "the optimizer's part of the checkpoint", CHECKPOINT)
        if tree.kind != type(optimizer).__name__:
            raise CheckpointError(
                f"state of {tree.kind} in the checkpoint", f"of {type(optimizer).__name__}", _DO
            )
        state = {
            name: {field: decode(value, tensors) for field, value in each.items()}
            for name, each in tree.state.items()
            if not is_within(name, elsewhere)
        }
        empty = {name for name, each in zip(names, parameters, strict=True) if not each.numel()}
        groups = _settings(groups, tree.groups, names, tensors, elsewhere, empty)
    place = {name: number for number, name in enumerate(names)}
    strange = [name for name in state if name not in place]
    if strange:
        raise CheckpointError(
            f"optimizer state of {strange[0]!r} in the checkpoint", "such a parameter here", _DO
        )
    for name, fields in state.items():
        shape = tuple(parameters[place[name]].shape)
        for field, value in fields.items() if type(optimizer) in _BY_PARAMETER else ():
            if not isinstance(value, Tensor) or tuple(value.shape) not in ((), shape):
                kind = list(value.shape) if isinstance(value, Tensor) else f"{value!r:.60}"
                need = f"a number or a tensor {list(shape)}"
                raise CheckpointError(f"{field} {kind} of {name!r} in the checkpoint", need, _DO)
    try:
        optimizer.load_state_dict(
            {"state": {place[name]: each for name, each in state.items()}, "param_groups": groups}
        )
    except (ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"state that {type(optimizer).__name__} does not take: {error}", "its own", _DO
        ) from error


def _settings(
    groups: Sequence[Mapping[str, Any]],
    saved: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    tensors: Mapping[str, Tensor],
    elsewhere: Collection[str],
    empty: Collection[str],
) -> list[dict[str, object]]:
    """The optimizer's groups with the settings that were saved.

    Either may lack ``empty`` parameters.
    """
    if len(groups) != len(saved):
        raise CheckpointError(
            f"an optimizer of {len(saved)} parameter groups in the checkpoint",
            f"{len(groups)} groups, as this one has",
            _DO,
        )
    filled = []
    for number, (group, kept) in enumerate(zip(groups, saved, strict=True)):
        here = {names[place] for place in group["params"]}
        named = checked(list[str], kept.get("params"), f"parameters of group {number}", CHECKPOINT)
        there = {name for name in named if not is_within(name, elsewhere)}
        odd = sorted((here ^ there if not elsewhere else there - here).difference(empty))
        if odd:
            where = "the checkpoint" if odd[0] in there else "this program"
            raise CheckpointError(
                f"group {number} of the optimizer with {odd[0]!r} in {where} alone",
                "the same parameters in both",
                _DO,
            )
        settings: dict[str, Any] = {
            key: decode(value, tensors) for key, value in kept.items() if key != "params"
        }
        for key, value in settings.items():
            if not is_alike(value, group.get(key)):
                got = f"{key} = {value!r:.60} in group {number} of the optimizer's settings"
                raise CheckpointError(got, f"what is like {group[key]!r}", _DO)
        filled.append({**group, **settings, "params": group["params"]})
    return filled


def is_alike(value: object, here: object) -> bool:
    """Whether a setting may take the place of another.

    Numbers that of numbers, tuples that of as many.
    """
    if value is None or here is None:
        return True
    if isinstance(here, bool) or isinstance(value, bool):
        return isinstance(here, bool) and isinstance(value, bool)
    if isinstance(here, int | float | Tensor):
        return isinstance(value, int | float | Tensor) and torch.as_tensor(value).numel() == 1
    if isinstance(here, list | tuple) and isinstance(value, list | tuple):
        return len(here) == len(value) and all(map(is_alike, value, here))
    return type(value) is type(here)
