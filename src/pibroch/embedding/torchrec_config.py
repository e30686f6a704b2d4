"""TorchRec's table configs in pibroch's terms; what pibroch lacks is refused, not left out."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from typing import Any

import torch

from pibroch.embedding.dtype import Dtype
from pibroch.embedding.initializers import Initializer, Normal, Uniform, Zeros
from pibroch.errors import ConfigError

_FIXED = "hash ids to a number of rows that is fixed"
_REFUSED = {
    "need_pos": (False, "weights by position in the bag", "pass weights in the batch"),
    "num_embeddings_post_pruning": (None, "pruning", "train without; prune what you export"),
    "use_virtual_table": (False, "virtual tables", _FIXED),
    "virtual_table_eviction_policy": (None, "eviction", _FIXED),
    "total_num_buckets": (None, "buckets of ids", _FIXED),
    "input_dim": (None, "a number of ids besides that of the rows", "give num_embeddings alone"),
    "enable_embedding_update": (False, "rows written from outside", "leave it out"),
    "stash_weights": (
        False,
        "stashed weights",
        "leave it out: rows lie in the CPU's memory in any case",
    ),
    "has_feature_processor": (False, "feature processors", "weigh the ids in the batch"),
}
_TAKEN = {
    "num_embeddings",
    "embedding_dim",
    "name",
    "data_type",
    "feature_names",
    "weight_init_max",
    "weight_init_min",
    "init_fn",
    "pooling",
}


_DTYPES: dict[Any, Dtype] = {
    None: "float32",
    "FP32": "float32",
    torch.float32: "float32",
    "BF16": "bfloat16",
    torch.bfloat16: "bfloat16",
}


def dtype_of(config: object) -> Dtype:
    """The type of the weights, of a config that is not refused."""
    return _DTYPES[_data_type(config)]


def _data_type(config: object) -> object:
    data_type = getattr(config, "data_type", None)
    return getattr(data_type, "value", data_type)


def refuse_unsupported(config: Any) -> None:
    """Raise ConfigError for what a table cannot do."""
    where = f"a {type(config).__name__} {getattr(config, 'name', '')!r}"
    data_type = _data_type(config)
    if data_type not in _DTYPES:
        raise ConfigError(
            f"{where} of {data_type}",
            "FP32 or BF16, of weights; optimizer state is float32",
            "choose one of them",
        )
    for field, (usual, what, do) in _REFUSED.items():
        if (value := getattr(config, field, usual)) != usual:
            raise ConfigError(
                f"{where} with {field} {value!r}", f"{usual}: there is no support for {what}", do
            )
    for each in fields(config) if is_dataclass(config) else ():
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        is_known = each.name in _TAKEN or each.name in _REFUSED
        if not is_known and each.init and (value := getattr(config, each.name)) != default:
            raise ConfigError(
                f"{where} with {each.name} {value!r}",
                "fields that a table knows",
                "leave it as it is",
            )
    if not config.name:
        raise ConfigError(
            f"a {type(config).__name__} without a name", "one of its own for each table"
        )


def initializer_of(config: Any) -> Initializer:
    """The initializer of the same distribution: by ``init_fn``, or by the bounds of the weights.

    Raises:
        ConfigError: for a function that has no counterpart.
    """
    function = getattr(config, "init_fn", None)
    if function is None:
        low, high = (_bound(config, end) for end in ("min", "max"))
        usual = config.num_embeddings**-0.5
        return _uniform(-usual if low is None else low, usual if high is None else high, config)
    options = dict(function.keywords) if isinstance(function, partial) and not function.args else {}
    function = function.func if isinstance(function, partial) and not function.args else function
    if function is torch.nn.init.uniform_ and set(options) <= {"a", "b"}:
        return _uniform(options.get("a", 0.0), options.get("b", 1.0), config)
    if (
        function is torch.nn.init.normal_
        and set(options) <= {"mean", "std"}
        and not options.get("mean")
    ):
        return Normal(options.get("std", 1.0))
    if function is torch.nn.init.zeros_ and not options:
        return Zeros()
    raise ConfigError(
        f"a {type(config).__name__} {config.name!r} with init_fn {function!r}",
        "torch.nn.init.uniform_, normal_ with mean 0 or zeros_, or a functools.partial of these by"
        " keywords: any process makes any row by itself",
        "pass such a function, or make the Table with an initializer of your own",
    )


def _bound(config: object, end: str) -> float | None:
    method = getattr(config, f"get_weight_init_{end}", None)
    value = method() if callable(method) else getattr(config, f"weight_init_{end}", None)
    return None if value is None else float(value)


def _uniform(low: float, high: float, config: Any) -> Initializer:
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ConfigError(
            f"weights from {low} to {high} in {config.name!r}", "finite bounds, the lower one first"
        )
    usual = config.num_embeddings**-0.5
    if math.isclose(low, -usual) and math.isclose(high, usual):
        return Uniform()
    return Uniform((high - low) / 2, (high + low) / 2)
