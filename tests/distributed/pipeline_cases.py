"""What each rank does in the tests of :class:`pibroch.BoundedLagPipeline`."""

import random
import time

import numpy as np
import torch

import pibroch as pb
from pibroch.config.model import DLRMConfig
from pibroch.errors import ConfigError, DataError
from pibroch.models import build_model
from pibroch.planner.assignment import Assignment

FEATURES = ("red", "green", "blue", "black")
NUM_ROWS = (50, 7, 300, 20)
NUM_DENSE = 3
PLACEMENTS = {
    "row_wise": "row_wise",
    "table_wise": "table_wise",
    "pooled": "table_wise_pooled",
    "column_wise": "column_wise",
    "mixed": {
        "red": "replicated",
        "green": "table_wise_pooled",
        "blue": "column_wise",
        "": "row_wise",
    },
}


def plan_by_rows(num_shards):
    """Each row by its partition: homes all over, the first partition's rows copied to all."""
    draw = np.random.default_rng(1)
    parts = {
        name: np.sort(draw.integers(0, 6, rows)).astype(np.uint16)
        for name, rows in zip(FEATURES, NUM_ROWS, strict=True)
    }
    copies = np.zeros((6, num_shards), np.bool_)
    copies[0] = True
    return pb.Plan.by_rows(
        Assignment(parts, draw.integers(0, num_shards, 6).astype(np.uint16), copies)
    )


def make(channel, placement, dims=(8, 8, 8, 8), **options):
    """A DLRM, or for tables of several dims something over all of them, and its tables."""
    tables = [
        pb.Table(name, rows, dim, pooling="mean" if name == "blue" else "sum")
        for name, rows, dim in zip(FEATURES, NUM_ROWS, dims, strict=True)
    ]
    embeddings = pb.Embeddings(
        tables,
        pb.Adagrad(lr=0.1),
        "alltoall",
        channel=channel.ranks.open_channel(),
        placement=plan_by_rows(channel.ranks.world_size)
        if placement == "rows"
        else PLACEMENTS[placement],
        **options,
    )
    torch.manual_seed(5)
    if len(set(dims)) > 1:
        return Mixed(sum(dims)).eval(), embeddings.eval()
    config = DLRMConfig(dim=8, bottom=(16,), top=(16,))
    return build_model(config, NUM_DENSE, len(FEATURES)).eval(), embeddings.eval()


class Mixed(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = torch.nn.Linear(width + NUM_DENSE, 1)

    def forward(self, dense, embedded):
        return self.layer(torch.cat([embedded.cat(), dense], 1)).squeeze(1)


def make_batch(rank, number, weighted=False, size=None):
    """Ragged; some are empty."""
    choices = torch.Generator().manual_seed(1000 * rank + number)
    size = [0, 1, 5, 33][int(torch.randint(4, (), generator=choices))] if size is None else size
    lengths = torch.randint(0, 5, (len(FEATURES) * size,), generator=choices)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    limit = torch.repeat_interleave(torch.tensor(NUM_ROWS), torch.tensor([size] * len(FEATURES)))
    limits = torch.repeat_interleave(limit, lengths)
    values = (torch.rand(int(offsets[-1]), generator=choices) * limits).long()
    weights = torch.rand(len(values), generator=choices) if weighted else None
    return pb.JaggedBatch(
        torch.randn(size, NUM_DENSE, generator=choices),
        FEATURES,
        values,
        offsets,
        torch.zeros(size),
        weights=weights,
    )


def train_a_little(model, embeddings, rank):
    """So that rows differ from what they were made with."""
    embeddings.train()
    for number in range(3):
        batch = make_batch(rank, 500 + number, size=16)
        model(batch.dense, embeddings(batch)).square().sum().backward()
    model.zero_grad()
    embeddings.eval()


def synchronous(model, embeddings, batches):
    with torch.no_grad():
        return [model(batch.dense, embeddings(batch)).clone() for batch in batches]


def predictions(channel, placement, bounds, transport, dims=(8, 8, 8, 8), **options):
    """For each bound: whether bits, order and ids are those of synchronous inference.

    Also messages a batch and other rank.
    """
    rank = channel.ranks.rank
    size = channel.ranks.world_size
    if transport == "mpi":
        from mpi_start import start_mpi  # programs that import this file lack it

        start_mpi(channel.ranks)
    model, embeddings = make(channel, placement, dims, **options)
    train_a_little(model, embeddings, rank)
    batches = [make_batch(rank, number, weighted=number % 3 == 0) for number in range(14)]
    wanted = synchronous(model, embeddings, batches)
    actual = []
    for bound in bounds:
        pipeline = pb.BoundedLagPipeline(model, embeddings, bound, transport)
        done = []
        delays = random.Random(rank)
        for number, batch in enumerate(batches):
            time.sleep(delays.random() * 0.001)
            done += pipeline.submit(batch, f"request {number}")
            assert number + 1 - len(done) <= bound
        done += pipeline.drain()
        same = [torch.equal(each.logits, logits) for each, logits in zip(done, wanted, strict=True)]
        ids = [each.request_id for each in done] == [
            f"request {number}" for number in range(len(batches))
        ]
        channel.barrier()
        pipeline.close()
        per_batch = pipeline.num_messages / len(batches) / max(1, size - 1)
        actual.append((all(same) and ids, per_batch if size > 1 else 2))
    return actual


def unequal(channel, bound):
    """Ranks with 0, 5, 10, ... batches, twice over one pipeline."""
    rank = channel.ranks.rank
    model, embeddings = make(channel, "row_wise")
    batches = [make_batch(rank, number) for number in range(5 * rank)]
    channel.barrier()
    wanted = []
    for number in range(5 * (channel.ranks.world_size - 1)):
        batch = batches[number] if number < len(batches) else make_batch(rank, 0, size=0)
        wanted += synchronous(model, embeddings, [batch])
    pipeline = pb.BoundedLagPipeline(model, embeddings, bound)
    results = []
    for _ in range(2):
        done = list(pipeline.run(batches))
        results.append([each.request_id for each in done] == list(range(len(batches))))
        results.append(
            all(
                torch.equal(each.logits, logits) for each, logits in zip(done, wanted, strict=False)
            )
        )
    channel.barrier()
    pipeline.close()
    return all(results)


def bad_batches(channel, bound):
    """On rank 0 one batch has an id outside its table, one too few dense features.

    The others' are fine, and all of rank 1.
    """
    rank = channel.ranks.rank
    model, embeddings = make(channel, "mixed")
    batches = [make_batch(rank, number, size=6) for number in range(9)]
    wanted = synchronous(model, embeddings, batches)
    if rank == 0:
        values = batches[3].values.clone()
        values[2] = 10**6
        batches[3] = pb.JaggedBatch(
            batches[3].dense, FEATURES, values, batches[3].offsets, batches[3].labels
        )
        kept = batches[5]
        batches[5] = pb.JaggedBatch(
            kept.dense[:, 1:], FEATURES, kept.values, kept.offsets, kept.labels
        )
    pipeline = pb.BoundedLagPipeline(model, embeddings, bound)
    done = list(pipeline.run(batches))
    channel.barrier()
    pipeline.close()
    errors = {
        each.request_id: f"{type(each.error).__name__}: {each.error}"
        for each in done
        if each.error is not None
    }
    for each in done:
        if each.error is None:
            assert torch.equal(each.logits, wanted[each.request_id]) and len(each.scores()) == 6
        else:
            try:
                each.scores()
            except DataError as error:
                assert error is each.error
    return errors


def refused(channel):
    embeddings = pb.Embeddings([pb.Table("red", 5, 4)], pb.SGD(lr=1.0), "local")
    try:
        pb.BoundedLagPipeline(torch.nn.Identity(), embeddings)
    except ConfigError as error:
        exchange = str(error)
    _, embeddings = make(channel, "row_wise")
    try:
        pb.BoundedLagPipeline(torch.nn.Identity(), embeddings, "many")
    except ConfigError as error:
        return exchange, str(error)
    return None


def steps(channel, slow, most_delay_s, num_steps=100):
    """A pipeline that chooses its bound while one rank is slow, or all are now and then.

    The bound, who is named, messages a batch and other rank, and whether predictions, order and lag
    are right.
    """
    rank = channel.ranks.rank
    size = channel.ranks.world_size
    model, embeddings = make(channel, "row_wise")
    pipeline = pb.BoundedLagPipeline(model, embeddings)
    done = []
    lags = []
    batches = [make_batch(rank, number, size=3) for number in range(5)]
    wanted = synchronous(model, embeddings, batches)
    delays = random.Random(rank)
    for number in range(num_steps):
        time.sleep(0.01 if rank == slow else most_delay_s * delays.random())
        done += pipeline.submit(batches[number % 5])
        lags.append(number + 1 - len(done) - pipeline.bound)
    done += pipeline.drain()
    same = all(torch.equal(each.logits, wanted[number % 5]) for number, each in enumerate(done))
    ordered = [each.request_id for each in done] == list(range(num_steps))
    channel.barrier()
    pipeline.close()
    messages = pipeline.num_messages / num_steps / (size - 1)
    return pipeline.bound, pipeline.straggler, messages, same and ordered and max(lags) <= 0


def chosen_in_runs(channel):
    """Whether ranks with different numbers of batches end together.

    Whichever bound they choose on the way.
    """
    rank = channel.ranks.rank
    model, embeddings = make(channel, "row_wise")
    pipeline = pb.BoundedLagPipeline(model, embeddings)
    delays = random.Random(rank)
    counts = []

    def batches(count):
        for number in range(count):
            time.sleep(0.004 * delays.random())
            yield make_batch(rank, number, size=2)

    for count in (79 + rank, 3 * rank, 20):  # requests in all: 81 or so when the first run ends
        counts.append(len(list(pipeline.run(batches(count)))))
    channel.barrier()
    pipeline.close()
    return counts, pipeline.bound
