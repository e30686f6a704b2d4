"""Random programs around an embedding module.

What users may do, in any order, the same on all ranks but for the batches.
"""

import numpy as np
import torch

import pibroch as pb
from cases import OPTIMIZERS, SHAPES, as_tensor, loss_of, optimizers, ragged_batch

ACTIONS = ["train"] * 8 + [
    "skip",
    "train twice",
    "look",
    "evaluate a feed",
    "look at the pieces",
    "write the pieces",
    "train another",
    "two at once",
    "hold",
]
MOST_BATCHES = 14
MOST_SAMPLES = 6
NO_ROOM = "no room in the cache"


def setting_of(seed):
    """Tables and optimizer of a program, by name, and options for the exchange.

    That exchange is to give the bits of ``alltoall``.
    """
    rng = np.random.default_rng([seed, 1])
    wire = str(rng.choice(["float32"] * 4 + ["bfloat16"]))
    cache = str(rng.choice(["lrpp", "lrpp", "partitioned", "replicated"]))
    options = {
        "lookahead": int(rng.choice([1, 2, 3, 5, 9, 200])),
        "cache": cache,
        "cache_rows": [None, None, 100, int(rng.integers(12, 60))][rng.integers(4)],
        "delayed_sync": bool(rng.random() < 0.8),
        "compress": bool(rng.random() < 0.2),
        "wire": wire,
    }
    return str(rng.choice(list(SHAPES))), str(rng.choice(list(OPTIMIZERS))), options


def run_program(channel, seed, exchange="alltoall", **options):
    """Run the program of that seed.

    Returns all that this rank saw, in order: words, pooled embeddings, and pieces.

    It ends early, with ``NO_ROOM``, when a batch fits into no cache.
    """
    seen = []
    try:
        _run(
            channel,
            np.random.default_rng(seed),
            seen,
            setting_of(seed),
            {"exchange": exchange} | options,
        )
    except pb.errors.ConfigError as error:
        assert "room for the rows of one batch" in str(error)
        # batches are still announced; what comes next shares the channel
        channel.ranks.communication.flush()
        seen.append(NO_ROOM)
    return seen


def _run(channel, rng, seen, setting, options):
    rank = channel.ranks.rank
    world = channel.ranks.world_size
    tables = SHAPES[setting[0]]
    optimizer = optimizers(setting[1], setting[0])
    embeddings = pb.Embeddings(tables, optimizer, seed=3, channel=channel, **options)

    def draw_batch():
        """Another for each rank; one in fifteen has a bad id on one of them."""
        sizes = rng.integers(0, MOST_SAMPLES + 1, world)
        number = rng.integers(1 << 30)
        bad_rank = rng.integers(world)
        batch = ragged_batch(tables, int(sizes[rank]), [number, rank])
        if rng.random() < 1 / 15 and rank == bad_rank and len(batch.values):
            batch.values[len(batch.values) // 2] = 10**6
        return batch

    def look_up(batch):
        try:
            pooled = embeddings(batch)
        except pb.errors.DataError as error:
            seen.append(type(error).__name__)
            return None
        seen.append(as_tensor(pooled).detach().clone())
        return pooled

    def update(pooled):
        if pooled is not None:
            loss_of(pooled).backward()

    def look_at_pieces():
        views = embeddings.pieces()
        seen.append(
            [(v.piece, v.weights.copy(), {f: s.copy() for f, s in v.state.items()}) for v in views]
        )
        return views

    def act(action, batch, held):
        """Returns what is held then: a lookup whose update comes after the next one's."""
        if action == "look":
            with torch.no_grad():
                look_up(draw_batch())
        elif action == "evaluate a feed":
            embeddings.eval()
            for other in embeddings.feed([draw_batch() for _ in range(rng.integers(0, 4))]):
                look_up(other)
            embeddings.train()
        elif action == "look at the pieces":
            look_at_pieces()
        elif action == "write the pieces":
            for view in look_at_pieces():
                view.weights[:] *= 1.5
            embeddings.exchange.forget()
        elif action == "train another":
            update(look_up(draw_batch()))
        if action == "two at once":
            first = look_up(batch)
            second = look_up(draw_batch())
            update(second)
            update(first)
        elif action == "hold":
            now = look_up(batch)
            update(held)
            return now
        elif action != "skip":
            update(look_up(batch))
        if action == "train twice":
            update(look_up(batch))
        return held

    for _ in range(rng.integers(1, 4)):
        num_batches = rng.integers(0, MOST_BATCHES, world)
        if rng.random() < 0.5:
            num_batches[:] = num_batches[0]
        batches = [draw_batch() for _ in range(num_batches.max())][: num_batches[rank]]
        held = None
        leaves_at = rng.integers(0, 2 * MOST_BATCHES)
        for number, batch in enumerate(embeddings.feed(batches)):
            action = str(rng.choice(ACTIONS))
            seen.append(action)
            held = act(action, batch, held)
            if number == leaves_at:
                break
        update(held)
    look_at_pieces()
