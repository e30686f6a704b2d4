"""A model with its lookups as one module of torch's own operations: encoded tensors to scores.

It is what can be traced and compiled; serving has faster lookups, in kernels.

Shape legend: B samples, F categorical features, D embedding width, V ids of a multi-hot feature, T
positions of a padded sequence, R rows of all tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from pibroch.data.schema import Schema
from pibroch.data.targets import scores_of
from pibroch.models.base import Model
from pibroch.models.losses import logit_labels
from pibroch.serve.export import SavedRows
from pibroch.serve.from_checkpoint import saved_dense
from pibroch.serve.inputs import DENSE, IDS, encoded_inputs
from pibroch.state.manifest import schema_of


@dataclass(frozen=True, slots=True)
class Rows:
    """Where a table's rows are among those of all tables.

    Attributes:
        first_row: of them.
        num_rows: of the table.
        raw: where ids are raw, those that have a row, rising, and the row of each within the table,
            int64 ``[U]``; ``None`` where ids are rows.
        of_others: the row within all tables of a raw id that has none.
    """

    first_row: int
    num_rows: int
    raw: tuple[Tensor, Tensor] | None
    of_others: int


class WholeModel(nn.Module):
    """Scores and logits, float32 ``[B]`` or of several tasks ``[B, T]``, of encoded samples.

    Called with the tensors that :func:`pibroch.serve.inputs.encoded_inputs` lists, in that order.
    An id outside its table, or lengths that do not sum to their values, raise RuntimeError.

    Args:
        schema: of the data.
        layers: above the embeddings.
        weights: of all tables, end to end, float32 ``[R + 1, D]``; the last row is zeros.
        tables: where in these each one's rows are.
        logit_labels: labels whose loss gives no probabilities.
    """

    def __init__(
        self,
        schema: Schema,
        layers: nn.Module,
        weights: Tensor,
        tables: Mapping[str, Rows],
        logit_labels: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.schema = schema
        self.logit_labels = logit_labels
        self.layers = layers
        self.tables = {
            feature: tables[name]
            for name, features in schema.readers.items()
            for feature in features
        }
        self.register_buffer("weights", weights)
        self.weights: Tensor
        self.inputs = tuple(each["name"] for each in encoded_inputs(schema))
        self.pools = not isinstance(layers, Model) or layers.pools

    @classmethod
    def of(cls, rows: SavedRows) -> Self:
        """Of a verified checkpoint; all rows are in memory then."""
        manifest = rows.manifest
        dim = next(iter(manifest.tables.values())).dim
        num_rows = rows.num_rows
        total = sum(num_rows.values())
        weights = torch.zeros(total + 1, dim)
        tables = {}
        start = 0
        for name, count in num_rows.items():
            first_row = start
            for some in rows.chunks(name, range(count)):
                weights[start : start + len(some)] = torch.from_numpy(some)
                start += len(some)
            ids = rows.ids.get(name)
            raw = None if ids is None else (torch.tensor(ids.ids), torch.tensor(ids.rows))
            of_others = first_row if name in rows.with_unknown_row else total
            tables[name] = Rows(first_row, count, raw, of_others)
        schema = schema_of(manifest)
        layers = saved_dense(rows.folder, manifest)
        of_logits = logit_labels(manifest.config, schema)
        return cls(schema, layers, weights, tables, of_logits).eval()

    @property
    def dim(self) -> int:
        """D."""
        return self.weights.shape[1]

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.weights) - 1

    def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and logits of tensors in the order of ``inputs``."""
        given = dict(zip(self.inputs, tensors, strict=True))
        bags: dict[str, Tensor | Bags] = {}
        num_single = 0
        for feature in self.schema.categorical:
            name = feature.name
            if feature.multi_hot:
                row_ids = self._row_ids(name, given[f"{name}.values"])
                bags[name] = Bags(self.weights, row_ids, given[f"{name}.lengths"])
            else:
                rows = self._row_ids(name, given[IDS][:, num_single])
                bags[name] = functional.embedding(rows, self.weights)
                num_single += 1
        size = next(each.shape[0] for key, each in given.items() if not key.endswith(".values"))
        dense = given[DENSE] if self.schema.dense else self.weights.new_zeros(size, 0)
        embedded: object = bags
        if self.pools:
            pooled = [bags[name] for name in self.schema.keys_by_table]
            embedded = torch.stack(
                [each.summed() if isinstance(each, Bags) else each for each in pooled], 1
            )
        logits: Tensor = self.layers(dense, embedded)
        return scores_of(logits, self.schema, self.logit_labels), logits

    def _row_ids(self, feature: str, ids: Tensor) -> Tensor:
        """Of ids ``[V]`` their rows within all tables ``[V]``."""
        table = self.tables[feature]
        if table.raw is None:
            is_row = (ids >= 0) & (ids < table.num_rows)
            _check(is_row.all(), f"got an id of {feature} outside 0 to {table.num_rows - 1}")
            return ids + table.first_row
        known, rows = table.raw
        if not len(known):
            return torch.full_like(ids, table.of_others)
        places = torch.searchsorted(known, ids.contiguous()).clamp(max=len(known) - 1)
        return torch.where(known[places] == ids, rows[places] + table.first_row, table.of_others)


class Bags:
    """The ids of a multi-hot feature, as models read them that pool and models that do not.

    Args:
        weights: ``[R + 1, D]``, whose last row is zeros.
        row_ids: int64 ``[V]``, sample by sample.
        lengths: ids of each sample, int64 ``[B]``.
    """

    def __init__(self, weights: Tensor, row_ids: Tensor, lengths: Tensor) -> None:
        fits = (lengths.sum() == row_ids.shape[0]) & (lengths >= 0).all()
        _check(fits, "got lengths that do not sum to the number of their values")
        self._weights = weights
        self._row_ids = row_ids
        self._lengths = lengths
        self._offsets = functional.pad(lengths.cumsum(0), (1, 0))

    def summed(self) -> Tensor:
        """The sum of each sample's vectors, ``[B, D]``."""
        return functional.embedding_bag(
            self._row_ids, self._weights, self._offsets, mode="sum", include_last_offset=True
        )

    def padded(self, length: int, last: bool = False) -> Tensor:
        """As :meth:`pibroch.exchange.output.JaggedEmbeddings.padded`, ``[B, T, D]``."""
        first = self._offsets[:-1, None]
        end = self._offsets[1:, None]
        places = torch.arange(length) + (end - length if last else first)
        has_id = (places >= first) & (places < end)
        zeros = len(self._weights) - 1
        row_ids = functional.pad(self._row_ids, (0, 1), value=zeros)
        row_ids = row_ids[torch.where(has_id, places, self._row_ids.shape[0])]
        return functional.embedding(row_ids, self._weights)

    def mask(self, length: int, last: bool = False) -> Tensor:
        """Which positions of :meth:`padded` hold an id, bool ``[B, T]``."""
        places = torch.arange(length)
        return (places.flip(0) if last else places) < self._lengths[:, None]


def _check(condition: Tensor, message: str) -> None:
    """An assertion that stays in what is compiled."""
    torch.ops.aten._assert_async.msg(condition, message)
