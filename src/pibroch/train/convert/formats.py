"""The names that others give to a model's parameters, both ways."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pibroch.errors import CheckpointError
from pibroch.train.convert.plain import (
    Layer,
    PlainModel,
    named_layers,
    reorder_pairs,
    upper_to_lower,
)

logger = logging.getLogger(__name__)
State = Mapping[str, Tensor]


class Format(ABC):
    """How another system names parameters and orders pairs.

    Models other than DLRM keep our names but for their tables.
    """

    @abstractmethod
    def write(self, model: PlainModel, step: int) -> dict[str, object]:
        """What ``torch.save`` is to write."""

    @abstractmethod
    def read(self, content: State, tables: Sequence[str]) -> PlainModel:
        """A model from tensors by name, see :func:`~pibroch.train.convert.sources.read_source`.

        Raises:
            CheckpointError: names what is missing.
        """


class TorchRec(Format):
    """``torchrec.models.dlrm.DLRM``, also inside wrappers.

    Its pairs are those of the upper triangle by rows.
    """

    BAGS = "sparse_arch.embedding_bag_collection.embedding_bags."

    def write(self, model: PlainModel, step: int) -> dict[str, Any]:
        """See :class:`Format`; tables are named ``t_<name>``, as in TorchRec's examples."""
        state = {
            f"{self.BAGS}t_{name}.weight": table for name, table in model.tables.items()
        } | model.other
        if not model.top:
            return state
        dim = len(model.bottom[-1].bias)
        num_vectors = len(model.tables) + 1
        first = reorder_pairs(model.top[0], dim, upper_to_lower(num_vectors))
        state |= named_layers(model.bottom, "dense_arch.model._mlp.{}._linear.")
        state |= named_layers([first, *model.top[1:-1]], "over_arch.model.0._mlp.{}._linear.")
        return state | named_layers(model.top[-1:], "over_arch.model.1.")

    def read(self, content: State, tables: Sequence[str]) -> PlainModel:
        """See :class:`Format`."""
        state = _without_prefix(content, self.BAGS)
        stored = {
            k.removeprefix(self.BAGS).removesuffix(".weight"): v
            for k, v in state.items()
            if k.startswith(self.BAGS)
        }
        our_tables = _matched(
            {name.removeprefix("t_"): table for name, table in stored.items()}, tables
        )
        bottom = _layers(state, r"dense_arch\.model\._mlp\.(\d+)\._linear\.")
        top = _layers(state, r"over_arch\.model\.0\._mlp\.(\d+)\._linear\.") + _layers(
            state, r"over_arch\.model\.(1)\."
        )
        if not top or not bottom:
            return PlainModel(
                our_tables,
                other={name: tensor for name, tensor in state.items() if self.BAGS not in name},
            )
        back = torch.argsort(upper_to_lower(len(tables) + 1))
        return PlainModel(
            our_tables, bottom, [reorder_pairs(top[0], len(bottom[-1].bias), back), *top[1:]]
        )


class ReferenceDLRM(Format):
    """``dlrm_s_pytorch.py``: ``emb_l``, ``bot_l``, ``top_l`` inside ``state_dict``.

    Its pairs come in the order of ours.
    """

    def write(self, model: PlainModel, step: int) -> dict[str, object]:
        """See :class:`Format`.

        Figures that the script reads besides are those of a run without evaluations.
        """
        state = {
            f"emb_l.{i}.weight": table for i, table in enumerate(model.tables.values())
        } | model.other
        # its layers alternate with activations
        state |= named_layers(model.bottom, "bot_l.{}.", step=2)
        state |= named_layers(model.top, "top_l.{}.", step=2)
        counts = {"iter": step, "epoch": 0, "nepochs": 1, "nbatches": max(1, step)}
        figures = dict.fromkeys(("train_loss", "total_loss", "test_acc", "test_auc"), 0.0)
        return {"state_dict": state, **counts, "nbatches_test": 1, **figures}

    def read(self, content: State, tables: Sequence[str]) -> PlainModel:
        """See :class:`Format`."""
        state = _without_prefix(content, "emb_l.")
        numbered = {
            int(name.split(".")[1]): tensor
            for name, tensor in state.items()
            if name.startswith("emb_l.")
        }
        if sorted(numbered) != list(range(len(tables))):
            raise CheckpointError(
                f"{len(numbered)} tables `emb_l.N.weight`",
                f"{len(tables)}, as the data have categorical features",
            )
        our_tables = {name: numbered[i] for i, name in enumerate(tables)}
        bottom = _layers(state, r"bot_l\.(\d+)\.")
        top = _layers(state, r"top_l\.(\d+)\.")
        dense = {name: each for name, each in state.items() if not name.startswith("emb_l.")}
        return PlainModel(our_tables, bottom, top, {} if top else dense)


FORMATS: dict[str, Format] = {"torchrec": TorchRec(), "dlrm": ReferenceDLRM()}


def _layers(state: State, pattern: str) -> list[Layer]:
    """Layers whose names match, in the order of the number in them."""
    numbers = {int(match[1]): match[0] for name in state if (match := re.match(pattern, name))}
    try:
        return [
            Layer(state[f"{numbers[i]}weight"], state[f"{numbers[i]}bias"]) for i in sorted(numbers)
        ]
    except KeyError as error:
        raise CheckpointError(
            f"no {error.args[0]!r}", "a weight and a bias for each layer"
        ) from error


def _without_prefix(state: State, landmark: str) -> dict[str, Tensor]:
    """The model's tensors by name, without what wrappers and nested dictionaries put before.

    Args:
        state: tensors by name, perhaps with those of optimizers.
        landmark: what the names of tables begin with.
    """
    of_table = re.compile(rf"(.*?){re.escape(landmark)}[^.]+\.weight")
    prefixes = sorted({match[1] for name in state if (match := of_table.fullmatch(name))})
    if not prefixes:
        some = ", ".join(list(state)[:3])
        raise CheckpointError(
            f"parameters named {some}, ...", f"some named {landmark}*", "choose the other format"
        )
    if len(prefixes) > 1:
        raise CheckpointError(
            f"tables under {' and '.join(repr(prefix) for prefix in prefixes)}",
            "those of one model",
            "save it alone",
        )
    chosen = prefixes[0]
    return {
        name.removeprefix(chosen): tensor
        for name, tensor in state.items()
        if name.startswith(chosen)
    }


def _matched(stored: dict[str, Tensor], tables: Sequence[str]) -> dict[str, Tensor]:
    """Tables under our names: by name, or by order when no name matches."""
    if set(stored) == set(tables):
        return {name: stored[name] for name in tables}
    if len(stored) == len(tables) and not set(stored) & set(tables):
        logger.info("tables are taken in their order: %s is %s, ...", next(iter(stored)), tables[0])
        return dict(zip(tables, stored.values(), strict=True))
    raise CheckpointError(
        f"tables {sorted(stored)}", f"tables {sorted(tables)}, or as many under other names"
    )
