"""Several labels, weights and losses of the global batch: the same at any number of ranks."""

import pytest
import training_cases as cases

from pibroch.data.synthetic import SyntheticOptions, synthesize
from several_labels import prepared
from small_run import make_config, train_here

RUN = ("losses", "evaluations", "tasks")
CLICK = """
label = "click"
group = "user"
weight = "importance"
[target.click]
values = { no = 0, yes = 1 }
[categorical.user]
encoding = "hash"
num_buckets = 200
[categorical.item]
min_count = 1
"""
MODEL = ("model.top=[8]", "model.expert_hidden=[8]", "model.batch_norm=false", "train.log_every=2")
SGD = ("optimizer={name='sgd', lr=0.1}",)
PLAIN = (
    *MODEL,
    "train.epochs=none",
    "train.steps=14",
    "train.evaluate_every=7",
    "train.evaluate_batch_size=40",
)


@pytest.fixture(scope="module")
def two_labels(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("clicks"), CLICK)


def tasks_of(run):
    return [each["tasks"] for each in run.metrics() if each["kind"] == "evaluation"]


def run(world, config, folder):
    return world.run(cases.train, config.model_dump(), str(folder))


def check(worlds, config, folder):
    """One process against two and three ranks."""
    single, _ = train_here(config, folder / "1")
    losses = [r["loss"] for r in single.metrics() if r["kind"] == "training"]
    assert len(losses) == 7
    for size in (2, 3):
        results = run(worlds(size), config, folder / str(size))
        for result in results:
            assert result["losses"] == pytest.approx(losses, rel=1e-4)
            for got, expected in zip(result["tasks"], tasks_of(single), strict=True):
                assert got.keys() == expected.keys()
                for label, figures in expected.items():
                    assert got[label] == pytest.approx(figures, rel=2e-3), label
            assert result["tasks"] == results[0]["tasks"], "ranks differ"


@pytest.mark.parametrize("model", ["mmoe", "ple"])
def test_two_tasks_and_weights_at_any_number_of_ranks(worlds, two_labels, tmp_path, model):
    config = make_config(
        two_labels,
        *PLAIN,
        f"model.name={model}",
        "tasks={seconds={loss='mse', weight=0.5}}",
        "train.monitor='seconds:rmse'",
    )
    check(worlds, config, tmp_path)


@pytest.mark.parametrize("loss", ["pairwise", "softmax", "focal"])
def test_losses_at_any_number_of_ranks(worlds, clicks, tmp_path, loss):
    """Of 45 samples a step a group's lie on several ranks.

    A loss of differences says nothing of the last bias: Adam would make steps of full size of its
    rounding.
    """
    changes = (f"loss.name={loss}", "train.batch_size=45", "train.monitor=gauc", *SGD)
    check(worlds, make_config(clicks, *PLAIN, *changes), tmp_path)


def test_a_rank_without_samples_takes_part_in_pairs(worlds, clicks, tmp_path):
    changes = ("loss.name=pairwise", "train.batch_size=2", "train.monitor=ndcg@10", *SGD)
    config = make_config(clicks, *PLAIN, *changes)
    single, _ = train_here(config, tmp_path / "1")
    losses = [r["loss"] for r in single.metrics() if r["kind"] == "training"]
    results = run(worlds(3), config, tmp_path / "3")
    assert all(result["losses"] == pytest.approx(losses, rel=1e-4, abs=1e-7) for result in results)


def test_every_exchange_trains_two_tasks_to_the_same_bits(worlds, two_labels, tmp_path):
    outcomes = []
    for exchange in ("alltoall", "lookahead", "retrieve"):
        config = make_config(
            two_labels,
            *PLAIN,
            "model.name=mmoe",
            "tasks={click={loss='pairwise'}, seconds={loss='mse'}}",
            f"embedding.exchange={exchange}",
        )
        results = run(worlds(2), config, tmp_path / exchange)
        outcomes += [[result[name] for name in RUN] for result in results]
    assert all(outcome == outcomes[0] for outcome in outcomes)


PAIRS = (
    *PLAIN,
    *SGD,
    "model={name='two_tower', item_features=['item'], top=[8], vector_width=4}",
    "loss.name=in_batch_softmax",
)


@pytest.mark.parametrize(("batch_size", "dropout"), [(50, 0.0), (50, 0.5), (3, 0.5)])
def test_the_softmax_of_a_batch_is_the_same_at_any_number_of_ranks(
    worlds, clicks, tmp_path, batch_size, dropout
):
    """Of three samples one of four ranks has none."""
    more = f"train.batch_size={batch_size}", f"model.dropout={dropout}"
    config = make_config(clicks, *PAIRS, *more)
    single, _ = train_here(config, tmp_path / "1")
    losses = [r["loss"] for r in single.metrics() if r["kind"] == "training"]
    assert len(losses) == 7
    for size in (2, 4):
        for result in run(worlds(size), config, tmp_path / str(size)):
            assert result["losses"] == pytest.approx(losses, rel=1e-4)


OVER_ALL = ("train.monitor='all_ndcg@10'", "train.evaluate_batch_size=7")


def test_figures_over_all_items_at_any_number_of_ranks(worlds, clicks, tmp_path):
    check(worlds, make_config(clicks, *PAIRS, *OVER_ALL), tmp_path)


def test_all_positions_of_sequences_at_any_number_of_ranks(worlds, tmp_path):
    """Each rank's samples have as many pairs as their sequences are long, none of them or six."""
    synthesize(SyntheticOptions(num_samples=900, max_table_rows=60, history=6), tmp_path / "data")
    settings = "dim=8, histories={history='C2'}, max_length=6, all_positions=true"
    loss = "loss.name=in_batch_softmax"
    config = make_config(
        tmp_path / "data", *PLAIN[1:], *SGD, f"model={{name='sasrec', {settings}}}", loss, *OVER_ALL
    )
    check(worlds, config, tmp_path)


def test_every_exchange_trains_two_towers_to_the_same_bits(worlds, clicks, tmp_path):
    outcomes = []
    for exchange in ("alltoall", "lookahead", "retrieve", "towers"):
        config = make_config(clicks, *PAIRS, *OVER_ALL, f"embedding.exchange={exchange}")
        results = run(worlds(2), config, tmp_path / exchange)
        outcomes += [[result[name] for name in RUN] for result in results]
    assert all(outcome == outcomes[0] for outcome in outcomes)
