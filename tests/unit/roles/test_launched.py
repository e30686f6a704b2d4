"""Which rank does what, and what a launcher's processes tell each other."""

import threading

import pytest

from pibroch.errors import ConfigError, TrainingError
from pibroch.ports import free_port
from pibroch.roles import DATA_PROCESSOR, EMBEDDING_SERVER
from pibroch.roles.launched import Launcher, RankSplit

COUNTS = {DATA_PROCESSOR: 1, EMBEDDING_SERVER: 2}


@pytest.mark.parametrize("num_ranks", [4, 5, 9])
def test_every_rank_has_one_part(num_ranks):
    split = RankSplit.of(num_ranks, COUNTS)
    parts = [split.part(rank) for rank in range(num_ranks)]
    assert parts[: split.num_trainers] == [None] * (num_ranks - 3)
    assert parts[split.num_trainers :] == [
        (EMBEDDING_SERVER, 0),
        (EMBEDDING_SERVER, 1),
        (DATA_PROCESSOR, 0),
    ]


def test_somebody_has_to_train():
    with pytest.raises(
        ConfigError, match=r"3 processes for .*2 embedding servers.*need 4 at least"
    ):
        RankSplit.of(3, COUNTS)


def test_a_launcher_is_needed(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match=r"without a launcher.*torchrun"):
        Launcher()


@pytest.fixture
def launchers(monkeypatch):
    """Of two ranks, in two threads of this process."""
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
    }
    made = []
    for rank in range(2):
        for name, value in {**variables, "RANK": rank}.items():
            monkeypatch.setenv(name, str(value))
        made.append(Launcher())
    return made


def test_all_know_the_layout_and_rank_0_waits_for_those_who_end(launchers):
    first, second = launchers
    seen = []
    waits = threading.Event()

    def serve():
        layout = second.layout()
        seen.append((layout.split.part(1), layout.rendezvous, layout.folder))
        for _ in second.wait_for_end():
            waits.set()
        seen.append("ends")
        second.has_ended()

    thread = threading.Thread(target=serve)
    thread.start()
    with first.leading(RankSplit.of(2, {DATA_PROCESSOR: 1}), None, "run") as layout:
        assert waits.wait(60)
        assert "ends" not in seen and layout.rendezvous.startswith("tcp://127.0.0.1:")
    assert seen[-1] == "ends", "leading() returns when the other one has ended"
    assert seen[0] == ((DATA_PROCESSOR, 0), layout.rendezvous, "run")
    thread.join()


def test_nobody_waits_for_a_rank_0_that_cannot_begin(launchers):
    launchers[0].give_up()
    with pytest.raises(TrainingError, match="could not begin"):
        launchers[1].layout()
