"""The exchange ``retrieve``.

The bits of ``alltoall`` wherever rows lie, and lookups by one rank while the others sleep.
"""

import os
import signal

import numpy as np
import pytest
import retrieve_cases
import torch
from exchanges import options_of
from test_world import KIND_OF, bits, whole_records

import cases
from cases import OPTIMIZERS, SHAPES, run_steps
from row_plans import random_plan

HOSTS = {1: [0], 2: [0, 1], 3: [0, 1, 0], 4: [0, 0, 1, 1]}
"""Some ranks share memory and others do not."""


@pytest.mark.parametrize("size", [2, 3, 4])
def test_lookups_without_step_have_the_bits_of_alltoall(worlds, size):
    for number, shape in enumerate(("any", "narrow", "mean")):
        plan = random_plan(SHAPES[shape], size, number, copies=True)
        for options in ({"placement": plan}, options_of("retrieve", "mixed", SHAPES[shape])):
            options = {"placement": options["placement"]}
            right = worlds(size).run(retrieve_cases.look_up, shape, exchange="alltoall", **options)
            for hosts in (None, HOSTS[size], list(range(size))):
                actual = worlds(size).run(retrieve_cases.look_up, shape, hosts=hosts, **options)
                for own, other in zip(actual, right, strict=True):
                    assert all(map(torch.equal, own, other)), (shape, hosts)


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
def test_copies_of_a_host_are_read_by_its_ranks(worlds, wire):
    for number, shape in enumerate(("any", "narrow")):
        plan = random_plan(SHAPES[shape], 4, number, copies=True, partial=True)
        right = worlds(4).run(
            retrieve_cases.look_up, shape, exchange="alltoall", placement=plan, wire=wire
        )
        for hosts in (HOSTS[4], [0, 1, 1, 1], [0, 1, 2, 3], None):
            actual = worlds(4).run(
                retrieve_cases.look_up, shape, hosts=hosts, placement=plan, wire=wire
            )
            for own, other in zip(actual, right, strict=True):
                assert all(map(torch.equal, own, other)), (shape, hosts)


def test_a_copied_row_crosses_to_a_host_once_and_follows_what_is_loaded(worlds):
    at_first, then, after_loading, same = map(
        list, zip(*worlds(4).run(retrieve_cases.read_copies, HOSTS[4]), strict=True)
    )
    assert all(same)
    assert any(at_first)
    assert not any(then)
    assert any(after_loading)


@pytest.mark.parametrize(
    ("hosts", "holders", "each_loads", "copied"),
    [
        ([0, 0], [1], False, []),
        ([0, 1], [1], False, []),
        ([0, 0], [0, 1], True, []),
        ([0, 1], [0, 1], True, []),
        ([0, 0, 1], [0, 1, 2], True, []),
        ([0, 0, 1], [2, 1], True, [0]),
    ],
)
def test_lookups_go_on_while_tables_are_replaced(worlds, hosts, holders, each_loads, copied):
    results = worlds(len(hosts)).run(
        retrieve_cases.look_up_while_tables_are_replaced, hosts, holders, each_loads, copied
    )
    for seen in results:
        assert all(len(numbers) == 1 for numbers in seen), "rows of several versions in one lookup"
        assert seen == sorted(seen) and seen[0] == [0] and seen[-1] == [20]


def test_a_rank_that_has_yet_to_load_hears_of_it_soon(worlds):
    (message, result), (nothing, other) = worlds(2).run(retrieve_cases.look_up_before_loading)
    assert "others have loaded 1 times, and this rank 0 times" in message and nothing is None
    assert result == other


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_places_change_no_bit_of_rows_that_travel_narrow(worlds, wire):
    right = worlds(4).run(retrieve_cases.look_up, "any", exchange="alltoall", wire=wire)
    actual = worlds(4).run(retrieve_cases.look_up, "any", hosts=HOSTS[4], wire=wire)
    for own, other in zip(actual, right, strict=True):
        assert all(map(torch.equal, own, other))


def test_moving_averages_are_read_too(worlds):
    right, actual = (
        worlds(4).run(retrieve_cases.read_averages, HOSTS[4], each)
        for each in ("alltoall", "retrieve")
    )
    assert all(map(np.array_equal, right, actual))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_training_has_the_bits_of_alltoall(worlds, size):
    for seed, (name, shape) in enumerate(
        zip(OPTIMIZERS, ("any", "odd_dims", "shared", "any", "narrow"), strict=True)
    ):
        first, records = bits(worlds(size), name, shape)
        plan = random_plan(SHAPES[shape], size, seed, copies=size > 1)
        replicas = ("gather", "sparse", "dense")[(seed + size) % 3]
        hosts = (None, HOSTS[size])[seed % 2]
        results = worlds(size).run(
            run_steps,
            name,
            shape,
            KIND_OF[name],
            exchange="retrieve",
            placement=plan,
            replicas=replicas,
            hosts=hosts,
        )
        optimizer = cases.optimizers(name, shape)
        assert np.array_equal(whole_records(results, SHAPES[shape], optimizer), records), name
        for (actual, _), (other, _) in zip(results, first, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(actual, other, strict=True)), name


def test_neither_updates_nor_reads_overtake_each_other(worlds):
    for hosts in (None, HOSTS[4]):
        assert worlds(4).run(retrieve_cases.interleave, hosts) == [True] * 4


@pytest.mark.parametrize("hosts", [None, HOSTS[4]])
def test_a_rank_looks_up_while_all_others_sleep(worlds, hosts):
    world = worlds(4)
    prepared = world.run(retrieve_cases.prepare_alone, hosts=hosts)
    try:
        for rank in range(
            4
        ):  # the others wait for what they are to do next, in no call of pibroch's
            world.ask_one(rank, retrieve_cases.look_up_alone)
            result, sent, received = world.answer(rank)
            assert torch.equal(result, prepared[rank][0])
            near = {p for p in range(4) if hosts is None or hosts[p] == hosts[rank]}
            assert not any(sent.get(p) or received.get(p) for p in near)
            assert all(sent[p] and received[p] for p in set(range(4)) - near)
    finally:
        world.run(retrieve_cases.let_go)


def test_a_rank_of_another_host_that_stays_silent_is_named(worlds):
    world = worlds(2)
    prepared = world.run(retrieve_cases.prepare_alone, hosts=[0, 1])
    try:
        os.kill(prepared[1][1], signal.SIGSTOP)
        try:
            world.ask_one(0, retrieve_cases.look_up_in_vain, 1.2)
            rank, why = world.answer(0)
        finally:
            os.kill(prepared[1][1], signal.SIGCONT)
    finally:
        world.run(retrieve_cases.let_go)
    assert rank == 1 and "it answers no gets" in why


def test_neighbours_may_even_be_stopped(worlds):
    world = worlds(2)
    prepared = world.run(retrieve_cases.prepare_alone)
    try:
        os.kill(prepared[1][1], signal.SIGSTOP)
        try:
            world.ask_one(0, retrieve_cases.look_up_alone)
            assert torch.equal(world.answer(0)[0], prepared[0][0])
        finally:
            os.kill(prepared[1][1], signal.SIGCONT)
    finally:
        world.run(retrieve_cases.let_go)
