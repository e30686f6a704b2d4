"""Runs whose samples are assigned to ranks, by their rows or at random; one run on a rank."""

import numpy as np
import torch

import pibroch as pb
from cases import as_tensor, pieces_of
from pibroch.assignment import RankSchedule, Schedule, Verdict
from pibroch.data import EncodedDataset, Loader

BATCH = 37


class RandomAssigner:
    """Any ranks, of the right numbers; the same on all ranks."""

    def restart(self):
        self._rng = np.random.default_rng(5)

    def assign(self, batch, bounds):
        ranks = np.repeat(np.arange(len(bounds) - 1, dtype=np.int16), np.diff(bounds))
        self._rng.shuffle(ranks)
        return Verdict(ranks, 3, 4)


def tables_of(dataset):
    """Tables of several dims, pooled or not."""
    return [
        pb.Table(name, rows, (4, 8)[number % 2], pooling=("sum", "mean", "none")[number % 3])
        for number, (name, rows) in enumerate(dataset.num_rows.items())
    ]


def loader_of(dataset, ranks, assigner=None):
    """This rank's loader, perhaps with another core than the exchange's."""

    def fresh():
        part = ranks.rank, ranks.world_size
        return Loader(dataset.split("train"), BATCH, shuffle=True, seed=1, part=part)

    loader = fresh()
    if assigner is not None:
        loader.assignment = RankSchedule(ranks.rank, Schedule(fresh(), assigner))
    return loader


def places_of(batch):
    """Places of a batch's samples in the global batch."""
    if batch.assigned is not None:
        return batch.assigned.places
    return batch.first_sample + np.arange(batch.batch_size)


def loss_of(batch, out):
    """Mean loss of this rank's samples, of which no two count alike; padded where not pooled."""
    flat = as_padded(out)
    if not len(flat):
        return flat.sum()
    factor = torch.from_numpy(np.sin(1 + places_of(batch))).to(flat.dtype)
    return ((flat - factor[:, None]) ** 2 * (1 + batch.labels[:, None])).mean()


def as_padded(out):
    return as_tensor(out)


def train(channel, data, how, epochs=2, **options):
    """Train over some epochs, by an Adam that magnifies no rounding.

    Returns of each step the places and embeddings, and the pieces.

    Args:
        channel: of the rank.
        data: folder of a dataset.
        how: ``given``, ``rows`` or ``random``: who assigns samples.
        epochs: how many.
        **options: of the exchange.
    """
    dataset = EncodedDataset.open(data)
    embeddings = pb.Embeddings(
        tables_of(dataset),
        pb.Adam(lr=0.05, eps=1e-3),
        seed=3,
        channel=channel.ranks.open_channel(),
        assign="given" if how == "given" else "rows",
        **options,
    )
    ranks = channel.ranks
    loader = loader_of(dataset, ranks, RandomAssigner() if how == "random" else None)
    steps = []
    for _ in range(epochs):
        for batch in embeddings.feed(loader):
            out = embeddings(batch)
            steps.append((places_of(batch), as_padded(out).detach().numpy()))
            loss_of(batch, out).backward()
    return steps, pieces_of(embeddings), (embeddings.transfers, embeddings.transfers_given)


def go_on(channel, data, step):
    """The samples of the batches after a step, of a loader that goes on and of a fresh one."""
    dataset = EncodedDataset.open(data)
    embeddings = pb.Embeddings(
        tables_of(dataset),
        pb.SGD(lr=0.1),
        "lookahead",
        channel=channel.ranks.open_channel(),
        assign="rows",
    )
    loader = embeddings.assign(loader_of(dataset, channel.ranks))
    places = []
    for number, batch in enumerate(loader):
        if number == step:
            state = loader.state_at(batch.position)
        places.append(batch.assigned.places)
    fresh = loader_of(dataset, channel.ranks)
    fresh.load_state_dict(state)
    again = [batch.assigned.places for batch in embeddings.assign(fresh)]
    return places[step + 1 :], again


def refusal(channel, data, kind):
    """What is said where samples cannot be assigned."""
    dataset = EncodedDataset.open(data)
    ranks = channel.ranks
    tables = tables_of(dataset)
    try:
        embeddings = pb.Embeddings(
            tables,
            pb.SGD(lr=0.1),
            "alltoall",
            channel=ranks.open_channel(),
            assign="row" if kind == "word" else "rows",
            placement="row_wise_pooled" if kind == "pooled" else "row_wise",
        )
        batches = loader_of(dataset, ranks)
        if kind == "stream":
            batches = iter(batches)
        elif kind == "seed":
            batches.seed = ranks.rank
        elif kind == "part":
            batches.part = 0, 1
        elif kind == "move":
            embeddings.move_rows(pb.Plan.of(tables, ranks.world_size, "table_wise"))
        next(iter(embeddings.feed(batches)))
    except pb.errors.ConfigError as error:
        return str(error)
