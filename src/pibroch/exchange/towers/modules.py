"""Tower modules between the two halves of the lookup: each runs on the ranks that have its tower.

Their outputs cross hosts.

Shape legend: B samples of this rank, P of all ranks that it serves, F_t features of tower t, N
width of embeddings, G vectors of width D that all towers give, and widths[g] numbers a sample that
those of group g give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pibroch.collectives import data_parallel
from pibroch.embedding import Table
from pibroch.errors import ConfigError
from pibroch.exchange.embeddings import Embeddings
from pibroch.exchange.towers.exchange import TowersExchange
from pibroch.exchange.towers.peer_lookup import PeerBatch
from pibroch.exchange.towers.places import towers_of_groups
from pibroch.exchange.towers.tables import TablesHere
from pibroch.models import Model, PassThrough, Towers

M = TypeVar("M", bound=nn.Module)


class PlacedTowers(nn.Module):
    """The towers of this rank's group of hosts in place of all; state has the same names.

    Args:
        towers: all.
        held: numbers of those here.
        to_home: sends outputs ``[P, ..., D]`` to the ranks whose samples they are; returns ``[B, G,
            D]``.

    Attributes:
        groups: numbers of each tower's features, of all towers.
        num_outputs: G.
    """

    def __init__(
        self, towers: Towers, held: Sequence[int], to_home: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.groups = towers.groups
        self.num_outputs = towers.num_outputs
        self.towers = nn.ModuleDict({str(number): towers.towers[number] for number in held})
        self._num_features = [len(self.groups[number]) for number in held]
        self._to_home = to_home  # a function, which a deep copy of the model shares

    def forward(self, embedded: Tensor) -> Tensor:
        """From ``[P, F_here, N]``, features in the order of these towers, to ``[B, G, D]``."""
        parts = zip(self.towers.values(), embedded.split(self._num_features, 1), strict=True)
        return self._to_home(torch.cat([tower(part) for tower, part in parts], 1))


@dataclass(frozen=True, slots=True, eq=False)
class TowerOutputs:
    """What the towers of each group of hosts give, where they are placed there.

    Attributes:
        name: of the model's towers.
        towers: these.
        held: numbers of the towers of each group of hosts.
        widths: numbers a sample that those of a group give.
        width: of a vector.
    """

    name: str
    towers: Towers
    held: Sequence[Sequence[int]]
    widths: Sequence[int]
    width: int

    @classmethod
    def of(
        cls, model: nn.Module, tables: Sequence[Table], groups: Sequence[TablesHere]
    ) -> TowerOutputs | None:
        """Of a model on some tables, those of each group of hosts given.

        ``None`` for a model without towers, and for towers that pass through.

        Raises:
            ConfigError: where model and tables do not fit, see :func:`place_towers`.
        """
        named = [
            (name, module) for name, module in model.named_modules() if isinstance(module, Towers)
        ]
        if not named:
            return None
        if len(named) > 1:
            raise ConfigError(
                f"a model with {len(named)} Towers", "one", "run the others on what they give"
            )
        ((name, towers),) = named
        if all(isinstance(tower, PassThrough) for tower in towers.towers):
            return None
        held = _check(model, towers, tables, groups)
        dim = tables[0].dim
        shapes = [
            _output_shape(tower, len(group), dim)
            for tower, group in zip(towers.towers, towers.groups, strict=True)
        ]
        if len({width for _, width in shapes}) > 1:
            raise ConfigError(
                f"towers that give vectors of widths {[width for _, width in shapes]}", "one width"
            )
        widths = [sum(shapes[number][0] * shapes[number][1] for number in own) for own in held]
        return cls(name, towers, held, widths, shapes[0][1])


def place_towers(model: M, embeddings: Embeddings) -> M:
    """Let the modules of a model's towers run where their tables are; returns the model.

    This is for the exchange ``towers``. The model's :class:`~pibroch.models.Towers` then holds
    the part of this rank's group of hosts, whose gradients are summed over that group alone. Call
    it, then :func:`pibroch.data_parallel`, on every rank; from then on call the model with
    ``embeddings(batch)``, which gives what the towers here read. Under other exchanges, in one
    process, on hosts that are one group, without towers, and for towers that pass through, the
    model stays as it is, and so do its results.

    Args:
        model: the same on all ranks, with one ``Towers``, on the features of ``embeddings`` in
            their order.
        embeddings: of the exchange ``towers``, with ``groups`` as the model has them.

    Raises:
        ConfigError: for a model with several ``Towers`` or with other groups, for tables of several
            dims or that pool nothing, and for dropout on embeddings.
    """
    exchange = embeddings.exchange
    if not isinstance(exchange, TowersExchange):
        return model
    outputs = TowerOutputs.of(model, embeddings.tables, exchange.tables)
    if outputs is None:
        return model
    to_home = _to_home(exchange, outputs.widths, outputs.width)
    placed = PlacedTowers(outputs.towers, outputs.held[exchange.group], to_home)
    parent, _, last = outputs.name.rpartition(".")
    setattr(model.get_submodule(parent), last, placed)
    for tower in placed.towers.values():
        data_parallel(tower, exchange.members, reduction="sum")
    exchange.place_modules()
    return model


def _check(
    model: nn.Module, towers: Towers, tables: Sequence[Table], groups: Sequence[TablesHere]
) -> list[range]:
    """The towers of each group of hosts, by number.

    Raises:
        ConfigError: where model and tables do not fit.
    """
    if len({table.dim for table in tables}) > 1 or any(t.pooling == "none" for t in tables):
        raise ConfigError(
            "towers on tables of several dims, or that pool nothing", "pooled tables of one dim"
        )
    if isinstance(model, Model) and model.config.embedding_dropout:
        raise ConfigError(
            f"embedding_dropout {model.config.embedding_dropout} with towers that run before"
            " embeddings arrive",
            "0",
            "set model.embedding_dropout=0, or another exchange",
        )
    held = towers_of_groups(len(towers.groups), len(groups))
    readers = tuple(feature for table in tables for feature in table.features)
    model_features = [
        tuple(_names(readers, [towers.groups[number] for number in numbers])) for numbers in held
    ]
    exchange_features = [each.features for each in groups]
    if model_features != exchange_features:
        raise ConfigError(
            f"an exchange with features {exchange_features} on its groups of hosts",
            f"{model_features}, as the model's towers have them",
            "give embeddings `groups` as the model has them",
        )
    return held


def _names(readers: Sequence[str], groups: Sequence[Sequence[int]]) -> Iterator[str]:
    for group in groups:
        for number in group:
            if number >= len(readers):
                raise ConfigError(
                    f"feature {number} in a tower",
                    f"one of the {len(readers)} that embeddings have",
                )
            yield readers[number]


def _output_shape(tower: nn.Module, num_features: int, dim: int) -> tuple[int, int]:
    """Vectors that a tower gives, and their width."""
    was_training = tower.training
    with torch.no_grad():
        out = tower.eval()(torch.zeros(1, num_features, dim))
    tower.train(was_training)
    return out.shape[1], out.shape[2]


def _to_home(
    exchange: TowersExchange, widths: Sequence[int], width: int
) -> Callable[[Tensor], Tensor]:
    def to_home(outputs: Tensor) -> Tensor:
        peers = exchange.last
        num_samples = None if peers is None else sum(peers.sizes[rank] for rank in exchange.served)
        if peers is None or len(outputs) != num_samples:
            raise ConfigError(
                f"{len(outputs)} samples in towers, {num_samples} in the last lookup",
                "the batch looked up last",
                "call the model right after embeddings(batch), or give it the call",
            )
        outputs_at_home = _ToHome.apply(outputs.float().flatten(1), exchange, peers, widths)
        whole: Tensor = torch.cat(outputs_at_home, 1).unflatten(1, (-1, width)).to(outputs.dtype)
        return whole

    return to_home


class _ToHome(torch.autograd.Function):
    """Step (f), and the same backwards."""

    @staticmethod
    def forward(
        ctx: Any, outputs: Tensor, exchange: TowersExchange, peers: PeerBatch, widths: Sequence[int]
    ) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        ctx.peers = peers
        ctx.widths = widths
        return tuple(exchange.to_home(outputs.contiguous(), peers, widths))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return (
            ctx.exchange.to_peers([g.contiguous() for g in gradients], ctx.peers, ctx.widths),
            None,
            None,
            None,
        )
