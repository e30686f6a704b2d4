"""Rounds come out whole, in order, each once, however the trainers' messages come in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pibroch.errors import ProtocolError
from pibroch.servers.rounds import Rounds


@given(st.integers(1, 4), st.integers(0, 6), st.data())
def test_rounds_come_whole_and_in_order(num_trainers, num_rounds, data):
    rounds = Rounds(num_trainers)
    taken = []
    sent = [0] * num_trainers
    while min(sent) < num_rounds:
        trainer = data.draw(
            st.sampled_from([t for t in range(num_trainers) if sent[t] < num_rounds])
        )
        rounds.add(trainer, sent[trainer], (trainer, sent[trainer]))
        sent[trainer] += 1
        while (messages := rounds.take()) is not None:
            taken.append(messages)
        assert len(taken) == rounds.number == min(sent)
    assert taken == [
        [(trainer, number) for trainer in range(num_trainers)] for number in range(num_rounds)
    ]
    assert rounds.clear() == []


@pytest.mark.parametrize(("trainer", "number"), [(2, 1), (-1, 1), (0, 0), (0, 1), (1, 0)])
def test_messages_that_cannot_be(trainer, number):
    rounds = Rounds(2)
    for each in range(2):
        rounds.add(each, 0, "over")
    rounds.take()
    rounds.add(0, 1, "waits")
    with pytest.raises(ProtocolError):
        rounds.add(trainer, number, "?")
    assert rounds.clear() == ["waits"]
