"""What every transport keeps to, over two to four real processes."""

import pytest
import torch
import transport_cases as cases
from world import World

from pibroch.collectives.transports import TRANSPORTS

ON_CPU = sorted(TRANSPORTS.keys() - {"nccl"})  # which needs a GPU a rank
OF_THE_HOUSE = sorted(
    set(ON_CPU) - {"store"}
)  # that of the example has no threads or sockets, and notices a loss late
SIZES = [2, 3, 4]
SECONDS_TO_NOTICE = 30

by_all = pytest.mark.parametrize("name", ON_CPU)
by_those_of_the_house = pytest.mark.parametrize("name", OF_THE_HOUSE)


def assert_pairs_arrive(received, rank, dtype, message=0):
    for p, rows in enumerate(received):
        value = (
            7 if p == rank else 100 * message + 10 * p + rank
        )  # what is for oneself is not touched
        want = torch.tensor(value).to(dtype)
        assert (
            rows.dtype == dtype
            and rows.shape == (cases.rows_from_to(p, rank), 2)
            and (rows == want).all()
        )


@by_all
@pytest.mark.parametrize("size", SIZES)
def test_ragged_and_empty_pairs_of_several_messages_arrive_in_order(worlds, size, name):
    for rank, by_dtype in enumerate(worlds(size).run(cases.exchange, name, 3)):
        for dtype, messages in zip(cases.DTYPES, by_dtype, strict=True):
            for message, received in enumerate(messages):
                assert_pairs_arrive(received, rank, dtype, message)


@by_all
@pytest.mark.parametrize("size", SIZES)
def test_a_message_waits_for_a_rank_that_is_late(worlds, size, name):
    for rank, values in enumerate(worlds(size).run(cases.large, name)):
        assert values == [[10.0 * p + rank] for p in range(size) if p != rank]


@by_all
@pytest.mark.parametrize("size", SIZES)
def test_sums_are_made_in_place_with_the_same_bits_everywhere(worlds, size, name):
    results = worlds(size).run(cases.reduce, name)
    parts = [
        torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(size)
    ]
    for numbers, counts, nothing, wide in results:
        torch.testing.assert_close(numbers, torch.stack(parts).sum(0))
        assert torch.equal(numbers, results[0][0])
        assert counts.tolist() == [size * i + size * (size - 1) // 2 for i in range(5)]
        assert nothing.shape == (0,) and wide.tolist() == [float(size)] * 3


@by_all
@pytest.mark.parametrize(
    ("size", "partition"),
    [
        (2, [[1, 0]]),
        (3, [[2, 0]]),
        (3, [[1, 2], [0]]),
        (4, [[0, 1], [2, 3]]),
        (4, [[3, 0], [1, 2]]),
        (4, [[3, 1, 0]]),
    ],
)
def test_a_group_of_some_ranks_keeps_to_itself_and_to_its_order(worlds, size, partition, name):
    for rank, result in enumerate(worlds(size).run(cases.groups, name, partition)):
        (members,) = [members for members in partition if rank in members] or [None]
        if members is None:
            assert result is None
            continue
        here = members.index(rank)
        assert result[:2] == (here, tuple(members))
        if len(members) > 1:
            assert_pairs_arrive(result[2], here, torch.int64)
            assert result[3] == sum(2.0**member for member in members)


@by_all
def test_overlapping_groups_and_groups_again(worlds, name):
    """A rank may be in more groups than another, and open one with the same members twice."""
    for partition in ([[0, 1]], [[0, 2]], [[1, 2]], [[0, 1]], [[0, 1, 2]]):
        results = worlds(3).run(cases.groups, name, partition)
        assert [result is not None for result in results] == [
            rank in partition[0] for rank in range(3)
        ]


@by_those_of_the_house
def test_closing_leaves_neither_threads_nor_sockets(worlds, name):
    for before, opened, after, message in worlds(2).run(cases.close, name):
        assert (
            all(more >= less for more, less in zip(opened, before, strict=True))
            and opened != before
        )
        assert after == before
        assert len(message) == 2 and all("closed" in text for text in message)


@by_those_of_the_house
@pytest.mark.parametrize("what", ["pairs", "reduce"])
def test_the_loss_of_a_rank_is_an_error_on_the_others(what, name):
    world = World(3)
    try:
        world.ask(cases.lose_a_peer, name, 1, what)
        for message, seconds in (world.answer(0), world.answer(2)):
            assert message and seconds < SECONDS_TO_NOTICE
    finally:
        world.close()
