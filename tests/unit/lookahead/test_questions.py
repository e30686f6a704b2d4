"""Questions wait for the steps that they are about, and are answered in the order of their numbers."""

import numpy as np
import pytest

from pibroch.errors import ConfigError, TrainingError
from pibroch.lookahead import Oracle, Question, Questions

BOUNDS = np.array([0, 5, 10])
STEPS = [[np.array(mine), np.array(others)] for mine, others in [([1, 7], [7]), ([7], [2]), ([8, 9], [4]), ([0], [9])]]


def make(capacity=6, lookahead=1):
    return Questions(Oracle(BOUNDS, 0, lookahead, capacity))


def test_a_question_waits_for_its_steps_and_for_the_question_before():
    questions = make()
    questions.ask(1, Question("plan", 1, 2))
    questions.add(1, STEPS[0])
    questions.add(1, STEPS[1])
    assert questions.take() is None, "question 0 has not come"
    questions.ask(0, Question("open", 1, 1))
    questions.ask(2, Question("plan", 1, 3))
    oracle = Oracle(BOUNDS, 0, 1, 6)
    for step in STEPS[:3]:
        oracle.add(step)
    number, question = questions.take()
    assert number == 0 and np.array_equal(questions.answer(question).places, oracle.open().places)
    number, question = questions.take()
    assert number == 1 and np.array_equal(questions.answer(question).places, oracle.plan().places)
    assert questions.take() is None
    questions.add(1, STEPS[2])
    assert questions.take()[0] == 2


def test_a_new_feed_forgets_the_one_before():
    questions = make()
    for step in STEPS[:3]:
        questions.add(1, step)
    questions.ask(0, Question("open", 1, 2))
    questions.answer(questions.take()[1])
    questions.ask(1, Question("plan", 1, 3))
    questions.ask(2, Question("open", 2, 4))
    questions.add(2, STEPS[3])
    _, left = questions.take()
    with pytest.raises(TrainingError, match="feed 1 in feed 2"):
        questions.answer(left)
    fresh = Oracle(BOUNDS, 0, 1, 6)
    fresh.add(STEPS[3])
    assert np.array_equal(questions.answer(questions.take()[1]).places, fresh.open().places)


def test_only_questions_about_a_step_that_fits_nowhere_are_refused():
    questions = make(capacity=3)
    for mine in ([1, 7], [5, 6, 7, 8], [1]):
        questions.add(1, [np.array(mine), np.array([6])])
    for number, (what, num_steps) in enumerate([("open", 1), ("plan", 2), ("plan", 3)]):
        questions.ask(number, Question(what, 1, num_steps))
    assert len(questions.answer(questions.take()[1]).places) == 2
    for _ in range(2):
        with pytest.raises(ConfigError, match="rank 0 reads 4 rows, and a cache of 3"):
            questions.answer(questions.take()[1])
