"""Links between three failure detectors in one process, over real sockets."""

import socket
import threading

import pytest

from pibroch.collectives import failure_detector as watching
from pibroch.collectives.failure_detector import FailureDetector
from pibroch.collectives.peer_link import MAX_LINE_BYTES, PeerLink, RankFailure
from pibroch.errors import DataError, RankFailedError, TrainingError
from pibroch.wire.sockets import listen

TIMEOUT_S = 60.0
SILENCE = "its process ended without a word"


def connected():
    with listen() as server:
        ours = socket.create_connection(server.getsockname())
        return PeerLink(ours), PeerLink(server.accept()[0])


class Three:
    """Rank 0 and two others; what `on_stuck` was told, by rank."""

    def __init__(self):
        (first, of_first) = connected()
        (second, of_second) = connected()
        self.stuck = {}
        self.others_are_stuck = threading.Event()
        ends = {0: {1: first, 2: second}, 1: {0: of_first}, 2: {0: of_second}}
        self.detectors = [
            FailureDetector(rank, links, self._note(rank)) for rank, links in ends.items()
        ]
        self.ends = ends

    def _note(self, rank):
        def note(error):
            self.stuck[rank] = str(error)
            self.others_are_stuck.set()

        return note

    def stop(self, rank):
        """What SIGSTOP does: its thread does nothing, its sockets stay."""
        self.detectors[rank]._wake.close()
        self.detectors[rank]._thread.join(TIMEOUT_S)

    def die(self, rank):
        """What a kill does: its thread is gone, and the system ends its sockets."""
        self.stop(rank)
        for link in self.ends[rank].values():
            link._socket.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def three():
    before = set(threading.enumerate())
    three = Three()
    yield three
    for each in three.detectors:
        each.close()
    assert set(threading.enumerate()) <= before
    assert all(line.fileno() == -1 for lines in three.ends.values() for line in lines.values())


def described(error):
    return type(error), error.rank, error.step, error.got, error.exit_code


@pytest.mark.parametrize("victim", [0, 1])
def test_all_others_hear_who_died_and_in_which_step(three, victim):
    for step in (1, 2):
        for each in three.detectors:
            each.enter(step)
    others = [each for each in three.detectors if each.rank != victim]
    while any(each._steps.get(victim) != 2 for each in others if victim == 0 or each.rank == 0):
        pass  # what was sent last may be lost with the sender
    three.die(victim)
    errors = [each.explain(RuntimeError("Connection closed by peer")) for each in others]
    expected = (RankFailedError, victim, 2, f"rank {victim} failed in step 2: {SILENCE}", 1)
    assert [described(error) for error in errors] == [expected] * 2


def test_a_rank_says_why_it_fails_and_the_first_reason_counts(three):
    first, second, third = three.detectors
    third.enter(7)
    assert third.report(DataError("a bad thing", "a good one")) is None
    failures = [each.failure(TIMEOUT_S) for each in (first, second)]
    assert (
        failures
        == [RankFailure(2, 7, "DataError: got a bad thing; need a good one", exit_code=2)] * 2
    )
    assert third.failure() is None, "its own failure is no news to it"
    assert second.report(failures[1].error()) is None
    three.die(1)
    assert first.report(RuntimeError("a consequence")) is None
    assert first.failure() == failures[0]


def test_long_reasons_are_cut(three):
    three.detectors[1].report(ValueError("é" * 9999))
    assert len(three.detectors[2].failure(TIMEOUT_S).reason) == 1000


def test_who_said_goodbye_has_not_failed(three, monkeypatch):
    monkeypatch.setattr(watching, "REASON_TIMEOUT_S", 0.2)
    three.detectors[0].enter(3)
    three.detectors[1].close()
    error = three.detectors[0].explain(RuntimeError("timed out"))
    assert (
        type(error) is TrainingError
        and "in step 3: timed out" in str(error)
        and "--resume" in str(error)
    )


def test_told_to_stop_it_looks_for_a_failure_first(three):
    first, second, third = three.detectors
    second.report(DataError("a bad thing"))
    assert third.failure(TIMEOUT_S) and first.failure(TIMEOUT_S)
    cause = third.report(KeyboardInterrupt())
    assert (
        described(cause) == (RankFailedError, 1, None, cause.got, 2)
        and "before the first step" in cause.got
    )


def test_stopped_ranks_are_no_failure_to_each_other(three, monkeypatch):
    monkeypatch.setattr(watching, "STOPPED_REASON_S", 0.0)
    assert three.detectors[1].report(KeyboardInterrupt()) is None
    failure = three.detectors[2].failure(TIMEOUT_S)
    assert failure.stopped and failure.rank == 1
    assert three.detectors[2].report(KeyboardInterrupt()) is None


def test_who_does_not_come_back_is_told(three, monkeypatch):
    monkeypatch.setattr(watching, "STUCK_S", 0.1)
    three.die(2)
    assert three.others_are_stuck.wait(TIMEOUT_S)
    three.detectors[0].close()
    assert three.stuck.keys() <= {0, 1} and all(
        f"rank 2 failed before the first step: {SILENCE}" in text for text in three.stuck.values()
    )


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_that_is_waited_for_in_vain_is_named_by_all(three, monkeypatch, stopped):
    monkeypatch.setattr(watching, "REASON_TIMEOUT_S", 0.5)
    monkeypatch.setattr(watching, "ROLL_S", 0.5)
    three.stop(stopped)
    waiting = [each for each in three.detectors if each.rank != stopped]
    errors = []
    threads = [
        threading.Thread(
            target=lambda each=each: errors.append(each.explain(RuntimeError("timed out")))
        )
        for each in waiting
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert [(type(error), error.rank) for error in errors] == [(RankFailedError, stopped)] * 2
    assert all("it is stopped, or hangs" in str(error) for error in errors)


@pytest.mark.parametrize(
    "line", [b"nonsense\n", b"[1]\n", b'["failure",5]\n', b"x" * (MAX_LINE_BYTES + 1)]
)
def test_garbage_counts_as_death(three, line):
    three.ends[1][0]._socket.sendall(line)
    assert three.detectors[2].failure(TIMEOUT_S) == RankFailure(1, None, SILENCE, is_loss=True)
