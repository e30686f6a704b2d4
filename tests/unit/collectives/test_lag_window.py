import random
from collections import defaultdict
from itertools import product

import pytest

from pibroch.collectives.bounded_lag.window import Complete, LagWindow, Put
from pibroch.errors import ConfigError

SCHEDULES = 10_000


class HalfTheSlots(LagWindow):
    """As in the paper: k slots."""

    def __init__(self, bound):
        super().__init__(bound)
        self.num_slots //= 2


class Overwritten(Exception):
    pass


class SimulatedRank:
    """Initiates requests, or waits for some.

    A read of a slot is two events, between which others act.
    """

    def __init__(self, window, num_requests, choices):
        self.window = window
        self.left = num_requests
        self.choices = choices
        self.todo = []
        self.reading = None
        self.begun = self.returned = 0
        self.most_outstanding = 0

    def is_done(self):
        return not (self.left or self.todo or self.window.num_outstanding)


class Network:
    """Slots of all ranks.

    What is sent arrives later, in the order of each pair; arrivals are counted.
    """

    def __init__(self, size):
        self.under_way = {pair: [] for pair in product(range(size), repeat=2)}
        self.slots = defaultdict(lambda: None)
        self.arrived = defaultdict(int)

    def deliver(self, sender, receiver):
        slot, number = self.under_way[sender, receiver].pop(0)
        self.slots[sender, receiver, slot] = number
        self.arrived[sender, receiver] += 1


def step(rank, ranks, network):
    """One event of a rank that can act; whether there was one."""
    me = ranks[rank]
    size = len(ranks)
    if not me.todo:
        if me.left and (not me.window.num_outstanding or me.choices.random() < 0.8):
            me.left -= 1
            me.begun += 1
            me.todo = me.window.initiate()
        else:
            numbers = range(me.window.num_completed, me.window.num_initiated)
            if not numbers:
                return False
            me.todo = me.window.wait(me.choices.choice(numbers))
        return True
    instruction = me.todo[0]
    if isinstance(instruction, Put):
        for receiver in range(size):
            network.under_way[rank, receiver].append((instruction.slot, instruction.number))
    elif me.reading is None:
        if any(network.arrived[sender, rank] <= instruction.number for sender in range(size)):
            return False
        me.reading = instruction.number
        return True
    else:
        assert isinstance(instruction, Complete)
        me.reading = None
        for sender in range(size):
            if network.slots[sender, rank, instruction.slot] != instruction.number:
                raise Overwritten
    me.todo.pop(0)
    if not me.todo:
        me.returned = me.window.num_initiated
        me.most_outstanding = max(me.most_outstanding, me.window.num_outstanding)
    return True


def simulate(seed, window_type, size=None, bound=None):
    """A schedule in which some ranks and the messages of some pairs stand still for a while.

    Raises Overwritten.
    """
    choices = random.Random(seed)
    size = size or choices.randint(2, 4)
    bound = choices.randint(0, 3) if bound is None else bound
    num_requests = 3 * bound + 3
    ranks = [SimulatedRank(window_type(bound), num_requests, choices) for _ in range(size)]
    network = Network(size)
    actors = [*range(size), *network.under_way]
    while not all(rank.is_done() for rank in ranks):
        awake = choices.sample(actors, choices.randint(1, len(actors)))
        for _ in range(choices.randint(1, 3 * len(awake))):
            actor = awake[int(choices.random() * len(awake))]
            if not isinstance(actor, tuple):
                step(actor, ranks, network)
            elif network.under_way[actor]:
                network.deliver(*actor)
        least_begun = min(rank.begun for rank in ranks)
        assert all(rank.returned - least_begun <= bound for rank in ranks)
    assert all(
        rank.most_outstanding <= bound and rank.window.num_completed == num_requests
        for rank in ranks
    )


def test_nothing_is_overwritten_and_nobody_runs_further_ahead_than_the_bound():
    for seed in range(SCHEDULES):
        simulate(seed, LagWindow)


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_with_half_the_slots_the_same_schedules_overwrite_what_was_not_read(bound):
    overwritten = 0
    for seed in range(200):
        try:
            simulate(seed, HalfTheSlots, size=3, bound=bound)
        except Overwritten:
            overwritten += 1
    assert overwritten > 10


class ChangesItsBound(LagWindow):
    """Another bound now and then, up to three, whatever the other ranks have."""

    def __init__(self, choices):
        super().__init__(3)
        self._choices = choices

    def initiate(self):
        self.rebound(self._choices.randint(0, 3))
        return super().initiate()


def test_ranks_may_change_their_bounds_when_they_like():
    for seed in range(SCHEDULES // 5):
        choices = random.Random(seed)
        simulate(seed, lambda bound, choices=choices: ChangesItsBound(choices), bound=3)


def test_a_bound_without_slots_is_refused():
    window = LagWindow(1, 4)
    window.rebound(4)
    assert (window.bound, window.num_slots) == (4, 8)
    for bound in (5, -1):
        with pytest.raises(ConfigError, match="0 to 4"):
            window.rebound(bound)


def test_requests_complete_in_their_order_and_waits_take_all_before():
    window = LagWindow(4)
    for number in range(4):
        assert window.initiate() == [Put(number, number)]
    assert [each.number for each in window.wait(2)] == [0, 1, 2]
    assert window.wait(1) == [] and window.num_outstanding == 1 and window.num_completed == 3
    assert window.initiate() == [Put(4, 4)]
    assert [each.slot for each in window.wait(4)] == [3, 4]


def test_an_initiation_completes_the_oldest_when_k_are_outstanding():
    window = LagWindow(2)
    window.initiate(), window.initiate()
    assert window.initiate() == [Complete(0, 0), Put(2, 2)]
    assert window.num_outstanding == 2 and window.num_slots == 4


def test_bound_zero_is_an_ordinary_all_to_all():
    window = LagWindow(0)
    for number in range(5):
        assert window.initiate() == [Put(number, number % 2), Complete(number, number % 2)]
    assert window.num_outstanding == 0 and window.num_slots == 2


def test_bad_use_is_an_error():
    with pytest.raises(ConfigError, match="-1"):
        LagWindow(-1)
    with pytest.raises(ConfigError, match="request 0 of 0"):
        LagWindow(1).wait(0)
