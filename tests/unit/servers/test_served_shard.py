"""A shard that trainers visit.

What comes home is there before anything is borrowed, and an error reaches all who wait.
"""

import importlib
import sys
from itertools import permutations
from threading import Thread

import numpy as np
import pytest

import pibroch as pb
from doc_pages import ROOT
from pibroch.config.initializer import INITIALIZERS
from pibroch.config.optimizer import SPARSE_OPTIMIZERS
from pibroch.config.registry import IMPORTS, Spec
from pibroch.embedding import MemoryShard
from pibroch.errors import ConfigError, ProtocolError, TrainingError
from pibroch.rpc.info import WorkerInfo
from pibroch.servers import server as served
from pibroch.servers.runs import Runs
from pibroch.servers.served_shard import GradientSums, RecordSwap, ServedShard
from pibroch.servers.spec import ShardSpec

DIM = 3
WIDTH = 6
TABLES = [pb.Table("a", 5, DIM), pb.Table("b", 4, DIM, initializer=pb.Normal(0.5))]


def make(num_trainers=2, optimizer=None):
    optimizer = optimizer or pb.Adagrad(lr=0.1)
    return ServedShard(MemoryShard.whole(TABLES, optimizer, 1), optimizer, num_trainers)


def rows(*numbers):
    return np.array(numbers, np.int64)


def nothing():
    return RecordSwap(rows(), np.empty(0, np.float32), rows(), rows())


def bring(row, value, whole=(), borrowed=()):
    return RecordSwap(rows(row), np.full(WIDTH, value, np.float32), rows(*whole), rows(*borrowed))


def want(whole=(), borrowed=()):
    return RecordSwap(rows(), np.empty(0, np.float32), rows(*whole), rows(*borrowed))


def test_a_round_brings_home_before_it_lends_whoever_comes_first():
    for order in permutations(range(2)):
        home = make()
        home.shard.start_marks("a")
        errands = [bring(3, 7.0, borrowed=(8,)), want(whole=(3,), borrowed=(3, 0))]
        expected = home.shard.records.copy()
        answers = {trainer: home.request(trainer, 0, errands[trainer]) for trainer in order}
        assert np.array_equal(answers[0].value().numpy(), expected[8, :DIM])
        seven = np.full(WIDTH, 7.0, np.float32)
        assert np.array_equal(
            answers[1].value().numpy(), np.concatenate([seven, seven[:DIM], expected[0, :DIM]])
        )
        assert home.shard.marks.rows("a").tolist() == [3]


def test_a_round_waits_for_all_and_for_the_round_before():
    home = make()
    ahead = [home.request(0, number, bring(2, number)) for number in range(3)]
    late = home.request(1, 1, want(borrowed=(2,)))
    assert not any(answer.done() for answer in [*ahead, late])
    home.request(1, 0, nothing())
    assert [answer.done() for answer in [*ahead, late]] == [True, True, False, True]
    assert late.value().tolist() == [1.0] * DIM


def test_gradients_update_each_row_once_in_the_order_of_the_trainers():
    optimizer = pb.Adam(lr=0.1, average=0.9)
    home = make(3, optimizer)
    alone = make(1, optimizer)
    rng = np.random.default_rng(0)
    parts = [(rows(1, 2), 2), (rows(), 0), (rows(2, 8), 2)]
    gradients = [rng.normal(size=(count, DIM)).astype(np.float32) for _, count in parts]
    for trainer in (2, 0, 1):
        home.request(trainer, 0, GradientSums(parts[trainer][0], gradients[trainer], 0.3, 1))
    total = np.stack([gradients[0][0], gradients[0][1] + gradients[2][0], gradients[2][1]])
    alone.request(0, 0, GradientSums(rows(1, 2, 8), total, 0.3, 1))
    assert np.array_equal(home.shard.records, alone.shard.records)
    averaged = RecordSwap(rows(), np.empty(0, np.float32), rows(), rows(2), averaged_at=4)
    answers = [home.request(trainer, 1, averaged) for trainer in range(3)]
    between = sorted([home.shard.records[2, 0], make(1, optimizer).shard.records[2, 0]])
    assert between[0] < answers[2].value()[0] < between[1]


@pytest.mark.parametrize(
    "errand",
    [
        want(whole=(9,)),
        want(borrowed=(-1,)),
        bring(9, 0.0),
        RecordSwap(rows(1), np.empty(5, np.float32), rows(), rows()),
        RecordSwap(rows(), np.empty(0, np.float32), rows(), rows(1), averaged_at=3),
        GradientSums(rows(1), np.zeros((2, 3), np.float32), 0.1, 1),
        GradientSums(rows(9), np.zeros((1, 3), np.float32), 0.1, 1),
    ],
)
def test_an_errand_that_makes_no_sense_is_refused_and_changes_nothing(errand):
    home = make(1)
    before = home.shard.records.copy()
    with pytest.raises(ProtocolError):
        home.request(0, 0, errand)
    assert np.array_equal(home.shard.records, before)
    assert home.request(0, 0, want(borrowed=(1,))).done()


def test_who_waits_hears_of_a_failure_and_whoever_comes_later():
    home = make()
    waiting = home.request(0, 0, nothing())
    home.fail(TrainingError("trainer1 lost"))
    with pytest.raises(TrainingError, match="trainer1"):
        waiting.value()
    with pytest.raises(TrainingError, match="trainer1"):
        home.request(1, 0, nothing())
    home = make()
    mixed = home.request(0, 0, nothing())
    home.request(1, 0, GradientSums(rows(), np.empty((0, DIM), np.float32), 0.1, 1))
    with pytest.raises(ProtocolError, match="one or the other"):
        mixed.value()


def test_many_threads_lose_nothing():
    home = make(4)
    num_rounds = 200

    def visit(trainer):
        for number in range(num_rounds):
            answers[trainer].append(
                home.request(trainer, number, bring(trainer, number, borrowed=(trainer,)))
            )

    answers = [[] for _ in range(4)]
    threads = [Thread(target=visit, args=(trainer,)) for trainer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for of_trainer in answers:
        assert [answer.value()[0].item() for answer in of_trainer] == list(range(num_rounds))


TRAINERS = [("trainer0", 11), ("trainer1", 12)]


def wanted(tables=TABLES, optimizer=None, seed=1, num_trainers=2):
    pieces = MemoryShard.whole(tables, pb.SGD(lr=1.0), 0).pieces
    spec = ShardSpec.of(pieces, optimizer or pb.Adam(lr=0.1, betas=(0.8, 0.9)), seed)
    return [[spec.tables, spec.pieces, spec.optimizer, spec.seed], tables[0].dim, num_trainers]


@pytest.fixture
def homes(monkeypatch):
    """What this process would hold as a server."""
    monkeypatch.setattr(served, "SHARDS", Runs("an embedding server", "tables, optimizer or seed"))
    return served.SHARDS


def test_a_server_makes_what_trainers_want_and_serves_one_run(homes):
    for trainer in TRAINERS:
        served.configure("run", trainer, "k", wanted(), [])
    expected = MemoryShard.whole(TABLES, pb.Adam(lr=0.1, betas=(0.8, 0.9)), 1)
    home = homes.find("k")
    assert np.array_equal(home.shard.records, expected.records) and home.optimizer.betas == (
        0.8,
        0.9,
    )
    with pytest.raises(ConfigError, match="from trainer1 than"):
        served.configure("run", TRAINERS[1], "k", wanted(seed=2), [])
    served.configure("run", TRAINERS[0], "other", wanted(), ["k"])
    waiting = homes.find("other").request(0, 0, nothing())
    with pytest.raises(TrainingError, match="holds nothing of this run"):
        homes.find("k")
    served.configure("next run", TRAINERS[0], "new", wanted(), [])
    with pytest.raises(TrainingError, match="given way to another"):
        waiting.value()
    with pytest.raises(TrainingError, match="holds nothing of this run"):
        homes.find("other")


def test_a_lost_trainer_ends_rounds_and_the_last_one_the_run(homes):
    for trainer in TRAINERS:
        served.configure("run", trainer, "k", wanted(), [])
    home = homes.find("k")
    waiting = home.request(0, 0, nothing())
    homes.on_lost(WorkerInfo("trainer1", 1), 10)  # another process of that name
    homes.on_lost(WorkerInfo("somebody", 1), 12)
    assert not waiting.done()
    homes.on_lost(WorkerInfo("trainer1", 1), 12)
    with pytest.raises(TrainingError, match="the end of trainer1"):
        waiting.value()
    assert homes.find("k") is home
    homes.on_lost(WorkerInfo("trainer0", 0), 11)
    with pytest.raises(TrainingError, match="holds nothing of this run"):
        homes.find("k")


def test_what_is_one_s_own_goes_by_its_name_and_imports_nothing(monkeypatch):
    """Lion and a constant, which the trainer has imported; the server, at first, has not."""
    monkeypatch.setenv(IMPORTS, "")  # whatever a test before has allowed
    for registry in (SPARSE_OPTIMIZERS, INITIALIZERS):
        monkeypatch.setattr(registry, "_registered", {})
    for folder in ("examples", "tests/own_components"):
        monkeypatch.syspath_prepend(ROOT / folder)
    own = [importlib.import_module(name) for name in ("own_optimizer", "own_initializer")]
    tables = [pb.Table("a", 5, DIM, initializer=own[1].Constant(0.25))]
    lion = own[0].Lion(lr=0.1, betas=(0.8, 0.9), decoupled=True, weight_decay=0.1)
    (spec, dim, _) = wanted(tables, lion)
    assert spec[2][0] == "own_optimizer:Lion"
    assert spec[0][0]["initializer"] == ["own_initializer:Constant", {"value": 0.25}]
    shard, optimizer = ShardSpec(*spec).build(dim)
    assert optimizer == lion and (shard.records[:, :DIM] == 0.25).all()
    for module in ("own_optimizer", "own_initializer"):
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, module)
            for registry in (SPARSE_OPTIMIZERS, INITIALIZERS):
                patch.setattr(registry, "_registered", {})
            with pytest.raises(ConfigError, match=f"not have it.*--import {module}"):
                ShardSpec(*spec).build(dim)
            assert module not in sys.modules
            patch.setenv(IMPORTS, "own_optimizer,own_initializer")
            ShardSpec(*spec).build(dim)
    SPARSE_OPTIMIZERS.register(Spec("a_lion", "", own[0].LionConfig, own[0].Lion))
    assert SPARSE_OPTIMIZERS.name_of(own[0].Lion) == "own_optimizer:Lion", "which others can find"
    assert SPARSE_OPTIMIZERS.name_of(pb.Adam) == "adam"


def test_what_a_server_cannot_make_is_refused():
    class Own:
        def fill(self, weights, rows, key):
            pass

    with pytest.raises(ConfigError, match=r"initializer .*:Own, which servers.*its `section`; do"):
        wanted([pb.Table("a", 3, 2, initializer=Own())])
    for change in (
        {"pieces": [[0, 0, 6, 1]]},
        {"pieces": [[7, 0, 1, 1]]},
        {"optimizer": ["sgd", {"lr": -1}]},
        {"optimizer": ["sgd", {"lr": 1, "momentum": 1}]},
        {"optimizer": ["frozen", []]},
        {"optimizer": [["sgd"], {}]},
        {"optimizer": ["open", {}]},
        {"optimizer": ["os:system", {"command": "true"}]},
        {"optimizer": ["pibroch.embedding:Zeros", {}]},
        {"tables": [{}]},
        {"pieces": [[0, -1, 2, 1]]},
    ):
        spec = (
            dict(zip(("tables", "pieces", "optimizer", "seed"), wanted()[0], strict=True)) | change
        )
        with pytest.raises(ConfigError):
            ShardSpec(**spec).build(DIM)
    with pytest.raises(ConfigError, match="dim 4"):
        ShardSpec(*wanted()[0]).build(4)
