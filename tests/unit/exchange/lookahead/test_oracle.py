"""Every rank's view of the plans, carried out on arrays of versions.

Reads see the last update, none is lost, slots suffice.
"""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grids import cells, examples, some
from pibroch.errors import ConfigError
from pibroch.exchange.lookahead.oracle import DESIGNS, Oracle
from pibroch.exchange.lookahead.oracle.kernels.window import masks
from pibroch.exchange.lookahead.oracle.kernels.window.naive import NaiveWindow

EMPTY = -7


class Rank:
    """One rank's places: which row's record is in each, in which version."""

    def __init__(self, bounds, rank, capacity, **options):
        self.rank = rank
        self.bounds = bounds
        self.num_home = int(bounds[rank + 1] - bounds[rank])
        self.oracle = Oracle(bounds, rank, capacity=capacity, **options)
        self.rows = np.full(self.num_home + capacity, EMPTY)
        self.rows[: self.num_home] = np.arange(bounds[rank], bounds[rank + 1])
        self.versions = np.zeros(self.num_home + capacity, np.int64)
        self.fetched = []
        self.evicted = []


class Lab:
    """All ranks that train.

    ``touched`` counts the true updates of each row, ``served`` those that its server has.
    """

    def __init__(self, bounds, capacity, num_trainers, **options):
        self.ranks = [
            Rank(np.array(bounds), rank, capacity, num_trainers=num_trainers, **options)
            for rank in range(num_trainers)
        ]
        self.bounds = bounds
        self.servers = range(num_trainers, len(bounds) - 1)
        self.touched = np.zeros(bounds[-1], np.int64)
        self.served = np.zeros(bounds[-1], np.int64)
        self.at_server = np.arange(bounds[-1]) >= bounds[num_trainers]
        self.vectors = 0

    def carry(self, transfers):
        """Gather on all ranks, then scatter on all ranks, as one message does."""
        sent = {}
        for rank, transfer in zip(self.ranks, transfers, strict=True):
            starts = np.cumsum(np.pad(transfer.counts, ((0, 0), (1, 0))), 1)
            for other in range(len(self.ranks)):
                for kind, places in ((0, transfer.records_out), (1, transfer.weights_out)):
                    chosen = places[starts[kind, other] : starts[kind, other + 1]]
                    sent[kind, rank.rank, other] = list(
                        zip(rank.rows[chosen], rank.versions[chosen], strict=True)
                    )
                    if kind == 0:
                        rank.fetched += [
                            int(row) for row in rank.rows[chosen[chosen < rank.num_home]]
                        ]
                    assert other != rank.rank or not len(chosen)
        self.serve(transfers)
        for rank, transfer in zip(self.ranks, transfers, strict=True):
            starts = np.cumsum(np.pad(transfer.counts, ((0, 0), (1, 0))), 1)
            for other in range(len(self.ranks)):
                for kind, places in ((0, transfer.records_in), (1, transfer.weights_in)):
                    chosen = places[starts[kind + 2, other] : starts[kind + 2, other + 1]]
                    received = sent[kind, other, rank.rank]
                    assert len(chosen) == len(received)
                    for place, (row, version) in zip(chosen, received, strict=True):
                        rank.rows[place] = row
                        rank.versions[place] = version
                        if kind == 0:
                            assert place >= rank.num_home or place == row - rank.bounds[rank.rank]
                            if place < rank.num_home:
                                rank.evicted.append(int(row))
                    self.vectors += len(received)

    def serve(self, transfers):
        """Servers take records first, then give rows, by their addresses."""
        for rank, transfer in zip(self.ranks, transfers, strict=True):
            starts = np.cumsum(np.pad(transfer.counts, ((0, 0), (1, 0))), 1)
            assert not transfer.counts[1, len(self.ranks) :].any(), "weights for a server"
            for server in self.servers:
                for place in transfer.records_out[starts[0, server] : starts[0, server + 1]]:
                    row = rank.rows[place]
                    assert (
                        self.bounds[server] <= row < self.bounds[server + 1]
                        and self.at_server[row] == 0
                    )
                    self.served[row] = rank.versions[place]
                    self.at_server[row] = 1
                    rank.evicted.append(int(row))
        fetched = []
        for rank, transfer in zip(self.ranks, transfers, strict=True):
            starts = np.cumsum(np.pad(transfer.counts, ((0, 0), (1, 0))), 1)
            for server in self.servers:
                kinds = (
                    (2, transfer.records_in, transfer.rows_in),
                    (3, transfer.weights_in, transfer.borrowed_rows_in),
                )
                for kind, places, rows in kinds:
                    span = slice(starts[kind, server], starts[kind, server + 1])
                    self.vectors += len(places[span])
                    for place, row in zip(places[span], rows[span], strict=True):
                        assert (
                            self.bounds[server] <= row < self.bounds[server + 1]
                            and place >= rank.num_home
                        )
                        assert self.at_server[row], "its record is elsewhere"
                        rank.rows[place] = row
                        rank.versions[place] = self.served[row]
                        if kind == 2:
                            rank.fetched.append(int(row))
                            fetched.append(row)
        self.at_server[fetched] = 0

    def update(self, gradients, ids_of_rank):
        """Each owner adds one version if exactly the right contributions come."""
        given = {}
        for rank, plan in zip(self.ranks, gradients, strict=True):
            ends = np.cumsum(plan.counts[0])
            for owner in range(len(self.ranks)):
                chosen = plan.given[ends[owner] - plan.counts[0, owner] : ends[owner]]
                given[rank.rank, owner] = [
                    (int(ids_of_rank[rank.rank][i]), rank.rank) for i in chosen
                ]
                self.vectors += len(chosen)
        for rank, plan in zip(self.ranks, gradients, strict=True):
            received = [
                each for other in range(len(self.ranks)) for each in given[other, rank.rank]
            ]
            own = [(int(row), rank.rank) for row in ids_of_rank[rank.rank]]
            first = plan.first_received
            for u, place in enumerate(plan.places):
                row = rank.rows[place]
                sources = plan.source[plan.segments[u] : plan.segments[u + 1]]
                summed = [own[i] if i < len(own) else received[i - first] for i in sources]
                right = [(int(row), r) for r in range(len(self.ranks)) if row in ids_of_rank[r]]
                assert summed == right, (rank.rank, row, summed, right)
                rank.versions[place] += 1


class Sums:
    """Gradients of a plan with the number of the first received one."""

    def __init__(self, gradients, first_received):
        self.places = gradients.places
        self.source = gradients.source
        self.segments = gradients.segments
        self.given = gradients.given
        self.counts = gradients.counts
        self.first_received = first_received


def run(
    bounds, stream, lookahead, capacity, design="lrpp", delayed=True, restart_at=None, in_full=True
):
    """Train on ``stream`` (steps of sorted distinct ids by rank); check all reads and updates.

    Homes beyond the ranks that ``stream`` has are servers'.
    """
    most_in_full = bounds[-1] if in_full else 0
    options = {
        "lookahead": lookahead,
        "design": design,
        "delayed": delayed,
        "most_rows_in_full": most_in_full,
    }
    lab = Lab(bounds, capacity, len(stream[0]), **options)
    added = 0
    in_force = []

    def read_to(step):
        nonlocal added
        while added < min(step + 1, len(stream)):
            for rank in lab.ranks:
                rank.oracle.add(stream[added])
            added += 1

    def opened():
        openings = [rank.oracle.open() for rank in lab.ranks]
        lab.carry([opening.now for opening in openings])
        if openings[0].prefetch is not None:
            lab.carry([opening.prefetch for opening in openings])
        return [opening.places for opening in openings]

    read_to(lookahead)
    places = opened()
    for step, ids_of_rank in enumerate(stream):
        for rank, where, ids in zip(lab.ranks, places, ids_of_rank, strict=True):
            assert np.array_equal(rank.rows[where], ids)
            assert np.array_equal(rank.versions[where], lab.touched[ids]), (step, rank.rank)
        read_to(step + lookahead)
        if step == restart_at:
            go_home(lab)
            for rank in lab.ranks:
                rank.oracle.restart()
                for ids in stream[step:added]:
                    rank.oracle.add(ids)
            places = opened()
        plans = [rank.oracle.plan() for rank in lab.ranks]
        critical = [
            Sums(plan.critical, len(ids)) for plan, ids in zip(plans, ids_of_rank, strict=True)
        ]
        deferred = [
            Sums(plan.deferred, len(ids) + plan.critical.counts[1].sum())
            for plan, ids in zip(plans, ids_of_rank, strict=True)
        ]
        assert len({(plan.is_tight, plan.lookahead, tuple(plan.used)) for plan in plans}) == 1, (
            "views differ"
        )
        lab.update(critical, ids_of_rank)
        lab.update(
            [Sums(plan.local, len(ids)) for plan, ids in zip(plans, ids_of_rank, strict=True)],
            ids_of_rank,
        )
        if plans[0].is_tight:
            lab.update(deferred, ids_of_rank)
            for message in zip(*(plan.evicted for plan in plans), strict=True):
                lab.carry(message)
        lab.carry([plan.next_step for plan in plans])
        lab.touched[np.unique(np.concatenate(ids_of_rank))] += 1
        soon_read = [
            rank.versions[plan.places].copy() for rank, plan in zip(lab.ranks, plans, strict=True)
        ]
        if not plans[0].is_tight:
            lab.update(deferred, ids_of_rank)
            for message in zip(*(plan.evicted for plan in plans), strict=True):
                lab.carry(message)
        if plans[0].prefetch is not None:
            lab.carry([plan.prefetch for plan in plans])
        places = [plan.places for plan in plans]
        for rank, where, before in zip(lab.ranks, places, soon_read, strict=True):
            assert np.array_equal(rank.versions[where], before), (
                "what the next step reads was touched in the background"
            )
            assert plans[0].used[rank.rank] <= capacity
        in_force.append(plans[0].lookahead)
    for rank in lab.ranks:
        home = slice(rank.bounds[rank.rank], rank.bounds[rank.rank + 1])
        assert np.array_equal(rank.versions[: rank.num_home], lab.touched[home]), (
            "an update was lost"
        )
    assert np.array_equal(
        lab.served[lab.bounds[len(lab.ranks)] :], lab.touched[lab.bounds[len(lab.ranks)] :]
    )
    if restart_at is None:
        fetched = sorted(row for rank in lab.ranks for row in rank.fetched)
        assert fetched == sorted(row for rank in lab.ranks for row in rank.evicted), (
            "fetched and not evicted, or twice"
        )
    assert not plans[0].used.any()
    return lab, in_force


def go_home(lab):
    """What the exchange does before a restart: the newest version of each row is written home."""
    for row, version in enumerate(lab.touched):
        for home in lab.ranks:
            if home.bounds[home.rank] <= row < home.bounds[home.rank + 1]:
                home.versions[row - home.bounds[home.rank]] = version
    lab.served[:], lab.at_server[:] = (
        lab.touched,
        np.arange(len(lab.touched)) >= lab.bounds[len(lab.ranks)],
    )


def bounds_of(rng, num_rows, num_ranks, num_servers=0):
    """Homes of any size; with servers, only these have some."""
    cuts = np.sort(rng.integers(0, num_rows + 1, (num_servers or num_ranks) - 1)).tolist()
    return [0] * (num_ranks if num_servers else 0) + [0, *cuts, num_rows]


def largest_number_of_rows(step, design, num_servers):
    """Slots that a rank needs at least."""
    all_rows = np.unique(np.concatenate(step))
    if design == "replicated":
        return len(all_rows)
    if design == "partitioned" and num_servers:
        return max(
            len(np.union1d(rows, all_rows[all_rows % len(step) == rank]))
            for rank, rows in enumerate(step)
        )
    return max(map(len, step))


def stream_of(rng, num_steps, num_ranks, num_rows, most):
    """Skewed ids, some ranks without any."""
    sizes = rng.integers(0, most + 1, (num_steps, num_ranks))
    return [
        [np.unique((rng.random(size) ** 2 * num_rows).astype(np.int64)) for size in sizes_of_rank]
        for sizes_of_rank in sizes
    ]


@settings(max_examples=examples(150), deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    num_ranks=st.integers(1, 4),
    lookahead=st.sampled_from([1, 2, 3, 7, 200]),
    spare=st.sampled_from([0, 1, 5, 1000]),
    design=st.sampled_from(sorted(DESIGNS)),
    delayed=st.booleans(),
    most=st.sampled_from([0, 1, 8, 30]),
    restarts=st.booleans(),
    num_servers=st.integers(0, 3),
    in_full=st.booleans(),
)
def test_every_read_sees_the_last_update(
    seed, num_ranks, lookahead, spare, design, delayed, most, restarts, num_servers, in_full
):
    rng = np.random.default_rng(seed)
    num_rows = int(rng.integers(1, 120))
    bounds = bounds_of(rng, num_rows, num_ranks, num_servers)
    stream = stream_of(rng, 25, num_ranks, num_rows, most)
    largest = max(largest_number_of_rows(step, design, num_servers) for step in stream)
    run(
        bounds,
        stream,
        lookahead,
        largest + spare,
        design,
        delayed,
        12 if restarts else None,
        in_full,
    )


@settings(max_examples=examples(4), deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    num=st.sampled_from([(70, 61), (62, 0)]),
    design=st.sampled_from(sorted(DESIGNS)),
    spare=st.sampled_from([0, 1000]),
    in_full=st.booleans(),
)
def test_as_many_ranks_as_a_word_has_bits_and_more(seed, num, design, spare, in_full):
    """One word, or four; with 131 ranks and servers a byte is too short for a rank."""
    num_ranks, num_servers = num
    rng = np.random.default_rng(seed)
    bounds = bounds_of(rng, 90, num_ranks, num_servers)
    stream = stream_of(rng, 7, num_ranks, 90, 3)
    largest = max(largest_number_of_rows(step, design, num_servers) for step in stream)
    run(bounds, stream, 3, largest + spare, design, True, 4, in_full)


def test_a_batch_that_fits_into_no_cache_is_named():
    oracle = Oracle(np.array([0, 5, 10]), 0, lookahead=2, capacity=3)
    oracle.add([np.array([1, 2, 3]), np.array([7])])
    with pytest.raises(ConfigError, match="rank 1 reads 4 rows, and a cache of 3"):
        oracle.add([np.array([1]), np.array([1, 2, 3, 4])])


def test_so_many_ranks_cannot_be():
    with pytest.raises(ConfigError, match="32768 ranks and servers"):
        Oracle(np.arange((1 << 15) + 1), 0, lookahead=2, capacity=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lookahead": 0}, "lookahead 0"),
        ({"capacity": -1}, "cache of -1"),
        ({"design": "lru"}, "'lru'"),
    ],
)
def test_what_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        Oracle(np.array([0, 5]), 0, **({"lookahead": 1, "capacity": 5} | options))


def test_lookahead_shrinks_when_the_cache_is_small_and_grows_again():
    rng = np.random.default_rng(1)
    bounds = [0, 500, 1000]
    stream = stream_of(rng, 40, 2, 1000, 60)
    wide, narrow = (run(bounds, stream, 20, capacity)[1][:20] for capacity in (1000, 100))
    assert set(wide) == {20}
    assert 1 <= min(narrow) < 20
    assert any(later > earlier for earlier, later in pairwise(narrow))


def test_the_window_may_need_more_room_while_a_step_is_planned():
    """As the lookahead grows again, ``plan`` takes in more touches than the ring has held."""
    rng = np.random.default_rng(5)
    # most of these wait: the lookahead shrinks
    again = [[np.unique(rng.integers(0, 6_000, 3_900))] for _ in range(20)]
    # none of these: it grows
    alone = [[np.arange(first, first + 3_900)] for first in range(6_000, 110_000, 4_000)]
    in_force = run([0, 0, 110_000], again + alone, 20, 4_000, in_full=False)[1]
    assert min(in_force) < 5 and max(in_force) > 15


def test_a_longer_lookahead_moves_fewer_rows():
    rng = np.random.default_rng(2)
    stream = stream_of(rng, 60, 2, 400, 60)
    moved = [run([0, 200, 400], stream, lookahead, 400)[0].vectors for lookahead in (1, 5, 30)]
    assert moved[0] > moved[1] > moved[2]
    designs = {design: run([0, 200, 400], stream, 30, 400, design)[0].vectors for design in DESIGNS}
    assert designs["lrpp"] < designs["partitioned"] < designs["replicated"]


def journeys(ranks, transfers):
    """Records and weights of one message as sets of (row, from, to)."""
    records = set()
    weights = set()
    for rank, transfer in zip(ranks, transfers, strict=True):
        ends = np.cumsum(transfer.counts, 1)
        for other in range(transfer.counts.shape[1]):
            span = slice(ends[2, other] - transfer.counts[2, other], ends[2, other])
            records |= {(int(row), other, rank.rank) for row in transfer.rows_in[span]}
            span = slice(ends[3, other] - transfer.counts[3, other], ends[3, other])
            weights |= {(int(row), other, rank.rank) for row in transfer.borrowed_rows_in[span]}
            if other >= len(ranks):
                span = slice(ends[0, other] - transfer.counts[0, other], ends[0, other])
                records |= {
                    (int(row), rank.rank, other) for row in rank.rows[transfer.records_out[span]]
                }
            else:
                assert transfer.counts[1, other] == transfers[other].counts[3, rank.rank]
        rank.rows[transfer.records_in] = transfer.rows_in
    return records, weights


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    num_ranks=st.integers(1, 4),
    lookahead=st.sampled_from([2, 3, 9]),
    design=st.sampled_from(sorted(DESIGNS)),
    num_servers=st.integers(0, 3),
    in_full=st.booleans(),
)
def test_plans_are_those_of_the_naive_rules(
    seed, num_ranks, lookahead, design, num_servers, in_full
):
    compare_to_naive(seed, num_ranks, lookahead, design, num_servers, in_full, 12)


@pytest.mark.parametrize(
    ("num", "design"),
    cells([(62, 0), (70, 61), (3, 128), (3, 1000)], sorted(DESIGNS)),
)
def test_plans_of_many_ranks_are_those_of_the_naive_rules(num, design):
    num_ranks, num_servers = num
    compare_to_naive(7, num_ranks, 3, design, num_servers, False, 3)


@pytest.mark.parametrize("design", some(sorted(DESIGNS), 0, 3))
def test_plans_by_sets_of_any_number_of_words_are_those_of_the_naive_rules(design, monkeypatch):
    monkeypatch.setattr(masks, "MOST_CONSTANT_WORDS", 1)
    compare_to_naive(7, 70, 3, design, 61, False, 3)


def compare_to_naive(seed, num_ranks, lookahead, design, num_servers, in_full, most):
    """Of a stream of 12 steps, at most ``most`` rows a rank and step."""
    rng = np.random.default_rng(seed)
    num_rows = int(rng.integers(1, 60))
    bounds = bounds_of(rng, num_rows, num_ranks, num_servers)
    stream = stream_of(rng, 12, num_ranks, num_rows, most)
    naive = NaiveWindow(
        bounds, [[set(map(int, ids)) for ids in step] for step in stream], lookahead, design
    )
    options = {"lookahead": lookahead, "design": design, "num_trainers": num_ranks}
    options["most_rows_in_full"] = num_rows if in_full else 0
    ranks = [Rank(np.array(bounds), rank, num_rows, **options) for rank in range(num_ranks)]
    for rank in ranks:
        for step in stream:
            rank.oracle.add(step)

    def check(transfers, moves):
        assert journeys(ranks, transfers) == (moves.records, moves.weights)

    openings = [rank.oracle.open() for rank in ranks]
    check([opening.now for opening in openings], naive.arrive(0, naive.rows(0), 0))
    check([opening.prefetch for opening in openings], naive.early(1, 0))
    for step in range(len(stream)):
        plans = [rank.oracle.plan() for rank in ranks]
        assert not plans[0].is_tight
        for sums, is_critical in (
            (lambda plan: plan.critical, True),
            (lambda plan: plan.deferred, False),
        ):
            sums_by_owner = {
                (int(stream[step][rank.rank][i]), rank.rank, owner)
                for rank, plan in zip(ranks, plans, strict=True)
                for owner, given in enumerate(
                    np.split(sums(plan).given, np.cumsum(sums(plan).counts[0])[:-1])
                )
                for i in given
            }
            assert sums_by_owner == naive.gradients(step, is_critical).gradients
        check([plan.next_step for plan in plans], naive.soon(step + 1))
        check([plan.evicted[0] for plan in plans], naive.leaving(step))
        if plans[0].prefetch is not None:
            check([plan.prefetch for plan in plans], naive.early(step + 2, step))
