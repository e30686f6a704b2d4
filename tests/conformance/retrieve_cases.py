"""What ranks do in the tests of the exchange ``retrieve``."""

import os
import threading

import numpy as np
import torch

import pibroch as pb
from cases import SHAPES, as_tensor, loss_of, optimizers, ragged_batch
from pibroch.exchange.retrieve import gets
from pibroch.planner.assignment import Assignment


def look_up(channel, shape, exchange="retrieve", dtype=None, seed=3, **options):
    """What ranks read without training, of batches of their own.

    In step where the exchange wants that.
    """
    tables = SHAPES[shape]
    embeddings = pb.Embeddings(
        tables, optimizers("adam", shape), exchange=exchange, seed=seed, channel=channel, **options
    )
    rank = channel.ranks.rank
    results = []
    with torch.no_grad():
        for step in range(4):
            size = (7 * step + 5 * rank) % 11
            batch = ragged_batch(
                tables, size, seed=[step, rank], weighted=step == 1, one_hot=step == 2
            )
            results.append(as_tensor(embeddings(batch)))
    channel.barrier()  # others may still ask for rows of this rank
    return results


def read_averages(channel, hosts, exchange):
    """Moving averages of loaded tables."""
    tables = SHAPES["odd_dims"]
    options = {"hosts": hosts} if exchange == "retrieve" else {}
    embeddings = pb.Embeddings(
        tables, pb.Adam(lr=0.1, average=0.9), exchange=exchange, seed=3, channel=channel, **options
    )
    with embeddings.rewriting() as views:
        for view in views:
            view.state["average"][:] = (
                np.asarray(view.weights) + view.piece.rows[:][0] if len(view.piece.rows) else 0
            )
    with torch.no_grad(), embeddings.averaged():
        result = embeddings(ragged_batch(tables, 9, seed=channel.ranks.rank)).numpy()
    channel.barrier()
    return result


ROWS = 20_000
LOADS = 20


def look_up_while_tables_are_replaced(channel, hosts, holders, each_loads, copied):
    """Look up while both tables are loaded 20 times, each time with one number everywhere.

    Returns the numbers that were seen.

    Ranks in ``holders`` have the rows, those in ``copied`` copies of them. Each rank loads by a
    thread beside its lookups, or, where ``each_loads`` is not set, the last one alone, which looks
    nothing up meanwhile.
    """
    tables = [pb.Table("a", ROWS, 16), pb.Table("b", ROWS, 16)]
    rank = channel.ranks.rank
    copies = np.zeros((len(holders), len(hosts)), np.bool_)
    copies[0, copied] = True
    partition = {name: np.arange(ROWS, dtype=np.uint16) % len(holders) for name in ("a", "b")}
    plan = pb.Plan.by_rows(Assignment(partition, np.array(holders, np.uint16), copies))
    embeddings = pb.Embeddings(
        tables,
        pb.SGD(lr=1.0),
        exchange="retrieve",
        seed=3,
        channel=channel,
        hosts=hosts,
        placement=plan,
    )
    ids = torch.from_numpy(np.random.default_rng(rank).integers(0, ROWS, (2, 4000)))
    batch = pb.JaggedBatch.from_one_hot(torch.zeros(4000, 0), ["a", "b"], ids, torch.zeros(4000))

    def load(numbers):
        for number in numbers:
            with embeddings.rewriting() as views:
                for view in views:
                    view.weights[:] = number

    def look_up():
        with torch.no_grad():
            return torch.unique(as_tensor(embeddings(batch))).tolist()

    load([0])
    seen = [look_up()]
    channel.barrier()
    if each_loads:
        loader = threading.Thread(target=load, args=[range(1, LOADS + 1)])
        loader.start()
    elif rank == len(hosts) - 1:
        load(range(1, LOADS + 1))
    while seen[-1] != [LOADS]:
        seen.append(look_up())
    if each_loads:
        loader.join()
    channel.barrier()
    return seen


def look_up_before_loading(channel):
    """Errors on a rank that looks up rows of its own, before and after others load them again."""
    embeddings = pb.Embeddings(
        [pb.Table("a", 40, 16)], pb.SGD(lr=1.0), exchange="retrieve", channel=channel
    )
    batch = ragged_batch(embeddings.tables, 30, seed=1)
    weights = np.ones((40, 16), np.float32)
    if channel.ranks.rank == 1:
        embeddings.load_weights("a", weights)
    channel.barrier()
    message = None
    with torch.no_grad():
        if channel.ranks.rank == 0:
            try:
                embeddings(batch)
            except pb.errors.TrainingError as error:
                message = str(error)
            embeddings.load_weights("a", weights)
        channel.barrier()
        result = torch.unique(as_tensor(embeddings(batch))).numel()
    channel.barrier()
    return message, result


_KEPT: dict = {}


def prepare_alone(channel, **options):
    """Tables that later calls look up in, and their batch's embeddings by ``alltoall``.

    All ranks call it.
    """
    tables = SHAPES["any"]
    right = pb.Embeddings(
        tables, optimizers("sgd", "any"), exchange="alltoall", seed=3, channel=channel
    )
    _KEPT["retrieve"] = pb.Embeddings(
        tables, optimizers("sgd", "any"), exchange="retrieve", seed=3, channel=channel, **options
    )
    with torch.no_grad():
        return as_tensor(right(ragged_batch(tables, 20, seed=channel.ranks.rank))), os.getpid()


def look_up_alone(channel):
    """The batch of :func:`prepare_alone`, and bytes by rank; no other rank is called."""
    traffic = channel.ranks.traffic
    traffic.sent_to.clear()
    traffic.received_from.clear()
    with torch.no_grad():
        result = as_tensor(
            _KEPT["retrieve"](ragged_batch(SHAPES["any"], 20, seed=channel.ranks.rank))
        )
    return result, dict(traffic.sent_to), dict(traffic.received_from)


def look_up_in_vain(channel, timeout_s):
    """The error of a lookup that waits so long for a rank of another host."""
    before, gets.GET_TIMEOUT_S = gets.GET_TIMEOUT_S, timeout_s
    try:
        look_up_alone(channel)
    except pb.errors.RankFailedError as error:
        return error.rank, str(error)
    finally:
        gets.GET_TIMEOUT_S = before
    return None


def let_go(channel):
    _KEPT.clear()


def interleave(channel, hosts):
    """Train with empty batches on some ranks, and look up between steps.

    The same by both exchanges.
    """
    tables = SHAPES["odd_dims"]
    results = []
    for exchange, options in (("alltoall", {}), ("retrieve", {"hosts": hosts})):
        embeddings = pb.Embeddings(
            tables, pb.Adagrad(lr=0.5), exchange=exchange, seed=3, channel=channel, **options
        )
        seen = []
        rank = channel.ranks.rank
        probe = ragged_batch(tables, 30, seed=99)
        for step in range(12):
            batch = ragged_batch(
                tables, 6 if step % channel.ranks.world_size == rank else 0, seed=step
            )
            loss = loss_of(embeddings(batch))
            with torch.no_grad():
                seen.append(as_tensor(embeddings(probe)))
            loss.backward()
        results.append((seen, [view.weights.copy() for view in embeddings.pieces()]))
    (first, pieces), (second, others) = results
    return all(map(torch.equal, first, second)) and all(map(np.array_equal, pieces, others))


def read_copies(channel, hosts):
    """Read only rows of which every host has one copy: bytes got at first, then, and after loading.

    Returns whether all is right.
    """
    table = pb.Table("a", 40, 16)
    traffic = channel.ranks.traffic
    copies = np.zeros((2, 4), np.bool_)
    copies[0, [1, 2]] = copies[1, [0, 3]] = True
    parts = Assignment(
        {"a": np.arange(40, dtype=np.uint16) % 2}, np.array([0, 2], np.uint16), copies
    )
    embeddings = pb.Embeddings(
        [table],
        pb.SGD(lr=1.0),
        exchange="retrieve",
        seed=3,
        channel=channel,
        hosts=hosts,
        placement=pb.Plan.by_rows(parts),
    )
    batch = ragged_batch([table], 30, seed=channel.ranks.rank)
    actual = []
    same = True
    for number in range(4):
        if number == 2:
            embeddings.load_weights("a", np.arange(640).reshape(40, 16))
        channel.barrier()
        before = traffic.received
        with torch.no_grad():
            rows = embeddings(batch)
        actual.append(traffic.received - before)
        channel.barrier()  # all have filled their copies, and nobody goes on to load
        right = pb.Embeddings([table], pb.SGD(lr=1.0), seed=3)
        if number >= 2:
            right.load_weights("a", np.arange(640).reshape(40, 16))
        with torch.no_grad():
            same &= torch.equal(rows, right(batch))
    return actual[0] > 0, actual[1] > 0 or actual[3] > 0, actual[2] > 0, same
