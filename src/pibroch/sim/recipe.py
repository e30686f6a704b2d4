"""From a recipe to what is simulated: its tables, batches, exchange and dense model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pibroch.config import RunConfig
from pibroch.data import EncodedDataset, JaggedBatch
from pibroch.data.loader import Loader, batch_of
from pibroch.embedding import Table, TableGroup, features_of, group_tables
from pibroch.errors import ConfigError
from pibroch.exchange.alltoall.build import AllToAll
from pibroch.exchange.base import ExchangeOptions, options_of
from pibroch.exchange.layout import lay_out, plan_for
from pibroch.exchange.lookahead.build import Lookahead
from pibroch.exchange.retrieve.build import under_retrieve
from pibroch.exchange.towers.build import TowerLayout, Towers
from pibroch.exchange.towers.modules import TowerOutputs
from pibroch.exchange.towers.places import hosts_of
from pibroch.models import Towers as TowerModules
from pibroch.models import build_model
from pibroch.models.activations import activation_bytes
from pibroch.models.base import Model
from pibroch.models.flops import training_flops
from pibroch.planner import Plan
from pibroch.sim.counting import Job
from pibroch.sim.machine import DenseCost, Machine
from pibroch.sim.towers import ByTowers, PlacedModules, plan_of
from pibroch.train.optimizers import build_dense_optimizer, build_sparse_optimizer
from pibroch.train.session import build_tables, groups_of_towers

SAMPLES_AT_ONCE = 1 << 16
COPIES = 3
"""Of dense parameters: weights, gradients, and the buckets in which these travel."""


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """Memory of a dense model on each rank.

    Attributes:
        copies: of its parameters: weights, gradients, buckets in which these travel, and what the
            optimizer keeps.
        activations: of a step.
    """

    copies: float
    activations: float


@dataclass(frozen=True, slots=True)
class Workload:
    """What a recipe trains.

    Attributes:
        config: of the run.
        dataset: whose samples make the batches.
        tables: of all rows.
        groups: of these.
        seed: of the samples that ranks read.
    """

    config: RunConfig
    dataset: EncodedDataset
    tables: Sequence[Table]
    groups: Sequence[TableGroup]
    seed: int = 0

    @classmethod
    def of(cls, config: RunConfig, dataset: EncodedDataset, seed: int = 0) -> Workload:
        """From a configuration and its data.

        Raises:
            ConfigError: for tables that cannot be.
        """
        tables = build_tables(config, dataset.num_rows, dataset.schema.readers)
        optimizer = build_sparse_optimizer(config.embedding.optimizer, config.train.average)
        return cls(config, dataset, tables, group_tables(tables, optimizer), seed)

    def exchange(self, num_ranks: int, ranks_per_host: int = 1) -> str:
        """Whose steps so many ranks make.

        ``towers`` of hosts that are one group, and ``retrieve`` as soon as something is trained,
        make those of ``alltoall``, see note 0018.

        Raises:
            ConfigError: for one that is not simulated, or settings of it that are not.
        """
        section = self.config.embedding.exchange.for_ranks(num_ranks)
        if section.helpers():
            raise ConfigError(
                "embedding servers or a central oracle, which are not simulated",
                "ranks that hold and plan the rows",
                "leave `servers` and `oracle` out",
            )
        if section.name == "towers" and self._layout(num_ranks, ranks_per_host) is None:
            return "alltoall"
        # one rank's rows are its own under any
        return "alltoall" if section.name in ("local", "retrieve") else section.name

    def _layout(self, num_ranks: int, ranks_per_host: int) -> TowerLayout | None:
        """Who holds what under ``towers``; ``None`` under others, and where hosts are one group."""
        section = self.config.embedding.exchange
        if section.name != "towers":
            return None
        groups = groups_of_towers(self.config, section, features_of(self.tables))
        chosen = options_of(Towers, "towers", {**section.options({}), **groups})
        hosts = hosts_of(num_ranks, chosen.ranks_per_host or ranks_per_host)
        layout = TowerLayout.of(chosen, self.groups, hosts)
        return layout if len(layout.places.groups) > 1 else None

    def towers(self, num_ranks: int, ranks_per_host: int) -> ByTowers | None:
        """Who looks up what under ``towers``, and where modules of the model run.

        Hosts are those of the recipe where it says how many ranks are one.

        Raises:
            ConfigError: for towers that do not fit these hosts or the model.
        """
        layout = self._layout(num_ranks, ranks_per_host)
        if layout is None:
            return None
        model = self.model()
        outputs = TowerOutputs.of(model, self.tables, layout.here)
        if outputs is None:
            return ByTowers(layout.places, layout.here)
        return ByTowers(layout.places, layout.here, placed_modules(model, outputs))

    def job(
        self, num_ranks: int, batch_size: int, seed: int | None = None, ranks_per_host: int = 1
    ) -> Job:
        """For ranks that have so many samples each.

        Raises:
            ConfigError: for more ranks than rows, or a placement or plan that does not fit.
        """
        rows = sum(table.num_rows for table in self.tables)
        if num_ranks > rows:
            raise ConfigError(
                f"{num_ranks:,} ranks for {rows:,} rows", "at least one row a rank", "lower --hosts"
            )
        layout = self._layout(num_ranks, ranks_per_host)
        options = self.config.embedding.exchange.for_ranks(num_ranks).options({})
        if layout is not None:
            plan = plan_of(layout)
        else:
            placement = options.get("placement", "row_wise")
            if options.get("plan") is not None:
                placement = Plan.load(Path(options["plan"]))
            plan = plan_for(self.tables, placement, num_ranks, "ranks")
        if self.config.embedding.exchange.name == "retrieve":
            for group in self.groups:
                under_retrieve(lay_out(group.space, plan, rank=0))
        split = self.dataset.split("train")
        draws = self.seed

        def batch(step: int, rank: int) -> JaggedBatch:
            rng = np.random.default_rng([draws, step, rank])
            return batch_of(split, rng.integers(len(split), size=batch_size))

        def every_batch() -> Iterator[JaggedBatch]:
            for first in range(0, len(split), SAMPLES_AT_ONCE):
                yield batch_of(split, np.arange(first, min(first + SAMPLES_AT_ONCE, len(split))))

        def loader(rank: int) -> Loader:
            size = batch_size * num_ranks
            return Loader(split, size, shuffle=True, seed=draws, part=(rank, num_ranks))

        exchange, named = self._exchange(num_ranks, options)
        towers = self.towers(num_ranks, ranks_per_host)
        return Job(
            self.groups,
            plan,
            batch,
            exchange,
            named,
            None if towers is None else towers.modules,
            seed,
            ranks_per_host,
            loader if options.get("assign", "given") != "given" else None,
            every_batch,
        )

    def _exchange(
        self, num_ranks: int, options: dict[str, Any]
    ) -> tuple[ExchangeOptions | str, dict[str, Any]]:
        """With its options, or by name with them."""
        name = self.config.embedding.exchange.for_ranks(num_ranks).name
        if name == "towers":
            section = self.config.embedding.exchange
            groups = groups_of_towers(self.config, section, features_of(self.tables))
            return options_of(Towers, name, {**options, **groups}), {}
        if name == "lookahead":
            return options_of(Lookahead, name, options), {}
        if name in ("local", "alltoall", "retrieve"):
            known = {each.name for each in fields(AllToAll)} & options.keys()
            return AllToAll(**{name: options[name] for name in known}), {}
        return name, options

    def model(self) -> Model:
        """The dense model."""
        torch.manual_seed(self.config.seed)
        names = features_of(self.tables)
        schema = self.dataset.schema
        return build_model(
            self.config.model, len(schema.dense), len(names), names, len(schema.label_columns)
        )

    def model_bytes(self, num_samples: int) -> ModelBytes:
        """Memory of the dense model with so many samples a rank."""
        model = self.model()
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = torch.zeros(1)
        optimizer = build_dense_optimizer(self.config.optimizer, [parameter])
        optimizer.step()
        state = sum(
            value.nbytes
            for value in optimizer.state[parameter].values()
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape
        )
        copies = COPIES + state / parameter.nbytes + (self.config.train.average is not None)
        passes = self.config.train.accumulate
        return ModelBytes(copies, activation_bytes(model) * num_samples / passes)

    @property
    def model_key(self) -> str:
        """Under which a machine's file has the model's cost."""
        section = self.config.model.model_dump(mode="json")
        shape = [section, len(self.dataset.schema.dense), len(features_of(self.tables))]
        digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()
        return f"{self.config.model.name} {self.config.model.dim} {digest[:12]}"

    def dense_cost(self, machine: Machine, utilisation: float) -> tuple[DenseCost, str | None]:
        """What the dense model takes, and a note where it was not measured.

        Args:
            machine: on which.
            utilisation: share of a rate that is published or of other models.
        """
        if self.model_key in machine.dense:
            return machine.dense[self.model_key], None
        model = self.model()
        cost = dense_cost(model, machine, utilisation)
        rate = machine.flops_per_second * utilisation
        return cost, (
            f"the dense model was not measured on {machine.name}: {cost.flops / 1e6:.2f} MFLOP a"
            f" sample at {rate / 1e12:.3g} TFLOP/s"
        )


def dense_cost(model: Model, machine: Machine, utilisation: float) -> DenseCost:
    """What a dense model takes by its operations, at a share of a machine's rate."""
    flops = training_flops(model)
    sample = flops / (machine.flops_per_second * utilisation)
    of_towers = sample * towers_flops(model) / max(1, flops)
    return DenseCost(
        begin=(0.0, 0.0),
        forward=(0.0, sample / 3),
        backward=(0.0, sample * 2 / 3),
        rest=(0.0, 0.0),
        optimizer=0.0,
        flops=flops,
        early_bytes=parameter_bytes(model),
        late_bytes=0,
        towers_forward=(0.0, of_towers / 3),
        towers_backward=(0.0, of_towers * 2 / 3),
    )


def placed_modules(model: Model, outputs: TowerOutputs) -> PlacedModules:
    """The modules of a model's towers, by the groups of hosts that have their tables."""
    each = outputs.towers.towers
    flops = [training_flops(model, tower) for tower in each]
    num_bytes = [parameter_bytes(tower) for tower in each]
    all_flops = max(1, sum(flops))
    return PlacedModules(
        outputs.widths,
        [sum(flops[number] for number in held) / all_flops for held in outputs.held],
        [sum(num_bytes[number] for number in held) for held in outputs.held],
    )


def parameter_bytes(module: nn.Module) -> int:
    """Of float32 parameters."""
    return 4 * sum(parameter.numel() for parameter in module.parameters())


def towers_flops(model: Model) -> int:
    """Operations of a sample's training in the model's towers; 0 where it has none."""
    towers = (module for module in model.modules() if isinstance(module, TowerModules))
    return sum(training_flops(model, each) for each in towers)
