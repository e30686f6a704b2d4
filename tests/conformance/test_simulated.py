"""Bytes that the simulation counts are those that ranks send, to the byte, step by step."""

import numpy as np
import pytest
import simulated_cases as cases

import pibroch as pb
from pibroch.sim.counting import count
from small_run import make_dataset

STEPS = 12
LOOKAHEAD = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "small")


def steps_of(results):
    """``[steps, W, W]``: bytes from rank to rank between the ends of two steps."""
    return np.diff(np.array(results).transpose(1, 0, 2), axis=0)


@pytest.mark.parametrize(
    ("exchange", "placement"),
    [
        *(("alltoall", kind) for kind in ("row_wise", "table_wise", "table_wise_pooled")),
        *(("retrieve", kind) for kind in ("row_wise", "table_wise")),
    ],
)
def test_of_alltoall_and_of_retrieve_which_trains_as_it_does(worlds, exchange, placement):
    results = worlds(2).run(cases.sent_by_step, exchange, STEPS, placement=placement)
    counts = count(cases.job(2, placement), STEPS)
    compare_alltoall(results, counts)


def compare_alltoall(results, counts):
    """Between two ends of steps: gradients of one, ids and rows of the step after."""
    for number, sent in enumerate(steps_of(results)[:-2]):
        parts = ((number + 1, "update"), (number + 2, "route"), (number + 2, "fetch"))
        expected = sum(np.sum(counts[at][name].sent, axis=0) for at, name in parts)
        assert (sent == expected).all(), number


def test_of_alltoall_in_16_bits(worlds):
    options = {"placement": "row_wise", "wire": "bfloat16"}
    results = worlds(2).run(cases.sent_by_step, "alltoall", STEPS, **options)
    counts = count(cases.job(2, "row_wise", pb.AllToAll(wire="bfloat16")), STEPS)
    # a filler's counts come behind the last batch
    whole = np.array(results)[:, -1]
    difference = whole - np.sum([each.sent for each in counts], axis=0)
    assert 0 < difference.max() <= 2 * 3 * 32
    assert whole.sum() > 10_000


@pytest.mark.parametrize("cache_rows", [None, 90])
def test_of_lookahead(worlds, cache_rows):
    options = {"lookahead": LOOKAHEAD, "cache_rows": cache_rows}
    results = worlds(2).run(cases.sent_by_step, "lookahead", 2 * STEPS, **options)
    ahead = pb.Lookahead(lookahead=LOOKAHEAD, cache_rows=cache_rows)
    counts = count(cases.job(2, "row_wise", ahead), STEPS, warm_up=0)
    for number, sent in enumerate(steps_of(results)[: STEPS - 1]):
        assert (sent == counts[number + 1].sent).all(), number
    assert sum(each.sent.sum() for each in counts) > 10_000


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_of_messages_that_are_compressed(worlds, wire):
    options = {"compress": True, "wire": wire}
    results = worlds(2).run(cases.sent_by_step, "alltoall", STEPS, **options)
    counts = count(cases.job(2, "row_wise", pb.AllToAll(**options)), STEPS)
    compare_alltoall(results, counts)


def test_of_samples_that_are_assigned(worlds, data):
    options = {"assign": "rows"}
    results = worlds(2).run(cases.sent_by_step, "alltoall", STEPS, data=data, **options)
    counts = count(cases.assigned_job(data, 2, pb.AllToAll(**options)), STEPS)
    compare_alltoall(results, counts)


@pytest.mark.parametrize("exchange", ["alltoall", "lookahead"])
def test_of_raw_ids(worlds, exchange):
    options = {"lookahead": LOOKAHEAD} if exchange == "lookahead" else {}
    given = (cases.sent_by_step, exchange, 2 * STEPS)
    results = worlds(2).run(*given, has_raw_ids=True, **options)
    chosen = pb.Lookahead(**options) if options else pb.AllToAll()
    counts = count(cases.raw_job(2, chosen), STEPS, warm_up=0)
    for number, sent in enumerate(steps_of(results)[: STEPS - 3]):
        if exchange == "lookahead":
            expected = counts[number + 1].sent - np.sum(counts[number + 1]["share ids"].sent, 0)
        else:
            parts = ((number + 1, "update"), (number + 2, "route"), (number + 2, "fetch"))
            expected = sum(np.sum(counts[at][name].sent, axis=0) for at, name in parts)
        # what is read for the step to come
        expected = expected + np.sum(counts[number]["share ids"].sent, axis=0)
        assert (sent == expected).all(), number


def test_of_an_exchange_of_ones_own(worlds):
    results = worlds(3).run(cases.sent_by_step, "ask_first", STEPS)
    counts = count(cases.own_job(3), STEPS, warm_up=0)
    for number, sent in enumerate(steps_of(results)[:-1]):
        # its feed asks before the step's number is known
        parts = (("feed", number), ("lookup", number + 1), ("update", number + 1))
        expected = sum(np.sum(counts[at][name].sent, axis=0) for name, at in parts)
        assert (sent == expected).all(), number


HOSTS = {
    "2 x 2": (4, {"ranks_per_host": 2}),
    "3 x 1": (3, {"ranks_per_host": 1}),
    "2 + 1": (3, {"ranks_per_host": 2}),
    "4 x 1, two hosts a tower": (4, {"ranks_per_host": 1, "hosts_per_tower": 2}),
}
PLACEMENTS = {
    "2 x 2": ("row_wise", "table_wise_pooled", "row_wise_pooled", "column_wise"),
    "2 + 1": ("row_wise", "table_wise_pooled"),
}


@pytest.mark.parametrize(
    ("hosts", "options"),
    [
        (hosts, options)
        for hosts in HOSTS
        for options in (
            {"has_modules": True},
            *({"placement": kind} for kind in PLACEMENTS.get(hosts, ("row_wise",))),
        )
    ]
    + [("2 x 2", {"wire": "bfloat16"}), ("2 x 2", {"wire": "float16", "has_modules": True})],
)
def test_of_towers(worlds, hosts, options):
    num_ranks, of_hosts = HOSTS[hosts]
    options = options | of_hosts
    results = worlds(num_ranks).run(cases.sent_by_step, "towers", STEPS, **options)
    job = cases.job_by_towers(num_ranks, **options)
    counts = count(job, STEPS)
    home = 1 if job.modules else 2  # outputs of modules go home inside their step
    for number, sent in enumerate(steps_of(results)[:-2]):
        parts = [
            *((number + 1, name) for name in ("gradients", "tower update")),
            *((number + 2, name) for name in ("peer ids", "tower route", "tower fetch")),
            (number + home, "embeddings"),
        ]
        expected = sum(np.sum(counts[at][name].sent, axis=0) for at, name in parts)
        assert (sent == expected).all(), number
    assert sum(each.sent.sum() for each in counts) > 10_000
