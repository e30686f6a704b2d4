"""An exchange of one's own: rank 0 holds all rows. See docs/extending.md.

torchrun --standalone --nproc-per-node 2 examples/own_exchange.py
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import pibroch as pb
from pibroch.config.exchange import ExchangeSection, ExchangeSpec, register_exchange
from pibroch.embedding import MemoryShard
from pibroch.embedding.rows import group_rows, read_rows, update_rows
from pibroch.exchange.agreement import and_then_fillers, bad_batch
from pibroch.exchange.base import Exchange, Rates, Setup
from pibroch.exchange.rows import BatchIds, DistinctRows, pool, resolve, room_for
from pibroch.kernels.arrays import Ints, Records


@dataclass(frozen=True)
class RowRequest:
    """What a lookup leaves for its update, for one group of tables.

    Attributes:
        here: this rank's part of the batch, by distinct row.
        rows: of all ranks' requests, in rank order; empty but on rank 0.
        counts: how many of them each rank requests.
        share: this rank's share of the global batch.
    """

    here: DistinctRows
    rows: Ints
    counts: list[int]
    share: float


class AskFirst(Exchange[list[RowRequest]]):
    """Rows travel from rank 0 and back to it.

    Tables of one kind after the other, and nothing overlaps.
    """

    def __init__(self, setup: Setup) -> None:
        self._groups = setup.groups
        self._channel = setup.channel
        self._rank = setup.channel.ranks.rank
        self._world_size = setup.channel.ranks.world_size
        self._held = [
            MemoryShard.whole(each.space.tables, each.optimizer, setup.seed)
            if self._rank == 0
            else MemoryShard([], each.space.dim, each.optimizer, setup.seed)
            for each in setup.groups
        ]
        self.shards = self._held

    def lookup(
        self, batch: pb.JaggedBatch, trains: bool, averaged_at: int | None = None
    ) -> tuple[list[Tensor], list[RowRequest]]:
        """A tensor and a handle for each group of tables that are alike."""
        resolved = [resolve(each, batch.pick(each.space.features)) for each in self._groups]
        problem = next((problem for _, problem in resolved if problem is not None), None)
        error = bad_batch(self._channel, problem)
        if error is not None:
            raise error
        fetched = [
            self._fetch(number, ids, batch.batch_size, averaged_at)
            for number, (ids, _) in enumerate(resolved)
        ]
        room = room_for(self._groups, batch)
        pooled = [
            pool(request.here.ids, weights, request.here.places, weights.shape[1], room)
            for weights, request in fetched
        ]
        return pooled, [request for _, request in fetched]

    def _fetch(
        self, number: int, ids: BatchIds, num_samples: int, averaged_at: int | None
    ) -> tuple[Records, RowRequest]:
        """Every rank says how large its part is, then requests its distinct rows."""
        group = self._groups[number]
        shard = self._held[number]
        here = DistinctRows.of(ids)
        sizes = self._channel.gather([num_samples, len(here.grouped.rows)])
        counts = [count for _, count in sizes]
        rows = self._to_first(torch.from_numpy(here.grouped.rows), counts).numpy()
        answers = torch.from_numpy(read_rows(shard, group.optimizer, rows, averaged_at))
        sent, received = self._splits(counts)
        weights = self._channel.all_to_all(answers, received, sent)
        share = num_samples / max(1, sum(size for size, _ in sizes))
        return weights.numpy(), RowRequest(here, rows, counts, share)

    def update(self, handle: list[RowRequest], gradients: Sequence[Tensor], rates: Rates) -> None:
        """Rank 0 adds the ranks' gradients of a row in rank order, and updates the row once."""
        for number, (request, group) in enumerate(zip(handle, self._groups, strict=True)):
            sums = torch.from_numpy(request.here.sums(gradients[number], request.share))
            gradients_of_ranks = self._to_first(sums, request.counts).numpy()
            hyper = group.optimizer.hyper(rates.learning_rates[number], rates.step)
            update_rows(
                self._held[number],
                group.optimizer,
                group_rows(request.rows),
                gradients_of_ranks,
                hyper,
                rates.step,
            )

    def feed(self, batches: Iterable[pb.JaggedBatch], trains: bool) -> Iterator[pb.JaggedBatch]:
        """Ranks without a batch get empty ones until all have run out."""
        features = tuple(
            dict.fromkeys(name for each in self._groups for name in each.space.features)
        )
        for batch, is_real in and_then_fillers(batches, features):
            if not any(self._channel.gather(is_real)):
                return
            yield batch

    def _to_first(self, rows: Tensor, counts: list[int]) -> Tensor:
        sent, received = self._splits(counts)
        return self._channel.all_to_all(rows, sent, received)

    def _splits(self, counts: list[int]) -> tuple[list[int], list[int]]:
        """Rows to each rank and from each rank, where every rank sends its rows to rank 0."""
        sent = [counts[self._rank]] + [0] * (self._world_size - 1)
        received = counts if self._rank == 0 else [0] * self._world_size
        return sent, received


class AskFirstSection(ExchangeSection):
    """``[embedding.exchange]`` of a recipe: nothing to choose but the name."""


SPEC = ExchangeSpec("ask_first", "rank 0 holds all rows, and sends them", AskFirstSection, AskFirst)
register_exchange(SPEC)


def main() -> None:
    """Train on it: each rank has its own samples, all have one model."""
    dist.init_process_group("gloo")
    torch.manual_seed(int(os.environ["RANK"]))
    ids = torch.randint(0, 50, (1, 4000)) ** 2 // 50
    labels = (ids[0] % 3 == 0).float()
    embeddings = pb.Embeddings([pb.Table("item", 50, 8)], pb.Adagrad(lr=0.3), exchange="ask_first")
    batches = [
        pb.JaggedBatch.from_one_hot(
            torch.zeros(200, 0), ["item"], ids[:, at : at + 200], labels[at : at + 200]
        )
        for at in range(0, 4000, 200)
    ]
    for batch in embeddings.feed(batches * 5):
        logits = embeddings(batch)[:, 0].sum(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()
    print(
        f"rank {dist.get_rank()}: log loss {loss.item():.3f}, {embeddings.num_bytes} bytes of rows"
        " here"
    )
    assert np.isfinite(loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
