"""Steps in several passes are steps of one large batch, at any number of ranks."""

import pytest
import training_cases as cases

from pibroch.data.synthetic import SyntheticOptions, synthesize
from small_run import make_config, train_here

LARGE = ("train.batch_size=100",)
IN_PASSES = ("train.batch_size=25", "train.accumulate=4")
PLAIN = ("model.batch_norm=false", "train.epochs=none", "train.steps=25")
"""Past an epoch of 21 steps, whose last batch is ragged."""


@pytest.fixture(scope="module")
def sequences(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequences") / "data"
    synthesize(SyntheticOptions(num_samples=3010, max_table_rows=40, history=6), folder)
    return folder


def run(world, config, folder):
    return world.run(cases.train, config.model_dump(), str(folder))


@pytest.mark.parametrize("exchange", ["alltoall", "lookahead", "retrieve", "towers"])
def test_passes_over_two_ranks(worlds, sequences, tmp_path, exchange):
    changes = *PLAIN, f"embedding.exchange={exchange}"
    whole, passes = (
        run(worlds(2), make_config(sequences, *changes, *sizes), tmp_path / str(number))
        for number, sizes in enumerate((LARGE, IN_PASSES))
    )
    single, _ = train_here(make_config(sequences, *PLAIN, *IN_PASSES), tmp_path / "single")
    losses = [record["loss"] for record in single.metrics() if record["kind"] == "training"]
    for result in passes:
        assert result["losses"] == pytest.approx(whole[0]["losses"], rel=1e-4)
        assert result["losses"] == pytest.approx(losses, rel=1e-4)
        assert result["losses"] == passes[0]["losses"], "ranks differ"
        assert result["sent"] < 1.05 * whole[0]["sent"], "what travels once a step"
    assert passes[0]["summary"].samples == whole[0]["summary"].samples


def test_exchanges_give_the_same_bits(worlds, sequences, tmp_path):
    model = "model={name='din', histories={history='C2'}, max_length=4}"
    changes = model, *PLAIN
    outcomes = []
    for exchange in ("alltoall", "lookahead", "retrieve"):
        config = make_config(sequences, *changes, *IN_PASSES, f"embedding.exchange={exchange}")
        results = run(worlds(2), config, tmp_path / exchange)
        outcomes += [[result["losses"], result["evaluations"]] for result in results]
    assert all(outcome == outcomes[0] for outcome in outcomes)
    whole = run(worlds(2), make_config(sequences, *changes, *LARGE), tmp_path / "whole")
    assert outcomes[0][0] == pytest.approx(whole[0]["losses"], rel=1e-4)


def test_assigned_samples_keep_their_dropout(worlds, sequences, tmp_path):
    exchange = "embedding.exchange={name='lookahead', assign='rows'}"
    passes, whole = (
        run(worlds(2), make_config(sequences, *PLAIN, exchange, *sizes), tmp_path / str(number))
        for number, sizes in enumerate((IN_PASSES, LARGE))
    )
    assert passes[0]["losses"] == pytest.approx(whole[0]["losses"], rel=1e-4)


def test_ranks_without_samples_and_with_other_numbers_of_passes(worlds, sequences, tmp_path):
    """Three samples a step in passes of one: two ranks have one and two, four ranks some none."""
    changes = *PLAIN[:2], "train.steps=9", "train.evaluate_every=9"
    sizes = "train.batch_size=1", "train.accumulate=3"
    single, _ = train_here(make_config(sequences, *changes, *sizes), tmp_path / "1")
    losses = [record["loss"] for record in single.metrics() if record["kind"] == "training"]
    for count in (2, 4):
        config = make_config(sequences, *changes, *sizes)
        results = run(worlds(count), config, tmp_path / str(count))
        assert results[0]["losses"] == pytest.approx(losses, rel=1e-4)
