"""The step that every exchange must reproduce.

Dense float64 tables, torch's autograd, no kernel of ours.
"""

from __future__ import annotations

import numpy as np
import torch

from cases import MOST_IDS
from pibroch.embedding import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam
from pibroch.kernels.scatter_update import naive

NAIVE = {SGD: naive.sgd, Adagrad: naive.adagrad, RowWiseAdagrad: naive.row_wise_adagrad}
NAIVE |= {Adam: naive.adam, RowWiseAdam: naive.row_wise_adam}


class Reference:
    """Records of all tables as float64; starts from the records of the exchange under test."""

    def __init__(self, embeddings):
        self.tables = embeddings.tables
        self.optimizers = embeddings.optimizers
        self._is_tensor = embeddings._output.is_tensor
        self._indices = embeddings.row_indices
        self._records = {}
        for view in embeddings.pieces():
            numbers = [np.array(view.weights), *(np.array(state) for state in view.state.values())]
            self._records[view.piece.table.name] = np.concatenate(numbers, 1).astype(np.float64)
        self.steps = 0

    @property
    def records(self):
        """All numbers, table by table, weights before state, as :func:`cases.records_of` does."""
        results = []
        for table in self.tables:
            widths = [table.dim, *self.optimizers[table.name].state_fields(table.dim).values()]
            results += [
                part.ravel()
                for part in np.split(self._records[table.name], np.cumsum(widths)[:-1], 1)
            ]
        return np.concatenate(results)

    def adopt(self, records):
        """Go on from how bfloat16 weights were rounded.

        Each of them is one of the two that enclose the exact one.

        Args:
            records: after a step, see :attr:`records`.
        """
        at = 0
        for table in self.tables:
            own = self._records[table.name]
            if table.dtype == "bfloat16":
                exact = own[:, : table.dim]
                result = records[at : at + table.num_rows * table.dim].reshape(-1, table.dim)
                spacing = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 1e-30))) - 7)
                assert (np.abs(result - exact) <= spacing + 2e-5).all()
                assert not (result.astype(np.float32).view(np.uint32) & 0xFFFF).any()
                own[:, : table.dim] = result
            at += own.size

    def step(self, batch, loss_of):
        """One step on the batch; returns the embeddings before it.

        They are ``[B, F, D]``, or have a row a sample.
        """
        self.steps += 1
        weights = {
            t.name: torch.tensor(self._records[t.name][:, : t.dim], requires_grad=True)
            for t in self.tables
        }
        pooled, touched = self._pool(weights, batch)
        loss_of(pooled).backward()
        for table in self.tables:
            optimizer = self.optimizers[table.name]
            all_of_table = weights[table.name].grad
            if type(optimizer) not in NAIVE:  # frozen
                continue
            hyper = optimizer.hyper(optimizer.lr, self.steps)
            for row in sorted(touched[table.name]):
                gradient = (
                    np.zeros(table.dim) if all_of_table is None else all_of_table[row].numpy()
                )
                NAIVE[type(optimizer)](self._records[table.name][row], gradient, hyper)
        return pooled.detach()

    def _pool(self, weights, batch):
        size = batch.batch_size
        touched = {table.name: set() for table in self.tables}
        features = []
        for table, key in [(each, key) for each in self.tables for key in each.features]:
            place = batch.keys.index(key)
            bags = []
            for b in range(size):
                begin = batch.offsets[place * size + b]
                end = batch.offsets[place * size + b + 1]
                ids = batch.values[begin:end].numpy()
                rows = self._indices[table.name].rows_of(ids)
                touched[table.name] |= set(rows.tolist())
                scale = torch.ones(len(rows), dtype=torch.float64)
                scale = scale if batch.weights is None else batch.weights[begin:end].double()
                scaled = weights[table.name][rows] * scale[:, None]
                if table.pooling == "none":
                    bags.append(
                        torch.nn.functional.pad(scaled, (0, 0, 0, MOST_IDS - len(rows))).flatten()
                    )
                    continue
                total = scaled.sum(0)
                bags.append(total / max(len(rows), 1) if table.pooling == "mean" else total)
            width = table.dim * (MOST_IDS if table.pooling == "none" else 1)
            features.append(
                torch.stack(bags) if bags else weights[table.name][:0].reshape(0, width)
            )
        return torch.stack(features, 1) if self._is_tensor else torch.cat(features, 1), touched
