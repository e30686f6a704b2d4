"""Programs that train tables of raw ids, and the same by fixed tables and ids given by hand."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from naive_hashed import NaiveHashed

import pibroch as pb
from cases import as_tensor, loss_of, optimizers, part_of, pieces_of, ragged_batch
from pibroch.embedding.initializers import stream_key

SIZES = [7, 8, 5, 8, 0, 8, 3, 8, 8, 6, 8, 8, 7, 8, 5, 8, 1, 8, 3, 8]
"""Of global batches."""
NUM_IDS = 90
SEED = 3


def tables_of(kind):
    return [
        pb.Table("a", 48, 16, features=("x", "y"), rows=kind),
        pb.Table("b", 30, 16, pooling="mean"),
        pb.Table("c", 40, 8, pooling="mean", rows=kind),
        pb.Table("d", 40, 8, pooling="none", rows=kind),
    ]


def ids_of(table):
    """The raw ids of a table, any int64."""
    rng = np.random.default_rng(len(table))
    return rng.integers(-(2**63), 2**63 - 1, NUM_IDS)


class Scale:
    """A scaler by one."""

    def get_scale(self):
        return 1.0

    def unscale_(self, optimizer):
        pass


def batch_of(step, size, tables):
    """A global batch of raw ids; which ones are hot changes from step to step."""
    wide = [replace(table, num_rows=NUM_IDS) if table.name != "b" else table for table in tables]
    batch = ragged_batch(wide, size, seed=step)
    tables_of_features = [table for table in tables for _ in table.features]
    for place, table in enumerate(tables_of_features):
        if table.name != "b":
            bounds = batch.offsets[:: max(1, size)]
            here = slice(int(bounds[place]), int(bounds[place + 1])) if size else slice(0, 0)
            numbers = (batch.values[here].numpy() + 7 * step) % NUM_IDS
            batch.values[here] = torch.from_numpy(ids_of(table.name)[numbers])
    return batch


def times_of(step, size):
    """Of a global batch: 100 ms a step, and no events for a while in the midst of them.

    One clock is wrong in each step.
    """
    times = torch.arange(size) * 11 + 100 * step + 900 * (step > 12)
    times[size // 2 : size // 2 + 1] += 1 << 40
    return times


def parts_of(tables, rank, world):
    batches = [batch_of(step, size, tables) for step, size in enumerate(SIZES)]
    parts = []
    for step, (batch, size) in enumerate(zip(batches, SIZES, strict=True)):
        here = slice(size * rank // world, size * (rank + 1) // world)
        part = part_of(batch, here.start, here.stop)
        parts.append(replace(part, event_times=times_of(step, size)[here]))
    return parts


def train(
    channel,
    kind,
    name="adagrad",
    exchange="alltoall",
    fed=True,
    stop=None,
    also=False,
    skips=False,
    dtype="float32",
    learned=False,
    **options,
):
    """Train; returns this rank's embeddings of each step, its pieces, and (row, id) by table.

    Between steps there are lookups without an update.

    Args:
        channel, kind, name, exchange, options: of the run.
        fed: whether batches come by a feed.
        stop: the feed is left after so many steps, and the rest trained by another one.
        also: some steps look up a second batch before their backward pass.
        skips: a scaler skips some steps.
        dtype: of the rows.
        learned: whether ids have weights that are learned.
    """
    rank = channel.ranks.rank
    world = channel.ranks.world_size
    tables = [replace(table, dtype=dtype) for table in tables_of(kind)]
    embeddings = pb.Embeddings(
        tables, optimizers(name, ""), exchange=exchange, seed=SEED, channel=channel, **options
    )
    parts = parts_of(tables, rank, world)
    if learned:
        rng = np.random.default_rng(1)
        parts = [
            replace(
                part, weights=torch.tensor(rng.random(len(part.values))).float().requires_grad_()
            )
            for part in parts
        ]
    given = []

    def step(number, batch):
        out = as_tensor(embeddings(batch))
        given.append(out.detach().clone())
        first = SIZES[number] * rank // world
        loss = loss_of(out, SIZES[number], first)
        if also and number % 3 == 1:
            more = (number + 5) % len(SIZES)
            out = as_tensor(embeddings(parts[more]))
            given.append(out.detach().clone())
            loss = loss + loss_of(out, SIZES[more], SIZES[more] * rank // world)
        if skips and number % 3 == 1:
            embeddings.scaled_by(Scale())
            loss = loss * float("inf")
        loss.backward()
        embeddings.scaled_by(None)
        if learned and batch.weights.numel():
            given.append(batch.weights.grad.clone())
        if number % 4 == 1:
            with torch.no_grad():
                given.append(as_tensor(embeddings(parts[0])).clone())

    if not fed:
        for number, batch in enumerate(parts):
            step(number, batch)
    else:
        done = 0
        for until in (len(parts) if stop is None else stop, len(parts)):
            for batch in embeddings.feed(parts[done:]):
                step(done, batch)
                done += 1
                if done == until:
                    break
            if done == len(parts):
                break
    entries = {
        table: tuple(each.tolist() for each in index.entries())
        for table, index in embeddings.row_indices.items()
        if table != "b"
    }
    return given, pieces_of(embeddings), entries


def go_on(channel, kind, exchange, folder, first, stop, **options):
    """Train from a step, of which a program was saved, to another, and save; as load_and_train."""
    tables = tables_of(kind)
    embeddings = pb.Embeddings(
        tables, pb.Adagrad(lr=0.1), exchange=exchange, seed=SEED + first, channel=channel, **options
    )
    if first:
        pb.load(folder, embeddings)
    parts = parts_of(tables, channel.ranks.rank, channel.ranks.world_size)
    with torch.no_grad():
        given = [as_tensor(embeddings(batch_of(3, 8, tables))).clone()]
    for number, batch in enumerate(embeddings.feed(parts[first:stop]), first):
        out = as_tensor(embeddings(batch))
        given.append(out.detach().clone())
        loss_of(
            out, SIZES[number], SIZES[number] * channel.ranks.rank // channel.ranks.world_size
        ).backward()
    if folder is not None:
        pb.save(folder, embeddings, step=stop)
    embeddings.exchange.flush()
    states = {name: index.state() for name, index in embeddings.row_indices.items()}
    return given, states


def load_and_train(channel, kind, exchange, **options):
    """Load weights of ids, and train; each step's embeddings, and the states of indices."""
    tables = tables_of(kind)
    embeddings = pb.Embeddings(
        tables, pb.Adagrad(lr=0.1), exchange=exchange, seed=SEED, channel=channel, **options
    )
    parts = parts_of(tables, channel.ranks.rank, channel.ranks.world_size)
    given = []
    for number, batch in enumerate(embeddings.feed(parts[:6])):
        if number == 3:
            weights = np.random.default_rng(5).normal(size=(12, 8)).astype(np.float32)
            embeddings.load_weights("c", weights, ids=ids_of("c")[:12])
        out = as_tensor(embeddings(batch))
        given.append(out.detach().clone())
        first = SIZES[number] * channel.ranks.rank // channel.ranks.world_size
        loss_of(out, SIZES[number], first).backward()
    with torch.no_grad():
        given.append(as_tensor(embeddings(parts[5])).clone())
    states = {name: index.state() for name, index in embeddings.row_indices.items()}
    return given, states


def train_by_hand(kind, name="adagrad"):
    """The same in one process by fixed tables, in which each life of an id has a row of its own.

    Returns the embeddings of each lookup, and by table and id the record of its row.
    """
    tables = tables_of(kind)
    learning = [table for table in tables if table.name != "b"]
    indices = {table.name: NaiveHashed(kind).index(table.num_rows) for table in learning}
    batches = [batch_of(step, size, tables) for step, size in enumerate(SIZES)]
    lives = {table.name: {} for table in learning}  # the row of each id that has one
    born = {table.name: [] for table in learning}  # the id of each row
    lookups = []
    for number, batch in enumerate(batches):
        for table in learning:
            ids = batch.select(table.features).values.numpy()
            indices[table.name].event_times = times_of(number, batch.batch_size).tolist()
            changes = indices[table.name].learn(ids)
            for id_ in [*changes.evicted_ids.tolist(), *changes.expired_ids.tolist()]:
                del lives[table.name][id_]
            for id_ in changes.fresh_ids.tolist():
                lives[table.name][id_] = len(born[table.name])
                born[table.name].append(id_)
        lookups.append((by_rows(batch, tables, lives, kind.unknown_row), True))
        if number % 4 == 1:
            lookups.append((by_rows(batches[0], tables, lives, kind.unknown_row), False))
    fixed = [
        table
        if table.name == "b"
        else replace(
            table,
            num_rows=len(born[table.name]) + 1,
            rows=pb.embedding.Identity(),
            initializer=table.resolved_initializer(),
        )
        for table in tables
    ]
    embeddings = pb.Embeddings(fixed, optimizers(name, ""), exchange="local", seed=SEED)
    by_name = {view.piece.table.name: view for view in embeddings.pieces()}
    for table in fixed:
        if table.name in born:
            ids = np.array(born[table.name])
            weights = by_name[table.name].weights
            table.initializer.fill(weights[:-1], ids, stream_key(SEED, table.name))
            table.initializer.fill(weights[-1:], np.array([0]), stream_key(SEED, table.name))
    given = []
    readers = [table for table in tables for _ in table.features]
    for batch, trains in lookups:
        bounds = batch.offsets[:: max(1, batch.batch_size)].tolist()
        for table, start, stop in zip(readers, bounds, bounds[1:], strict=False):
            values = batch.values[start:stop]
            values[values < 0] = len(born.get(table.name, ()))
        if not kind.unknown_row:
            by_name["d"].weights[-1] = 0  # what ids without a row read
        with torch.set_grad_enabled(trains):
            out = as_tensor(embeddings(batch))
            given.append(out.detach().clone())
            if trains:
                loss_of(out, batch.batch_size, 0).backward()
    records = {
        table: {
            id_: [by_name[table].weights[row], *(s[row] for s in by_name[table].state.values())]
            for id_, row in rows.items()
        }
        for table, rows in lives.items()
    }
    return given, records, sum(map(len, born.values()))


def by_rows(batch, tables, lives, all_read):
    """A batch of ids as one of rows: those without one are left out, or have -1.

    In the place of which the last row of the table is read, whose number is not known yet.
    """
    table_of = {feature: table for table in tables for feature in table.features}
    values = []
    lengths = []
    for bag, (start, stop) in enumerate(pairwise(batch.offsets.tolist())):
        table = table_of[batch.keys[bag // batch.batch_size]]
        ids = batch.values[start:stop].tolist()
        if table.name in lives:
            nobody = -1 if all_read or table.name == "d" else None
            ids = [lives[table.name].get(id_, nobody) for id_ in ids]
        values.append([row for row in ids if row is not None])
        lengths.append(len(values[-1]))
    rows = torch.tensor([row for bag in values for row in bag], dtype=torch.int64)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return replace(batch, values=rows, offsets=offsets)


def refused(channel, exchange, **options):
    """What an exchange says of tables of raw ids."""
    try:
        train(channel, pb.Hashed(), exchange=exchange, **options)
    except pb.errors.ConfigError as error:
        return str(error)
