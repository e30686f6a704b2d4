"""Long runs whose every event is recorded, see :mod:`recorder`; one run on a rank."""

import tempfile
from pathlib import Path

import numpy as np
import torch
import training_cases

import pibroch as pb
from cases import SHAPES, loss_of, optimizers, part_of, ragged_batch
from small_run import make_config, make_dataset

STEPS = 200


def size_of(step):
    """Of a global batch: ragged, now and then empty or too small for all ranks."""
    return (0, 1, 2)[step % 3] if step % 13 == 7 else 3 + 5 * step % 11


def train(
    channel,
    exchange,
    name="adagrad",
    shape="odd_dims",
    steps=STEPS,
    evaluates=False,
    drops=False,
    breaks=False,
    looks=False,
    twice=False,
    **options,
):
    """Train on drawn batches.

    Args:
        channel: of the rank.
        exchange: its name.
        name: of the optimizer.
        shape: of the tables.
        steps: how many.
        evaluates: look up other batches now and then, without feed and with one.
        drops: some steps update nothing, as their rows are frozen before the backward pass.
        breaks: a feed is left now and then, with batches read ahead.
        looks: rows are looked at, and written from outside, now and then.
        twice: some steps look up a second batch that no feed gave.
        **options: of the exchange.
    """
    rank = channel.ranks.rank
    world = channel.ranks.world_size
    tables = SHAPES[shape]
    embeddings = pb.Embeddings(
        tables, optimizers(name, shape), exchange=exchange, seed=3, channel=channel, **options
    )
    bounds = [[size_of(step) * r // world for r in range(world + 1)] for step in range(steps)]

    def part(step):
        batch = ragged_batch(tables, size_of(step), step, weighted=step % 5 == 2)
        return part_of(batch, bounds[step][rank], bounds[step][rank + 1])

    done = 0
    while done < steps:
        for batch in embeddings.feed(part(step) for step in range(done, steps)):
            if evaluates and done % 17 == 4:
                with torch.no_grad():
                    embeddings(part(0))
                    for other in embeddings.feed(map(part, (1, 2))):
                        embeddings(other)
            loss = loss_of(embeddings(batch), size_of(done), bounds[done][rank])
            if twice and done % 19 == 3:
                loss = loss + loss_of(embeddings(part(5)), size_of(5), bounds[5][rank])
            if drops and done % 7 == 3:
                embeddings.requires_grad_(False)
            loss.backward()
            embeddings.requires_grad_(True)
            if looks and done % 23 == 11:
                for view in embeddings.pieces():
                    view.weights[:] *= np.float32(1.5)
                embeddings.exchange.forget()
            done += 1
            if breaks and done % 41 == 40:
                break
    embeddings.exchange.flush()


def train_and_go_on(channel, *settings, until=(33, 60)):
    """A run of `pibroch train`, and the one that goes on where its ranks were killed.

    Args:
        channel: of the rank.
        *settings: of both.
        until: the steps at which they end; the second goes on from the last checkpoint.
    """
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(channel.gather(folder)[0])
        data = folder / "data"
        if channel.ranks.rank == 0:
            make_dataset(data)
        channel.barrier()
        settings = [*settings, "train.cut_every_seconds=0", "train.checkpoint_every_seconds=0"]
        for steps in until:
            config = make_config(data, *settings, f"train.steps={steps}")
            training_cases.train(channel, config.model_dump(), str(folder / "run"))
            channel.barrier()


def train_by_twos(channel, exchange, steps=60, **options):
    """Train on two batches of a feed at once: both are looked up before either is updated."""
    rank = channel.ranks.rank
    world = channel.ranks.world_size
    tables = SHAPES["odd_dims"]
    optimizer = optimizers("adagrad", "odd_dims")
    embeddings = pb.Embeddings(
        tables, optimizer, exchange=exchange, seed=3, channel=channel, **options
    )
    bounds = [[size_of(step) * r // world for r in range(world + 1)] for step in range(steps)]

    def part(step):
        batch = ragged_batch(tables, size_of(step), step)
        return part_of(batch, bounds[step][rank], bounds[step][rank + 1])

    losses = []
    for step, batch in enumerate(embeddings.feed(map(part, range(steps)))):
        losses.append(loss_of(embeddings(batch), size_of(step), bounds[step][rank]))
        if len(losses) == 2:
            sum(losses).backward()
            losses.clear()
    embeddings.exchange.flush()
