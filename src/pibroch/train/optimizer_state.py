"""A torch optimizer's state by the names of its parameters: plain values, and tensors named ``<parameter>/<field>``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pibroch.collectives.ownership import is_within
from pibroch.errors import CheckpointError
from pibroch.train.state_tree import decode, encode

_DO = "make the optimizer as it was when the checkpoint was saved, over the same model"


def names_of_parameters(
    optimizer: torch.optim.Optimizer, models: Mapping[str, nn.Module]
) -> list[str]:
    """Of the optimizer's parameters in their order; ``group.place`` for those that no model has.

    Args:
        optimizer: any.
        models: by what is put before their parameters' names.
    """
    known = {
        id(each): prefix + name
        for prefix, model in models.items()
        for name, each in model.named_parameters()
    }
    return [
        known.get(id(each), f"{number}.{place}")
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
    state, tensors = optimizer.state_dict(), dict[str, Tensor]()
    by_name = {
        names[place]: {
            field: encode(value, f"{names[place]}/{field}", tensors)
            for field, value in fields.items()
            if value is not None
        }
        for place, fields in state["state"].items()
    }
    groups = [
        {**{key: encode(value, f"group {number}/{key}", tensors) for key, value in group.items() if key != "params"},
         "params": [names[place] for place in group["params"]]}
        for number, group in enumerate(state["param_groups"])
    ]  # fmt: skip
    return {"kind": type(optimizer).__name__, "state": by_name, "groups": groups}, tensors


def load_optimizer(
    optimizer: torch.optim.Optimizer, names: Sequence[str], tensors: Mapping[str, Tensor],
    saved: Mapping[str, Any] | None, elsewhere: Collection[str] = (),
) -> None:  # fmt: skip
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
    groups, state = optimizer.state_dict()["param_groups"], dict[str, dict[str, Any]]()
    if saved is None:
        for key, tensor in tensors.items():
            name, _, field = key.rpartition("/")
            state.setdefault(name, {})[field] = tensor
    else:
        if saved["kind"] != type(optimizer).__name__:
            raise CheckpointError(
                f"state of {saved['kind']} in the checkpoint", f"of {type(optimizer).__name__}", _DO
            )
        state = {
            name: decode(each, tensors)
            for name, each in saved["state"].items()
            if not is_within(name, elsewhere)
        }
        groups = _settings(groups, saved["groups"], names, tensors, elsewhere)
    place = {name: number for number, name in enumerate(names)}
    strange = [name for name in state if name not in place]
    if strange:
        raise CheckpointError(
            f"optimizer state of {strange[0]!r} in the checkpoint", "such a parameter here", _DO
        )
    try:
        optimizer.load_state_dict(
            {"state": {place[name]: each for name, each in state.items()}, "param_groups": groups}
        )
    except (ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"state that {type(optimizer).__name__} does not take: {error}", "its own", _DO
        ) from error


def _settings(
    groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], names: Sequence[str],
    tensors: Mapping[str, Tensor], elsewhere: Collection[str],
) -> list[dict[str, object]]:  # fmt: skip
    """The optimizer's groups with the settings that were saved."""
    if len(groups) != len(saved):
        raise CheckpointError(
            f"an optimizer of {len(saved)} parameter groups in the checkpoint", f"{len(groups)} groups, as this one has", _DO
        )  # fmt: skip
    filled = []
    for number, (group, kept) in enumerate(zip(groups, saved, strict=True)):
        here = {names[place] for place in group["params"]}
        there = {name for name in kept["params"] if not is_within(name, elsewhere)}
        odd = sorted(here ^ there) if not elsewhere else sorted(there - here)
        if odd:
            where = "the checkpoint" if odd[0] in there else "this program"
            raise CheckpointError(
                f"group {number} of the optimizer with {odd[0]!r} in {where} alone",
                "the same parameters in both",
                _DO,
            )
        settings = {key: decode(value, tensors) for key, value in kept.items() if key != "params"}
        filled.append({**group, **settings, "params": group["params"]})
    return filled
