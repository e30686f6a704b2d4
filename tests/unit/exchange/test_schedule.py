"""Schedules, what runs them, and the tables of them in pages."""

import re
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import import_module

import pytest

from doc_pages import ROOT
from pibroch.collectives.task_thread import TaskThread
from pibroch.errors import DataError, PibrochError
from pibroch.exchange.schedule import (
    FAR_AHEAD,
    Moment,
    Queue,
    Runner,
    Schedule,
    ScheduledStep,
    Task,
)

NETWORK, CALLER, PLANNER = Queue.NETWORK, Queue.CALLER, Queue.PLANNER


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([("a", NETWORK, Moment.READ), ("a", CALLER, Moment.END)], "distinct names"),
        ([("a", NETWORK, Moment.END), ("b", CALLER, Moment.READ)], "moments in their order"),
        ([("a", NETWORK, Moment.READ, ("b",))], "submitted before"),
        ([("a", NETWORK, Moment.READ, ("a",))], "submitted before"),
        (
            [("a", NETWORK, Moment.READ, ("b",)), ("b", NETWORK, Moment.READ, ("a",))],
            "submitted before",
        ),
        ([("a", NETWORK, Moment.READ, (("b", -1),))], "submitted before"),
        (
            [("a", NETWORK, Moment.TURN, (("b", 1),)), ("b", NETWORK, Moment.TURN)],
            "submitted before",
        ),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(tasks, message):
    with pytest.raises(PibrochError, match=message):
        Schedule(*(Task(*task) for task in tasks))


def test_other_steps_may_be_waited_for():
    schedule = Schedule(
        Task("announce", NETWORK, Moment.READ),
        Task("plan", PLANNER, Moment.TURN, after=(("announce", FAR_AHEAD), ("deliver", -1))),
        Task("deliver", NETWORK, Moment.END),
    )
    assert "plan (after announce of the last step read, deliver of the step before)" in str(
        schedule
    )


@dataclass(slots=True, eq=False)
class Step(ScheduledStep):
    number: int
    is_odd: bool = False


class Log:
    """An exchange that notes what is done, by which thread."""

    def __init__(self):
        self.done = []

    wire = None

    def note(self, name, step):
        self.done.append((name, step.number, threading.current_thread().name))
        return f"{name} {step.number}"

    def send(self, name, step):
        yield from ()
        return self.note(name, step)


def runs_of(*names, local=()):
    """Functions that note what they are called for; those not ``local`` return generators."""

    def run(name):
        way = Log.note if name in local else Log.send
        return lambda log, step, *_: way(log, name, step)

    return {name: run(name) for name in (*names, *local)}


@pytest.fixture
def threads():
    made = {NETWORK: TaskThread("network"), PLANNER: TaskThread("planner")}
    yield made
    for each in made.values():
        each.end()


def test_tasks_run_in_their_order_on_their_threads(threads):
    schedule = Schedule(
        Task("route", NETWORK, Moment.READ),
        Task("pool", CALLER, Moment.LOOKUP, after=(("deliver", -1),)),
        Task("local", PLANNER, Moment.GRADIENTS),
        Task("odd", NETWORK, Moment.GRADIENTS, only_if="is_odd"),
        Task("deliver", NETWORK, Moment.END, after=("local", "odd")),
    )
    runner = Runner(schedule, threads, runs_of("route", "odd", "deliver", local=("pool", "local")))
    log = Log()
    steps = [Step(0), Step(1, is_odd=True)]
    runner.at(Moment.READ, log, steps[0])
    for step, following in zip(steps, [steps[1], None], strict=True):
        if following:
            runner.at(Moment.READ, log, following)
        for moment in (Moment.LOOKUP, Moment.GRADIENTS, Moment.END, Moment.END):
            runner.at(moment, log, step)
        if following:
            runner.follow(step, following)
    assert steps[1].tasks["deliver", -1].result() == "deliver 0"
    assert steps[1].tasks["deliver"].result() == "deliver 1"
    network = [(name, number) for name, number, thread in log.done if thread == "network"]
    assert network == [
        ("route", 0), ("route", 1), ("deliver", 0), ("odd", 1), ("deliver", 1)
    ]  # fmt: skip
    assert {thread for name, _, thread in log.done if name == "pool"} == {"MainThread"}
    assert log.done.index(("local", 1, "planner")) < log.done.index(("deliver", 1, "network"))


def test_what_was_forgotten_is_done_again(threads):
    schedule = Schedule(Task("route", NETWORK, Moment.READ), Task("fetch", NETWORK, Moment.TURN))
    runner = Runner(schedule, threads, runs_of("route", "fetch"))
    log = Log()
    step = Step(7)
    runner.at(Moment.READ, log, step)
    for _ in range(2):
        runner.at(Moment.TURN, log, step)
        runner.wait(Moment.TURN, step)
        runner.forget(Moment.TURN, step)
    assert [name for name, *_ in log.done] == ["route", "fetch", "fetch"]


def test_what_is_done_again_does_not_wait_for_itself(threads):
    """Forgotten and submitted again while the first ones have not run."""
    schedule = Schedule(
        Task("hold", PLANNER, Moment.READ),
        Task("route", NETWORK, Moment.READ, after=("hold",)),
        Task("fetch", NETWORK, Moment.TURN),
        Task("carry", NETWORK, Moment.TURN, after=("fetch",)),
    )
    go_on = threading.Event()
    carried = []

    def carry(log, step, fetched):
        yield from ()
        carried.append(fetched)

    runs = runs_of("route", "fetch") | {"hold": lambda *_: go_on.wait(20), "carry": carry}
    runner = Runner(schedule, threads, runs)
    step = Step(0)
    log = Log()
    runner.at(Moment.READ, log, step)
    runner.at(Moment.TURN, log, step)
    runner.forget(Moment.TURN, step)
    runner.at(Moment.TURN, log, step)
    go_on.set()
    step.tasks["carry"].result(20)
    assert carried == ["fetch 0", "fetch 0"]


def test_an_error_reaches_whatever_waits_for_it(threads):
    def refuse(log, step, *_):
        raise DataError("a bad batch", "a good one")

    schedule = Schedule(
        Task("prepare", PLANNER, Moment.READ),
        Task("announce", NETWORK, Moment.READ, after=("prepare",)),
        Task("fetch", NETWORK, Moment.TURN, after=("announce",)),
    )
    runner = Runner(schedule, threads, runs_of("announce", "fetch") | {"prepare": refuse})
    log = Log()
    bad = Step(0)
    runner.at(Moment.READ, log, bad)
    runner.at(Moment.TURN, log, bad)
    with pytest.raises(DataError, match="a bad batch"):
        runner.wait(Moment.TURN, bad)
    assert not log.done


def test_each_task_has_a_function(threads):
    schedule = Schedule(Task("route", NETWORK, Moment.READ))
    with pytest.raises(PibrochError, match="functions for fetch"):
        Runner(schedule, threads, runs_of("fetch"))


def test_a_question_is_its_own_future():
    """As the oracle's are, which may be answered by another process."""

    class Asked:
        def submit(self, ask):
            return ask()

    answer = Future()
    schedule = Schedule(Task("plan", Queue.ORACLE, Moment.TURN))
    step = Step(0)
    Runner(schedule, {Queue.ORACLE: Asked()}, {"plan": lambda log, step, *_: answer}).at(
        Moment.TURN, Log(), step
    )
    assert step.tasks["plan"] is answer


PAGES = [
    page
    for folder in ("docs", "src")
    for page in [*(ROOT / folder).rglob("*.md"), ROOT / "ARCHITECTURE.md"]
    if "<!-- schedule " in page.read_text()
]


@pytest.mark.parametrize("page", sorted(set(PAGES)), ids=lambda page: page.parent.name)
def test_tables_in_pages_are_the_schedules(page):
    """Behind a comment that names a module and the schedule in it."""
    found = re.findall(r"<!-- schedule (\S+) (\w+) -->\n\n((?:\|.*\n)+)", page.read_text())
    assert len(found) == page.read_text().count("<!-- schedule ")
    for module, name, table in found:
        assert table.strip() == str(getattr(import_module(module), name)), (module, name)


def test_some_page_has_a_table():
    assert len(PAGES) >= 2
