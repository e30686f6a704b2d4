"""Channels between one to four ranks: ragged, empty, overlapping.

And a channel of one process without any group.
"""

import os
import subprocess
import sys
from collections import Counter

import channel_cases as cases
import pytest
import torch

from forked import context
from pibroch.collectives import Channel, Ranks
from pibroch.errors import ConfigError
from pibroch.ports import free_port

SIZES = [1, 2, 3, 4]


@pytest.fixture(params=SIZES)
def size(request):
    return request.param


def test_ragged_rows_of_every_type_arrive_in_rank_order(worlds, size):
    for rank, received in enumerate(worlds(size).run(cases.all_to_all)):
        want = [10 * p + rank for p in range(size) for _ in range(cases.rows_from_to(p, rank))]
        for dtype, rows in zip(cases.DTYPES, received, strict=True):
            assert rows.dtype == dtype
            assert rows.tolist() == [[value, value] for value in want]


def test_ranks_may_send_or_receive_nothing(worlds, size):
    for rank, (everywhere, only_to_first) in enumerate(worlds(size).run(cases.nothing)):
        assert everywhere.shape == (0, 3)
        assert only_to_first.shape == ((size if rank == 0 else 0), 3) or size == 1


def test_counts(worlds, size):
    for rank, received in enumerate(worlds(size).run(cases.counts)):
        assert received.tolist() == [[p, rank, 100 * p + rank] for p in range(size)]


def test_plain_values_and_ragged_tensors_are_gathered(worlds, size):
    want = [{"rank": r, "name": "ü" * (r * 3), "none": None, "list": [r] * r} for r in range(size)]
    for values, tensors in worlds(size).run(cases.gathered):
        assert values == want
        assert [tensor.tolist() for tensor in tensors] == [[[r] * 3] * (2 * r) for r in range(size)]


def test_sums_have_the_same_bits_everywhere(worlds, size):
    results = worlds(size).run(cases.reduced)
    parts = [
        torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(size)
    ]
    for sums in results:
        torch.testing.assert_close(sums[0], torch.stack(parts).sum(0))
        assert sums[1].tolist() == [size * i + size * (size - 1) // 2 for i in range(5)]
        assert all(torch.equal(a, b) for a, b in zip(sums, results[0], strict=True))


def test_channels_overlap(worlds, size):
    ranks = list(range(size))
    for values, sums in worlds(size).run(cases.overlapping):
        assert values == [ranks] * 3
        assert sums == [[float(sum(ranks) + i * size)] for i in range(3)]


def test_traffic_counts_what_goes_to_others(worlds, size):
    for rank, ((rows, reduced, counts), by_rows, by_sum) in enumerate(
        worlds(size).run(cases.traffic)
    ):
        others = [p for p in range(size) if p != rank]
        assert rows == (
            8 * sum(cases.rows_from_to(rank, p) for p in others),
            8 * sum(cases.rows_from_to(p, rank) for p in others),
        )
        assert reduced == (int(2 * (size - 1) / size * 96),) * 2
        assert counts == (24 * (size - 1),) * 2
        sent = {p: 8 * cases.rows_from_to(rank, p) for p in others}
        received = {p: 8 * cases.rows_from_to(p, rank) for p in others}
        assert [+counter for counter in by_rows] == [+Counter(sent), +Counter(received)]
        if size > 1:  # gloo sums in a ring
            assert by_sum == ({(rank - 1) % size: reduced[0]}, {(rank + 1) % size: reduced[1]})


def test_groups_share_one_account_of_traffic_and_keep_their_order(worlds):
    results = worlds(4).run(cases.groups)
    for rank, (reported, shared, limits, members, sent_to, received_from, totals) in enumerate(
        results
    ):
        tower = (0, 1) if rank < 2 else (3, 2)
        peers = (0, 2) if rank % 2 == 0 else (1, 3)
        assert shared and limits == (300.0, 300.0, 7.0)
        assert members == [
            tower,
            peers,
            (1,) if rank == 1 else None,
            (tower[1],) if rank == tower[1] else None,
        ]
        for group, who, total in zip(
            (tower, peers, range(4)), reported[::2], reported[1::2], strict=True
        ):
            assert who == [[place, member, len(group) == 4] for place, member in enumerate(group)]
            assert total == [sum(group)] * 4
        assert totals == (sum(sent_to.values()), sum(received_from.values()))
        for peer in {0, 1, 2, 3} - {rank}:
            assert sent_to[peer] == results[peer][5][rank] > 0
        assert rank not in sent_to


@pytest.mark.parametrize("groups", [[[0, 3]], [[0, 1], [1, 2]], [[0, 0]], [[-1]], [[]]])
def test_groups_of_ranks_that_do_not_exist_are_refused(groups):
    with pytest.raises(ConfigError, match="of 3 ranks"):
        Ranks(0, 3).groups(groups)


def test_ranks_of_one_machine_share_a_host(worlds):
    for topology in worlds(3).run(cases.topology):
        assert topology.ranks_by_host == ((0, 1, 2),)


def test_one_process_needs_no_group():
    assert not torch.distributed.is_initialized()
    ranks = Ranks.joined()
    assert (ranks.rank, ranks.world_size) == (0, 1)
    channel = ranks.open_channel()
    rows = torch.arange(6.0).view(3, 2)
    tensor = torch.ones(4)
    assert torch.equal(channel.all_to_all(rows, [3], [3]), rows)
    assert channel.gather({"a": 1}) == [{"a": 1}]
    assert torch.equal(channel.gather_tensors(rows)[0], rows)
    channel.all_reduce(tensor)()
    assert tensor.tolist() == [1.0] * 4
    channel.barrier()
    channel.close()
    assert (ranks.traffic.sent, ranks.traffic.received) == (0, 0)


def exit_codes_of_two(target):
    port = free_port()
    ranks = [context().Process(target=target, args=(rank, port)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    return [process.exitcode for process in ranks]


@pytest.mark.skipif(sys.platform != "linux", reason="starves gloo's threads by Linux's scheduler")
def test_a_program_may_end_right_after_a_sum():
    for _ in range(3):
        assert exit_codes_of_two(cases.sum_and_end) == [0, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="looks at threads as Linux shows them")
def test_a_program_may_leave_its_ranks_and_join_them_again():
    assert exit_codes_of_two(cases.join_again) == [0, 0]


ENDS_AFTER_BACKWARD = """
import torch, torch.distributed as dist
from pibroch import Adagrad, Embeddings, JaggedBatch, Table
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
tables = [Table(f"C{i}", 20000, 64) for i in range(8)]
embeddings = Embeddings(tables, Adagrad(lr=0.02), exchange="alltoall")
ids = torch.randint(20000, (8, 2048))
features = embeddings.row_space.features
batch = JaggedBatch.from_one_hot(torch.zeros(2048, 1), features, ids, torch.zeros(2048))
embeddings(batch).sum().backward()
print("the end")
"""


def test_a_program_may_end_right_after_backward():
    """Its last gradients still travel when it ends.

    No thread may come back into an interpreter that is gone.
    """
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    program = [sys.executable, "-c", ENDS_AFTER_BACKWARD]
    ranks = [
        subprocess.Popen(program, env=os.environ | place | {"RANK": str(rank)}, **pipes)
        for rank in range(2)
    ]
    try:
        text = [rank.communicate(timeout=120) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], text
        assert [output for output, _ in text] == ["the end\n"] * 2
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's scheduler")
def test_gloos_threads_wait_for_their_turn(worlds):
    for ours, chosen in worlds(2).run(cases.policies_of_gloo_threads):
        assert ours and set(ours) == {os.SCHED_BATCH}
        assert set(chosen) == {os.SCHED_IDLE}


def test_ranks_without_a_group_are_refused():
    with pytest.raises(ConfigError, match="init_process_group"):
        Channel(Ranks(0, 2))
