"""A central oracle: each trainer's view is that of its own oracle, in whatever order messages come.

Errors reach all.
"""

import numpy as np
import pytest
import torch

from pibroch.errors import ConfigError, ProtocolError, TrainingError
from pibroch.exchange.lookahead.oracle import Oracle
from pibroch.exchange.lookahead.oracle.encoding import Parts, decode_opening, decode_plan
from pibroch.exchange.lookahead.oracle.kernels.varint import naive as varint
from pibroch.rpc.info import WorkerInfo
from pibroch.servers import plan_service as served
from pibroch.servers.runs import Runs

BOUNDS = [0, 10, 20]
WANTED = [[BOUNDS], [20], 2, 1, "lrpp", True]
STEPS = [([1, 12], [3, 12]), ([12], [1, 4]), ([], [1]), ([1, 2, 15], [])]


@pytest.fixture
def oracles(monkeypatch):
    """What this process would hold as an oracle, for two trainers."""
    monkeypatch.setattr(served, "ORACLES", Runs("an oracle", "homes, lookahead or cache"))
    for rank in range(2):
        served.configure("run", [f"trainer{rank}", rank], "k", WANTED, [])
    return served.ORACLES


def encoded(rows):
    return torch.tensor(list(varint.encode(rows)), dtype=torch.uint8)


def tell(trainer, number, feed=1):
    rows = STEPS[number][trainer]
    served.add("k", trainer, number, feed, [len(rows)], encoded(rows))


def ask(trainer, number, what, num_steps, feed=1):
    return served.ask("k", trainer, number, what, feed, num_steps)


def parts_of(answer):
    return Parts(*(part.numpy() for part in answer.wait()))


def test_views_are_those_of_the_trainers_own_oracles_in_whatever_order(oracles):
    questions = [
        [ask(rank, n, *q) for n, q in ((1, ("plan", 2)), (0, ("open", 2)), (2, ("plan", 3)))]
        for rank in range(2)
    ]
    for number, trainer in ((2, 0), (0, 1), (1, 0), (3, 1), (0, 0), (1, 1)):
        tell(trainer, number)
    for rank, (plan, opening, later) in enumerate(questions):
        own = Oracle(np.array(BOUNDS), rank, 1, 20)
        for step in STEPS[:2]:
            own.add([np.array(rows, np.int64) for rows in step])
        expected = own.open(), own.plan()
        assert np.array_equal(decode_opening(parts_of(opening)).places, expected[0].places)
        found = decode_plan(parts_of(plan))
        assert np.array_equal(found.places, expected[1].places)
        assert np.array_equal(found.critical.given, expected[1].critical.given)
        assert not later.done(), "step 2 of trainer 1 is missing"
    tell(1, 2)
    assert [decode_plan(parts_of(later)).number for *_, later in questions] == [1, 1]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_messages_that_make_no_sense_are_refused(oracles, order):
    tell(order[0], 0)
    with pytest.raises(ProtocolError, match="one in a round"):
        tell(order[0], 0)
    for arguments in (
        (3, encoded([1, 2])),
        (-1, encoded([])),
        (1, encoded([1, 2])),
        (1, encoded([20])),
        (9, encoded([1])),
    ):
        with pytest.raises(ProtocolError):
            served.add("k", order[1], 0, 1, [arguments[0]], arguments[1])
    with pytest.raises(ProtocolError, match="rows from"):
        served.add(
            "k", order[1], 0, 1, [2], torch.tensor([1] + [255] * 8 + [127], dtype=torch.uint8)
        )
    tell(order[1], 0)
    for trainer, what in ((2, "plan"), (0, "restart")):
        with pytest.raises(ProtocolError):
            ask(trainer, 0, what, 1)
    ask(0, 0, "open", 9)
    with pytest.raises(ProtocolError, match="second request"):
        ask(0, 0, "open", 9)


def test_trainers_must_be_at_the_same_feed(oracles):
    tell(0, 0)
    with pytest.raises(ProtocolError, match="several feeds"):
        tell(1, 0, feed=2)


def test_who_waits_hears_of_a_lost_trainer_and_whoever_comes_later(oracles):
    waiting = ask(1, 0, "open", 1)
    oracles.on_lost(WorkerInfo("trainer0", 0), 0)
    with pytest.raises(TrainingError, match="the end of trainer0"):
        waiting.wait()
    for call in (lambda: tell(1, 0), lambda: ask(1, 1, "plan", 1).wait()):
        with pytest.raises(TrainingError, match="the end of trainer0"):
            call()
    oracles.on_lost(WorkerInfo("trainer1", 1), 1)
    with pytest.raises(TrainingError, match="an oracle that holds nothing of this run"):
        tell(1, 0)


def test_trainers_that_want_other_plans_are_refused(oracles):
    with pytest.raises(ConfigError, match="other homes, lookahead or cache from trainer1"):
        served.configure("run", ["trainer1", 1], "k", [*WANTED[:3], 7, *WANTED[4:]], [])
    with pytest.raises(ConfigError, match="lookahead 0"):
        served.configure("run", ["trainer1", 1], "other", [*WANTED[:3], 0, *WANTED[4:]], [])
