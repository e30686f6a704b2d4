"""Batches, tables and optimizers of the conformance suite; one run of a case on a rank."""

import logging
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import exchanges  # noqa: F401, registers the example's
import numpy as np
import torch
from reversed_rows import Reversed

import pibroch as pb
from pibroch import rpc
from pibroch.data import EncodedDataset, JaggedBatch, Loader
from pibroch.embedding import optimizers_of
from pibroch.embedding.row_set import ids_of
from pibroch.embedding.rows import update_rows
from pibroch.errors import NotAllowedError
from pibroch.exchange.compression import exchange_compressed
from pibroch.exchange.lookahead import server_homes
from pibroch.exchange.lookahead import window as lookahead_window
from pibroch.exchange.lookahead.announcement import (
    Announcer,
    BytesByPurpose,
    Prepared,
    PreparedLane,
)
from pibroch.exchange.lookahead.oracle.kernels import varint
from pibroch.exchange.messages import together
from pibroch.exchange.wire import RowWire
from pibroch.state.tensor_file import write_tensors

OPTIMIZERS = {
    "sgd": pb.SGD(lr=0.5, weight_decay=0.01),
    "adagrad": pb.Adagrad(lr=0.2, weight_decay=0.01),
    "row_wise_adagrad": pb.RowWiseAdagrad(lr=0.2),
    "adam": pb.Adam(lr=0.1, weight_decay=0.01),
    "row_wise_adam": pb.RowWiseAdam(lr=0.1, weight_decay=0.01),
}
SHAPES = {
    "one_feature": [pb.Table("a", 9, 4)],
    "odd_dims": [pb.Table("a", 9, 5), pb.Table("b", 1, 5), pb.Table("c", 400, 5)],
    "mean": [pb.Table("a", 9, 16, pooling="mean"), pb.Table("b", 30, 16)],
    "shared": [
        pb.Table("a", 9, 8, features=("x", "y"), initializer=pb.Normal(1.0)),
        pb.Table("b", 30, 8, pooling="mean"),
    ],
    # widths, pooling, optimizers and indices of their own; x reads two tables, d is read by two
    # features
    "any": [
        pb.Table("a", 9, 8, features=("x", "y"), rows=Reversed()),
        pb.Table("b", 30, 16, pooling="mean"),
        pb.Table("c", 400, 32, rows=Reversed()),
        pb.Table("d", 50, 64, pooling="none", features=("x", "s")),
        pb.Table("e", 20, 128, rows=Reversed()),
        pb.Table("f", 12, 8),
        pb.Table("g", 7, 16, pooling="none", rows=Reversed()),
    ],
}
SHAPES[
    "narrow"
] = [  # weights of 16 bits, and others; an odd dim, whose last float holds one weight
    pb.Table("a", 9, 5, features=("x", "y"), dtype="bfloat16"),
    pb.Table("b", 30, 5, pooling="mean", dtype="bfloat16"),
    pb.Table("c", 40, 5),
    pb.Table("d", 50, 16, pooling="none", dtype="bfloat16"),
]
OF_TABLE = {
    "d": pb.Adagrad(lr=0.3),
    "e": pb.Frozen(),
    "f": pb.Adam(lr=0.05, weight_decay=0.1, decoupled=True, max_element=0.5),
}
MOST_IDS = 4  # in a bag
SIZES = [
    8,
    3,
    1,
    0,
    13,
    2,
]  # of global batches: the last of an epoch is ragged, and one may be empty


def optimizers(name, shape):
    """An optimizer for all tables of a shape, or for some of them others."""
    return {"": OPTIMIZERS[name], **OF_TABLE} if shape == "any" else OPTIMIZERS[name]


def as_tensor(out):
    """All that a lookup gave, as one tensor with a row a sample.

    Bags that are not pooled are padded.
    """
    if isinstance(out, torch.Tensor):
        return out
    parts = [
        part if isinstance(part, torch.Tensor) else part.padded(MOST_IDS).flatten(1)
        for part in out.values()
    ]
    return torch.cat(parts, 1)


def records_of(pieces, tables, optimizer):
    """All numbers of all rows, from pieces as runs return them.

    What several pieces hold must have the same bits.
    """
    results = {}
    by_table = optimizers_of(tables, optimizer)
    for table in tables:
        widths = {"weights": table.dim, **by_table[table.name].state_fields(table.dim)}
        results[table.name] = {
            field: np.full((table.num_rows, width), np.nan) for field, width in widths.items()
        }
    for piece, weights, state in pieces:
        rows = ids_of(piece.rows)
        for field, numbers in {"weights": weights, **state}.items():
            target = results[piece.table.name][field]
            columns = (
                slice(piece.columns.start, piece.columns.stop)
                if target.shape[1] == piece.table.dim
                else slice(None)
            )
            before = target[rows, columns]
            assert np.isnan(before).all() or np.array_equal(before, numbers), (
                f"replicas of {piece.table.name} differ"
            )
            target[rows, columns] = numbers
    flat = np.concatenate(
        [numbers.ravel() for fields in results.values() for numbers in fields.values()]
    )
    assert not np.isnan(flat).any(), "rows that nobody holds"
    return flat


def pieces_of(embeddings):
    """Copies of what is here."""
    return [
        (v.piece, v.weights.copy(), {f: s.copy() for f, s in v.state.items()})
        for v in embeddings.pieces()
    ]


def ragged_batch(tables, size, seed, weighted=False, one_hot=False):
    """Bags of 0 to 4 ids, skewed to low ids, with duplicates inside bags and between them."""
    rng = np.random.default_rng(seed)
    readers = {}  # of each feature, how many rows all its tables have
    for feature, table in [(feature, each) for each in tables for feature in each.features]:
        readers[feature] = min(table.num_rows, readers.get(feature, table.num_rows))
    values = []
    lengths = []
    for num_rows in readers.values():
        counts = np.ones(size, np.int64) if one_hot else rng.integers(0, MOST_IDS + 1, size)
        lengths.append(counts)
        values.append((rng.random(counts.sum()) ** 3 * num_rows).astype(np.int64))
    values = torch.from_numpy(np.concatenate(values))
    offsets = torch.from_numpy(
        np.concatenate([[0], np.concatenate(lengths).cumsum()]).astype(np.int64)
    )
    weights = torch.from_numpy(rng.random(len(values)).astype(np.float32)) if weighted else None
    keys = tuple(readers)
    batch = pb.JaggedBatch(torch.zeros(size, 0), keys, values, offsets, torch.zeros(size), weights)
    batch.validate()
    return batch


def batch_of_kind(tables, size, seed, kind):
    return ragged_batch(tables, size, seed, weighted=kind == "weighted", one_hot=kind == "one_hot")


def part_of(batch, first, last):
    """Samples ``first`` to ``last`` of a batch, as a rank gets them."""
    size = batch.batch_size
    lengths = batch.lengths().view(len(batch.keys), -1)[:, first:last]
    spans = [
        slice(int(batch.offsets[f * size + first]), int(batch.offsets[f * size + last]))
        for f in range(len(batch.keys))
    ]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.reshape(-1).cumsum(0)])
    weights = None if batch.weights is None else torch.cat([batch.weights[span] for span in spans])
    values = torch.cat([batch.values[span] for span in spans])
    return JaggedBatch(
        batch.dense[first:last], batch.keys, values, offsets, batch.labels[first:last], weights
    )


def loss_of(pooled, size=None, first=0):
    """Mean loss of the samples from ``first`` on out of ``size``.

    No two samples, features or columns count alike.
    """
    pooled = as_tensor(pooled)
    size = len(pooled) if size is None else size
    shape = (size, *pooled.shape[1:])
    mixer = torch.linspace(-1, 2, int(np.prod(shape)), dtype=pooled.dtype).reshape(shape)[
        first : first + len(pooled)
    ]
    return ((pooled - mixer) ** 2 * (1 + mixer**2)).mean() if pooled.numel() else pooled.sum()


def run_steps(channel, name, shape, kind, exchange="alltoall", **options):
    """Train one case; returns this rank's pooled embeddings of each step, and its pieces.

    Between steps there are lookups without an update, as evaluation makes them, with and without
    feed.
    """
    rank = channel.ranks.rank
    world = channel.ranks.world_size
    tables = SHAPES[shape]
    embeddings = pb.Embeddings(
        tables, optimizers(name, shape), exchange=exchange, seed=3, channel=channel, **options
    )
    bounds = [[size * r // world for r in range(world + 1)] for size in SIZES]
    parts = [
        part_of(batch_of_kind(tables, size, step, kind), bounds[step][rank], bounds[step][rank + 1])
        for step, size in enumerate(SIZES)
    ]
    pooled_of_step = []
    for step, batch in enumerate(embeddings.feed(parts)):
        if step == 2:
            with torch.no_grad():
                again = as_tensor(embeddings(parts[0]))
        pooled = embeddings(batch)
        if step == 2:
            with torch.no_grad():
                assert torch.equal(as_tensor(embeddings(parts[0])), again)
        pooled_of_step.append(as_tensor(pooled).detach())
        loss_of(pooled, SIZES[step], bounds[step][rank]).backward()
    return pooled_of_step, pieces_of(embeddings)


def watch_steps(channel, name, shape, kind, **options):
    """As :func:`run_steps`, but with the pieces after each step and nothing between steps."""
    rank = channel.ranks.rank
    world = channel.ranks.world_size
    tables = SHAPES[shape]
    embeddings = pb.Embeddings(tables, optimizers(name, shape), seed=3, channel=channel, **options)
    results = []
    for step, size in enumerate(SIZES):
        first = size * rank // world
        last = size * (rank + 1) // world
        pooled = embeddings(part_of(batch_of_kind(tables, size, step, kind), first, last))
        loss_of(pooled, size, first).backward()
        results.append((as_tensor(pooled).detach(), pieces_of(embeddings)))
    return results


def announce(channel, num_rows):
    """Tell of batches with so many rows each, on each rank.

    Returns whether all rows were heard, and messages a batch.
    """
    sent = []
    rank = channel.ranks.rank
    size = channel.ranks.world_size

    def all_to_all(*args):
        sent[-1] += 1
        return channel.all_to_all(*args)

    counting = SimpleNamespace(all_to_all=all_to_all, ranks=channel.ranks)
    announcer = Announcer(counting, True, BytesByPurpose())
    is_right = True
    for number, of_rank in enumerate(num_rows):
        rows = [
            np.unique(np.random.default_rng([number, r]).integers(1 << 40, size=of_rank[r]))
            for r in range(size)
        ]
        encoded = np.empty(varint.MAX_BYTES * len(rows[rank]), np.uint8)
        encoded = encoded[: varint.encode(rows[rank], encoded)]
        lane = PreparedLane(None, SimpleNamespace(rows=rows[rank]), None, encoded, None)
        here = Prepared([lane], number + rank, 0, None)
        sent.append(0)
        (heard,) = together(RowWire(counting), [announcer.announce(here, rank == 0)])
        is_right &= heard.is_real and all(map(np.array_equal, heard.rows[0], rows))
        is_right &= heard.share == (number + rank) / max(1, sum(number + r for r in range(size)))
    return is_right, sent


def meet_a_bad_batch(channel, bad_rank, exchange="alltoall", **options):
    """What a step says when one rank's batch holds an id outside its table.

    Then a good step, and all pieces.
    """
    rank = channel.ranks.rank
    tables = SHAPES["shared"]
    embeddings = pb.Embeddings(
        tables, pb.SGD(lr=0.1), exchange=exchange, seed=3, channel=channel, **options
    )
    before = [view.weights.copy() for view in embeddings.pieces()]
    batch = ragged_batch(tables, 6, seed=rank, one_hot=True)
    good = int(batch.values[6 + 4])
    if rank == bad_rank:
        batch.values[6 + 4] = 9  # feature y, sample 4
    try:
        embeddings(batch)
        message = None
    except pb.errors.DataError as error:
        message = type(error).__name__, str(error)
    unchanged = all(
        np.array_equal(a, view.weights) for a, view in zip(before, embeddings.pieces(), strict=True)
    )
    batch.values[6 + 4] = good
    loss_of(embeddings(batch)).backward()
    return (
        message,
        unchanged,
        any((a != view.weights).any() for a, view in zip(before, embeddings.pieces(), strict=True)),
    )


def lookup_twice_then_update_twice(channel, exchange="alltoall", **options):
    """Two lookups before the first update see the same rows, with and without feed.

    Returns this rank's pieces.
    """
    tables = SHAPES["odd_dims"]
    pieces = []
    messages = []
    logger = logging.getLogger("pibroch.exchange.embeddings")
    listen = lambda record: messages.append(record.msg)  # noqa: E731
    logger.addFilter(listen)
    for fed in (False, True):
        embeddings = pb.Embeddings(
            tables, pb.Adagrad(lr=0.5), exchange=exchange, seed=3, channel=channel, **options
        )
        batches = [ragged_batch(tables, 5, seed=step + channel.ranks.rank) for step in range(6)]
        batches = iter(embeddings.feed(batches) if fed else batches)
        for first, second in zip(batches, batches, strict=True):
            losses = [loss_of(embeddings(first)), loss_of(embeddings(second))]
            for loss in losses:
                loss.backward()
        pieces.append([view.weights.copy() for view in embeddings.pieces()])
        assert (
            sum("embeddings.feed" in text for text in messages) == embeddings.exchange.reads_ahead
        )  # once, without feed
    logger.removeFilter(listen)
    return pieces


def run_out_of_batches(channel, num_batches, exchange="alltoall", **options):
    """Feed as many batches as ``num_batches`` says for this rank.

    Returns their sizes as handed out, and the pieces.
    """
    tables = SHAPES["odd_dims"]
    embeddings = pb.Embeddings(
        tables, pb.Adagrad(lr=0.5), exchange=exchange, seed=3, channel=channel, **options
    )
    batches = [
        ragged_batch(tables, 3 + i, seed=i + channel.ranks.rank)
        for i in range(num_batches[channel.ranks.rank])
    ]
    sizes = []
    for batch in embeddings.feed(batches):
        sizes.append(batch.batch_size)
        loss_of(embeddings(batch)).backward()
    return sizes, [view.weights.copy() for view in embeddings.pieces()], embeddings.step


def read_ahead(channel, sizes, ahead_bytes, exchange="alltoall", **options):
    """Feed batches whose sizes on rank 1 are ``sizes``, small ones elsewhere.

    Returns how many are read ahead, and pieces.
    """
    tables = SHAPES["odd_dims"]
    rank = channel.ranks.rank
    embeddings = pb.Embeddings(
        tables, pb.Adagrad(lr=0.5), exchange=exchange, seed=3, channel=channel, **options
    )
    num_read = 0
    ahead = []
    before = lookahead_window.AHEAD_BYTES

    def batches():
        nonlocal num_read
        for i, size in enumerate(sizes):
            num_read += 1
            yield ragged_batch(tables, size if rank == 1 else 3, seed=i + rank)

    lookahead_window.AHEAD_BYTES = ahead_bytes
    try:
        for num_handed_out, batch in enumerate(embeddings.feed(batches())):
            ahead.append(num_read - num_handed_out - 1)
            loss_of(embeddings(batch)).backward()
    finally:
        lookahead_window.AHEAD_BYTES = before
    return ahead, [view.weights.copy() for view in embeddings.pieces()]


def run_stream(
    channel, name, sizes, exchange="alltoall", look_at=(), forget_at=(), shape="odd_dims", **options
):
    """Train on drawn global batches of ``sizes``, all fed.

    Returns the pooled embeddings of each step, and the pieces.

    After the steps in ``look_at`` the pieces are looked at; after those in ``forget_at`` they are
    written anew.
    """
    embeddings, pooled_of_step = _stream(
        channel, name, sizes, exchange, look_at, forget_at, shape, **options
    )
    return pooled_of_step, pieces_of(embeddings)


def run_alone(channel, name, sizes, exchange, look_at=()):
    """As :func:`run_stream`, by an exchange of one process."""
    embeddings = pb.Embeddings(SHAPES["odd_dims"], OPTIMIZERS[name], exchange=exchange, seed=3)
    pooled_of_step = []
    for step, size in enumerate(sizes):
        pooled = embeddings(ragged_batch(SHAPES["odd_dims"], size, step, weighted=True))
        pooled_of_step.append(pooled.detach())
        loss_of(pooled).backward()
    return pooled_of_step, pieces_of(embeddings)


def bytes_of_a_stream(channel, *args, **options):
    """Train as :func:`run_stream`; returns the bytes that this rank sent, by purpose."""
    embeddings, _ = _stream(channel, *args, **options)
    embeddings.exchange.flush()
    return embeddings.exchange.report().bytes_by_purpose


def gather_and_spread(channel, placement):
    """All tables with optimizer state after some steps, gathered twice.

    Between the two they are spread into other embeddings.
    """
    tables = SHAPES["odd_dims"]
    rank = channel.ranks.rank

    def embeddings(seed):
        return pb.Embeddings(
            tables,
            pb.Adam(lr=0.1),
            exchange="alltoall",
            seed=seed,
            channel=channel,
            placement=placement,
        )

    trained = embeddings(3)
    other = embeddings(4)
    for step in range(3):
        loss_of(trained(ragged_batch(tables, 5, seed=10 * step + rank))).backward()
    state = trained.full_state_dict(row_state=True)
    other.load_full_state_dict(state)
    again = other.full_state_dict(row_state=True)
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())
    return {name: tensor.numpy() for name, tensor in state.items()}


def count_sent(channel, data, plan, replicas, steps, per_rank):
    """Train on each rank's part of a data set; returns the bytes that this rank sent to each."""
    ranks = channel.ranks
    dataset = EncodedDataset.open(data)
    tables = [pb.Table(name, rows, 8) for name, rows in dataset.num_rows.items()]
    embeddings = pb.Embeddings(
        tables,
        pb.SGD(lr=0.1),
        "alltoall",
        channel=ranks.open_channel(),
        placement=plan,
        replicas=replicas,
    )
    loader = Loader(
        dataset.split("train"), per_rank * ranks.world_size, part=(ranks.rank, ranks.world_size)
    )
    embeddings.exchange.flush()
    before = dict(ranks.traffic.sent_to)
    for batch in islice(loader, steps):
        embeddings(batch).sum().backward()
    embeddings.exchange.flush()
    return [ranks.traffic.sent_to[peer] - before.get(peer, 0) for peer in range(ranks.world_size)]


def _stream(
    channel, name, sizes, exchange="alltoall", look_at=(), forget_at=(), shape="odd_dims", **options
):
    rank = channel.ranks.rank
    world = channel.ranks.world_size
    tables = SHAPES[shape]
    embeddings = pb.Embeddings(
        tables, optimizers(name, shape), exchange=exchange, seed=3, channel=channel, **options
    )
    bounds = [[size * r // world for r in range(world + 1)] for size in sizes]

    def parts():
        for step, size in enumerate(sizes):
            yield part_of(
                ragged_batch(tables, size, step, weighted=True),
                bounds[step][rank],
                bounds[step][rank + 1],
            )

    pooled_of_step = []
    for step, batch in enumerate(embeddings.feed(parts())):
        pooled = embeddings(batch)
        pooled_of_step.append(as_tensor(pooled).detach())
        loss_of(pooled, sizes[step], bounds[step][rank]).backward()
        if step in look_at or step in forget_at:
            for view in embeddings.pieces():
                if step in forget_at:
                    view.weights[:] *= 1.5
        if step in forget_at:
            embeddings.exchange.forget()
    return embeddings, pooled_of_step


def numbers_between(sender, receiver):
    """What one rank sends to another.

    Exponents that are alike, in 32 and 16 bits, noise, equal numbers, few, none.
    """
    rng = np.random.default_rng([sender, receiver])
    floats = rng.normal(size=3000 + 100 * sender + 10 * receiver).astype(np.float32)
    return [
        [floats.view(np.uint32), (floats.view(np.uint32)[:999] >> 16).astype(np.uint16)],
        [rng.integers(0, 1 << 32, 700, np.uint32)],
        [np.zeros(receiver, np.uint32), np.full(5000, 3, np.uint16)],
        [np.empty(0, np.uint16), np.empty(0, np.uint32)],
        [] if sender > receiver else [floats.view(np.uint32)[:3]],
    ]


def exchange_numbers(channel):
    """Exchange parts; returns those that arrived, of each kind from each rank.

    Also the bytes that were sent, by the channel's count and by ours.
    """
    here = channel.ranks.rank
    ranks = range(channel.ranks.world_size)
    received = []
    reported = []
    traffic = channel.ranks.traffic
    for kind in range(5):
        arriving = [[np.empty_like(part) for part in numbers_between(p, here)[kind]] for p in ranks]
        before = traffic.sent
        num_bytes = exchange_compressed(
            channel, [numbers_between(here, p)[kind] for p in ranks], arriving
        )
        received.append(arriving)
        reported.append((num_bytes, traffic.sent - before))
    return received, reported


def run_stream_in_small_rounds(channel, *args, **options):
    """As :func:`run_stream`, but what is written to servers goes row by row."""
    server_homes.ROUND_BYTES, usual = 1, server_homes.ROUND_BYTES
    try:
        return run_stream(channel, *args, **options)
    finally:
        server_homes.ROUND_BYTES = usual


def rows_of_largest_part(world, sizes):
    """Distinct rows that one rank reads at most in a step of :func:`run_stream`."""
    tables = SHAPES["odd_dims"]
    largest = 0
    for step, size in enumerate(sizes):
        batch = ragged_batch(tables, size, step, weighted=True)
        for rank in range(world):
            part = part_of(batch, size * rank // world, size * (rank + 1) // world)
            lengths = part.lengths().view(len(tables), -1).sum(1).tolist()
            largest = max(largest, sum(len(ids.unique()) for ids in part.values.split(lengths)))
    return largest


def stop_early_and_feed_again(channel, exchange="alltoall", **options):
    """Leave a feed in the middle, train on a batch that was not fed, feed again.

    Returns the pieces.
    """
    tables = SHAPES["odd_dims"]
    rank = channel.ranks.rank
    embeddings = pb.Embeddings(
        tables, pb.Adam(lr=0.1), exchange=exchange, seed=3, channel=channel, **options
    )
    batches = [ragged_batch(tables, 4 + i, seed=10 * i + rank) for i in range(12)]
    for i, batch in enumerate(embeddings.feed(batches)):
        loss_of(embeddings(batch)).backward()
        if i == 4:
            break
    loss_of(embeddings(batches[5])).backward()
    for i, batch in enumerate(embeddings.feed(batches[6:])):
        if i != 2:  # one that is fed and not looked up
            loss_of(embeddings(batch)).backward()
    return [view.weights.copy() for view in embeddings.pieces()]


def feed_two_at_once(channel, exchange="alltoall", **options):
    """Train in turn on two feeds of one module; returns the pieces."""
    tables = SHAPES["odd_dims"]
    rank = channel.ranks.rank
    embeddings = pb.Embeddings(
        tables, pb.Adagrad(lr=0.1), exchange=exchange, seed=3, channel=channel, **options
    )
    feeds = [
        embeddings.feed(
            [ragged_batch(tables, 4, seed=100 * each + 10 * i + rank) for i in range(7)]
        )
        for each in range(2)
    ]
    for batches in zip(*feeds, strict=True):
        for batch in batches:
            loss_of(embeddings(batch)).backward()
    return [view.weights.copy() for view in embeddings.pieces()]


def meet_a_bad_batch_in_the_feed(channel, bad_rank, exchange="alltoall", **options):
    """The third of six fed batches has a bad id on one rank and is left out.

    Returns what was said, and the pieces.
    """
    tables = SHAPES["odd_dims"]
    rank = channel.ranks.rank
    embeddings = pb.Embeddings(
        tables, pb.Adagrad(lr=0.1), exchange=exchange, seed=3, channel=channel, **options
    )
    batches = [ragged_batch(tables, 5, seed=10 * i + rank, one_hot=True) for i in range(6)]
    if rank == bad_rank:
        batches[2].values[1] = 9
    messages = []
    for batch in embeddings.feed(batches):
        try:
            pooled = embeddings(batch)
        except pb.errors.DataError as error:
            messages.append((type(error).__name__, str(error)))
        else:
            loss_of(pooled).backward()
    return messages, [view.weights.copy() for view in embeddings.pieces()]


def overfill(channel, exchange="lookahead", **options):
    """A cache smaller than a batch; returns what is said, and the step it is said in."""
    tables = SHAPES["odd_dims"]
    rank = channel.ranks.rank
    embeddings = pb.Embeddings(
        tables,
        pb.SGD(lr=0.1),
        exchange=exchange,
        seed=3,
        channel=channel,
        cache_rows=12,
        lookahead=2,
        **options,
    )
    sizes = [2, 2, 2, 2, 2, 40, 2]
    batches = [
        ragged_batch(tables, size, seed=10 * i + rank, one_hot=True) for i, size in enumerate(sizes)
    ]
    step = 0
    try:
        for batch in embeddings.feed(batches):
            loss_of(embeddings(batch)).backward()
            step += 1
    except pb.errors.ConfigError as error:
        # batches are still announced; what comes next shares the channel
        channel.ranks.communication.flush()
        return str(error), step
    return None, step


def look_up_averages(channel, exchange="alltoall", dtype="float32", **options):
    """Train with moving averages, look these up between steps.

    Returns what was looked up, and the pieces' state.
    """
    tables = [replace(table, dtype=dtype) for table in SHAPES["odd_dims"]]
    rank = channel.ranks.rank
    results = []
    optimizer = pb.Adam(lr=0.1, average=0.9)
    embeddings = pb.Embeddings(
        tables, optimizer, exchange=exchange, seed=3, channel=channel, **options
    )
    batches = [ragged_batch(tables, 5, seed=10 * i + rank) for i in range(6)]
    for i, batch in enumerate(embeddings.feed(batches)):
        loss_of(embeddings(batch)).backward()
        if i % 2:
            with torch.no_grad(), embeddings.averaged():
                results.append(embeddings(batches[0]).numpy())
    return results, [
        {name: np.array(numbers) for name, numbers in view.state.items()}
        for view in embeddings.pieces()
    ]


def refuse_other_tables(channel, exchange="lookahead", **options):
    """Ranks that want different seeds; what is said on each."""
    try:
        pb.Embeddings(
            SHAPES["mean"], pb.SGD(lr=0.1), exchange, channel.ranks.rank, channel=channel, **options
        )
    except pb.errors.ConfigError as error:
        return str(error)


def name_what_servers_do_not_serve(channel, exchange, servers):
    """What a server says to calls of this package's functions, which are not its own."""
    messages = []
    for function in (write_tensors, update_rows):
        try:
            rpc.rpc_sync(servers[0], function, ("x", {}))
        except NotAllowedError as error:
            messages.append(str(error))
    return messages


def name_what_an_oracle_does_not_serve(channel, oracle, **options):
    """What an oracle says to such calls."""
    return name_what_servers_do_not_serve(channel, "lookahead", [oracle])


def refuse_other_options(channel, exchange="lookahead", **options):
    """Ranks that look differently far ahead; what is said on each."""
    ahead = 3 + channel.ranks.rank
    try:
        pb.Embeddings(
            SHAPES["mean"], pb.SGD(lr=0.1), exchange, channel=channel, lookahead=ahead, **options
        )
    except pb.errors.ConfigError as error:
        return str(error)


def count_bytes(channel, exchange="lookahead", **options):
    """Bytes by purpose of a short run."""
    tables = SHAPES["odd_dims"]
    embeddings = pb.Embeddings(
        tables, pb.SGD(lr=0.1), exchange=exchange, channel=channel, lookahead=3, **options
    )
    for batch in embeddings.feed(
        [ragged_batch(tables, 5, seed=10 * i + channel.ranks.rank) for i in range(8)]
    ):
        loss_of(embeddings(batch)).backward()
    embeddings.exchange.flush()
    return embeddings.exchange.report().bytes_by_purpose


def refuse_other_wires(channel, exchange, option, values):
    """Ranks that want their numbers to travel differently; what is said on each."""
    options = {option: values[channel.ranks.rank]}
    try:
        pb.Embeddings(
            SHAPES["odd_dims"], pb.SGD(lr=0.1), exchange=exchange, channel=channel, **options
        )
    except pb.errors.ConfigError as error:
        return str(error)


def load_a_state_dict(channel, exchange, **options):
    """Load other weights in the middle of a feed.

    Returns which batches found them, and whether the pieces hold them.
    """
    tables = SHAPES["odd_dims"]
    embeddings = pb.Embeddings(
        tables, pb.SGD(lr=0.0), exchange=exchange, channel=channel, **options
    )
    alone = pb.Embeddings(tables, pb.SGD(lr=0.0), seed=9)
    state = alone.state_dict()
    same = []
    batches = [ragged_batch(tables, 5, seed=10 * i + channel.ranks.rank) for i in range(6)]
    for i, batch in enumerate(embeddings.feed(batches)):
        if i == 3:
            embeddings.load_state_dict(state)
        result = embeddings(batch)
        same.append(torch.equal(result, alone(batch)))
        loss_of(result).backward()
    return same, all(
        np.array_equal(
            view.weights[:],
            state[f"embedding_bags.{view.piece.table.name}.weight"][view.piece.rows][
                :, view.piece.columns
            ],
        )
        for view in embeddings.pieces()
    )


def name_what_a_state_dict_lacks(channel, exchange, **options):
    """What ``state_dict`` says of tables on several ranks, and its shapes of whole ones."""
    embeddings = pb.Embeddings(
        SHAPES["odd_dims"], pb.SGD(lr=0.1), exchange=exchange, channel=channel, **options
    )
    try:
        return {name: list(tensor.shape) for name, tensor in embeddings.state_dict().items()}
    except pb.errors.ConfigError as error:
        return str(error)


def train_two_modules(channel, num_batches, exchange, **options):
    """Two modules of other widths, one fed, on ranks with so many batches.

    Returns the error of a feed of a feed, steps and pieces.
    """
    tables = [pb.Table("a", 9, 4)], [pb.Table("b", 30, 8)]
    first, second = (
        pb.Embeddings(
            each,
            pb.Adagrad(lr=0.5),
            exchange=exchange,
            seed=3,
            channel=channel.ranks.open_channel(),
            **options,
        )
        for each in tables
    )
    rank = channel.ranks.rank
    batches = [
        ragged_batch([*tables[0], *tables[1]], 3 + i, seed=[i, rank])
        for i in range(num_batches[rank])
    ]
    message = None
    try:
        next(iter(first.feed(second.feed(batches))), None)
    except pb.errors.ConfigError as error:
        message = str(error)
    for batch in first.feed(batches):
        (loss_of(first(batch)) + loss_of(second(batch))).backward()
    pieces = [view.weights.copy() for each in (first, second) for view in each.pieces()]
    return message, (first.step, second.step), pieces


def load_from_outside(channel, exchange="alltoall", **options):
    """Weights from outside in the middle of a run.

    Returns what is read then, and the pieces after one more step.
    """
    tables = SHAPES["any"]
    embeddings = pb.Embeddings(
        tables, optimizers("adam", "any"), exchange=exchange, seed=3, channel=channel, **options
    )
    batches = [ragged_batch(tables, 5, seed=10 * i + channel.ranks.rank) for i in range(6)]
    results = []
    for number, batch in enumerate(embeddings.feed(batches)):
        if number == 3:
            for table in tables[2:4]:
                weights = np.random.default_rng(table.num_rows).normal(
                    size=(table.num_rows, table.dim)
                )
                embeddings.load_weights(table.name, weights)
        out = embeddings(batch)
        results.append(as_tensor(out).detach())
        loss_of(out).backward()
    return results, pieces_of(embeddings)


def learn_weights(channel, exchange="alltoall", **options):
    """Train with weights that want gradients.

    Returns these, with what was looked up, and the pieces.
    """
    tables = SHAPES["any"]
    embeddings = pb.Embeddings(
        tables, optimizers("adagrad", "any"), exchange=exchange, seed=3, channel=channel, **options
    )
    batches = [
        ragged_batch(tables, 5, seed=10 * i + channel.ranks.rank, weighted=True) for i in range(6)
    ]
    results = []
    for batch in batches:
        batch.weights.requires_grad_()
    for batch in embeddings.feed(batches):
        out = as_tensor(embeddings(batch))
        loss_of(out).backward()
        results += [out.detach(), batch.weights.grad]
    return results, pieces_of(embeddings)


def train_reversed(channel, by_hand, exchange="alltoall", **options):
    """Train tables whose ids are reversed, by their index or ``by_hand``, in the batches.

    Returns what was looked up, the pieces, and what an id without a row says.
    """
    tables = [
        pb.Table("a", 9, 16, features=("x", "y")),
        pb.Table("b", 30, 16, pooling="mean"),
        pb.Table("c", 400, 8),
        pb.Table("d", 50, 8, pooling="none"),
    ]
    if not by_hand:
        tables = [replace(table, rows=Reversed()) for table in tables]
    embeddings = pb.Embeddings(
        tables, pb.RowWiseAdagrad(lr=0.2), exchange=exchange, seed=3, channel=channel, **options
    )
    last = [table.num_rows - 1 for table in tables for _ in table.features]

    def batch_of(step):
        batch = ragged_batch(tables, 6, seed=10 * step + channel.ranks.rank)
        if by_hand:
            ids = batch.lengths().view(len(last), -1).sum(1)
            batch.values[:] = torch.tensor(last).repeat_interleave(ids) - batch.values
        return batch

    pooled_of_step = []
    for batch in embeddings.feed(map(batch_of, range(6))):
        pooled = as_tensor(embeddings(batch))
        pooled_of_step.append(pooled.detach())
        loss_of(pooled).backward()
    bad = ragged_batch(tables, 6, seed=1, one_hot=True)
    bad.values[6 + 4] = 9
    try:
        message = None if embeddings(bad) is None else "nothing"
    except pb.errors.DataError as error:
        message = str(error)
    return pooled_of_step, pieces_of(embeddings), message
