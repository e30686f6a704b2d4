"""What ranks do in the tests of rows that move."""

import numpy as np
import torch

import pibroch as pb
from cases import SHAPES, as_tensor, loss_of, optimizers, pieces_of, ragged_batch

STEPS = 16


def train_and_move(
    channel, name, shape, plans=(), at=(), rows_per_step=7, load_at=None, state_at=None, **options
):
    """Train, and begin to move to each plan after a step.

    What was read, records, steps at which rows were on their way.

    Weights are loaded after the step ``load_at``; after ``state_at`` training goes on in new
    embeddings from a state.
    """
    tables = SHAPES[shape]
    rank = channel.ranks.rank
    world = channel.ranks.world_size
    embeddings = pb.Embeddings(tables, optimizers(name, shape), seed=3, channel=channel, **options)
    batches = [
        ragged_batch(tables, (7 * step + 3 * rank) % 9, seed=[step, rank]) for step in range(STEPS)
    ]
    results = []
    moving = []
    step = 0
    plans = dict(zip(at, plans, strict=True))
    while step < STEPS:
        for batch in embeddings.feed(batches[step:]):
            pooled = embeddings(batch)
            if step % 5 == 2:
                with torch.no_grad():
                    results.append(as_tensor(embeddings(batches[0])))
            results.append(as_tensor(pooled).detach())
            loss_of(pooled, 9 * world, 9 * rank).backward()
            moving.append(embeddings.is_moving)
            if step in plans:
                embeddings.move_rows(plans[step], rows_per_step)
            if step == load_at:
                table = tables[-1]
                embeddings.load_weights(
                    table.name, np.arange(table.num_rows * table.dim).reshape(-1, table.dim) / 97
                )
            step += 1
            if step - 1 == state_at:
                break
        if step - 1 == state_at:
            state = embeddings.full_state_dict(row_state=True)
            number = embeddings.step
            embeddings = pb.Embeddings(
                tables, optimizers(name, shape), seed=4, channel=channel, **options
            )
            embeddings.load_full_state_dict(state)
            embeddings.step = number
    return (
        results,
        pieces_of(embeddings),
        moving,
        [len(view.weights) for view in embeddings.pieces()],
    )


def look_ahead_and_move(channel, name, shape, plans, at, rows_per_step, midway, **options):
    """Train two feeds under ``lookahead`` and move.

    What was read, records, steps planned so far, and whether rows move.

    Where ``midway`` is set a move begins between a lookup and its backward pass.
    """
    tables = SHAPES[shape]
    rank = channel.ranks.rank
    world = channel.ranks.world_size
    embeddings = pb.Embeddings(
        tables, optimizers(name, shape), seed=3, channel=channel, exchange="lookahead", **options
    )
    batches = [
        ragged_batch(tables, (7 * step + 3 * rank) % 9, seed=[step, rank]) for step in range(30)
    ]
    results = []
    planned = []
    moving = []
    step = 0
    for feed in (batches[:18], batches[18 : 30 - rank]):
        for batch in embeddings.feed(feed):
            pooled = embeddings(batch)
            if midway and step in at:
                embeddings.move_rows(plans[at.index(step)], rows_per_step)
            results.append(as_tensor(pooled).detach())
            loss_of(pooled, 9 * world, 9 * rank).backward()
            if not midway and step in at:
                embeddings.move_rows(plans[at.index(step)], rows_per_step)
            planned.append(embeddings.exchange.report().num_steps)
            moving.append(embeddings.is_moving)
            step += 1
    return results, pieces_of(embeddings), planned, moving


def stay(channel, name, shape, **options):
    """The feeds of :func:`look_ahead_and_move` by ``alltoall``."""
    tables = SHAPES[shape]
    rank = channel.ranks.rank
    world = channel.ranks.world_size
    embeddings = pb.Embeddings(
        tables, optimizers(name, shape), seed=3, channel=channel, exchange="alltoall", **options
    )
    batches = [
        ragged_batch(tables, (7 * step + 3 * rank) % 9, seed=[step, rank]) for step in range(30)
    ]
    results = []
    for feed in (batches[:18], batches[18 : 30 - rank]):
        for batch in embeddings.feed(feed):
            pooled = embeddings(batch)
            results.append(as_tensor(pooled).detach())
            loss_of(pooled, 9 * world, 9 * rank).backward()
    return results, pieces_of(embeddings)


def count_rows(channel, plan, exchange):
    """Move a large table while few of its rows are updated.

    Returns rows that were sent, and how many of this rank's go to another; bytes sent in steps
    before the move, and in those of the move; whether rows still move, and bytes of each step.
    """
    table = pb.Table("a", 20_000, 16)
    embeddings = pb.Embeddings(
        [table], pb.Adagrad(lr=0.5), exchange=exchange, seed=3, channel=channel
    )
    batches = [ragged_batch([table], 8, seed=[step, channel.ranks.rank]) for step in range(40)]
    sent = []
    movement = None
    traffic = channel.ranks.traffic
    moving = []
    leaving = 0
    for step, batch in enumerate(embeddings.feed(batches)):
        before = traffic.sent
        loss_of(embeddings(batch)).backward()
        if step == 5:
            embeddings.move_rows(plan, 500)
            (lane,) = embeddings.exchange._movement._lanes
            leaving = int((lane.target != channel.ranks.rank).sum())
        movement = embeddings.exchange._movement or movement
        embeddings.exchange.flush()
        sent.append(traffic.sent - before)
        moving.append(embeddings.is_moving)
    steps = [step for step in range(6, 40) if moving[step - 1]]  # the last one goes over
    of_move = sum(sent[step] for step in steps) - len(steps) * int(np.median(sent[:5]))
    return movement.rows_sent, leaving, of_move, embeddings.is_moving, sent


def refuse_to_move(channel, exchange, plan, **options):
    """What is said to who asks for what cannot be."""
    embeddings = pb.Embeddings(
        SHAPES["odd_dims"], pb.SGD(lr=0.1), exchange=exchange, channel=channel, **options
    )
    try:
        embeddings.move_rows(plan)
    except pb.errors.ConfigError as error:
        return str(error)
