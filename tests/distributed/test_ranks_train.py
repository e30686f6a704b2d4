"""Whole runs at one, two and three ranks: the same figures within rounding.

Twice the same ranks: the same bits.
"""

import json
import re

import pytest
import training_cases as cases

from pibroch.config import model_zoo
from pibroch.data import EncodedDataset
from pibroch.errors import ConfigError
from pibroch.planner import Plan
from pibroch.train.run_directory import RunDirectory
from pibroch.train.session import build_tables
from small_run import files_below, make_config, make_dataset, train_here

# Batch norm takes away the bias before it; Adam turns that bias's rounding noise into steps of full
# size.
PLAIN = ["model.batch_norm=false", "train.epochs=1", "train.evaluate_every=7", "train.log_every=3"]
MODELS = {
    "dlrm": ["embedding.placement={C1='column_wise', C2='replicated', C3='table_wise'}"],
    "dcnv2": ["train.clip_norm=0.5", "embedding.optimizer={name='rowwise_adagrad', lr=0.1}"],
    "deepfm": ["train.average=0.9", "embedding.placement=table_wise"],
    "wide_deep": [
        "model.batch_norm=true",
        "optimizer={name='sgd', lr=0.05}",
        "model.embedding_dropout=0.2",
    ],
    "masknet": ["train.clip_norm=0.5"],
}
RUN = ("losses", "evaluations")


def run(world, config, folder):
    """What each rank returns."""
    return world.run(cases.train, config.model_dump(), str(folder))


def close(got, expected, rel=1e-4):
    for name in RUN:
        for left, right in zip(got[name], expected[name], strict=True):
            assert left == pytest.approx(right, rel=rel), name


@pytest.mark.parametrize("model", MODELS)
def test_the_number_of_ranks_changes_only_rounding(worlds, data, tmp_path, model):
    config = make_config(data, *PLAIN, f"model.name={model}", *MODELS[model])
    single, alone = train_here(config, tmp_path / "1")
    expected = {
        "losses": [r["loss"] for r in single.metrics() if r["kind"] == "training"],
        "evaluations": [
            [r[k] for k in ("step", "auc", "logloss", "is_best")]
            for r in single.metrics()
            if r["kind"] == "evaluation"
        ],
    }
    assert len(expected["losses"]) == 7 and len(expected["evaluations"]) == 4
    for size in (2, 3):
        results = run(worlds(size), config, tmp_path / str(size))
        for result in results:
            close(result, expected)
            assert [result[name] for name in RUN] == [results[0][name] for name in RUN], (
                "ranks differ"
            )
            assert (result["summary"].samples, result["summary"].steps) == (
                alone.summary.samples,
                21,
            )


@pytest.mark.parametrize("model", [spec.name for spec in model_zoo.SPECS])
def test_every_exchange_trains_the_models_of_the_zoo(worlds, data, tmp_path, model):
    outcomes = []
    for exchange in ("alltoall", "lookahead", "retrieve"):
        settings = (
            f"model.name={model}",
            f"embedding.exchange={exchange}",
            "train.epochs=none",
            "train.steps=8",
            "train.evaluate_every=4",
        )
        results = run(worlds(2), make_config(data, *settings), tmp_path / exchange)
        outcomes += [[result[name] for name in RUN] for result in results]
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert len(outcomes[0][0]) == 8


def test_what_a_run_of_two_ranks_leaves(worlds, data, tmp_path):
    config = make_config(data, "train.bf16=true", "train.batch_size=101", "train.average=0.9")
    results = [run(worlds(2), config, tmp_path / name) for name in ("a", "b")]
    for name in RUN:
        assert results[0][0][name] == results[1][0][name] == results[1][1][name]
    assert files_below(tmp_path / "a" / "checkpoints") == files_below(
        tmp_path / "b" / "checkpoints"
    )
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert (summary["world_size"], summary["exchange"]) == (2, "alltoall")
    assert summary["bytes_sent"] == summary["bytes_received"] > 100_000
    own = [
        json.loads(line)
        for line in (tmp_path / "a" / "ranks" / "metrics-1.jsonl").read_text().splitlines()
    ]
    training = [record for record in own if record["kind"] == "training"]
    assert [record["step"] for record in training] == list(range(1, 43))
    assert all(record["bytes_sent"] > 0 and record["rss_bytes"] > 0 for record in training)
    assert sum(record["waiting_seconds"] for record in training) > 0
    first = [
        json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [r["loss"] for r in first if r["kind"] == "training"] == [r["loss"] for r in training]


def test_more_ranks_than_samples(worlds, data, tmp_path):
    config = make_config(
        data, *PLAIN, "train.batch_size=2", "train.steps=5", "train.evaluate_batch_size=700"
    )
    single, _ = train_here(config, tmp_path / "1")
    results = run(worlds(3), config, tmp_path / "3")
    assert results[0]["losses"] == pytest.approx(
        [r["loss"] for r in single.metrics() if r["kind"] == "training"], rel=1e-4
    )


def test_a_run_goes_on_with_another_number_of_ranks(worlds, data, tmp_path):
    settings = [*PLAIN, "train.keep=9", "train.evaluate_every=5"]
    long, short = (make_config(data, *settings, f"train.steps={steps}") for steps in (20, 10))
    expected = run(worlds(2), long, tmp_path / "undisturbed")[0]
    run(worlds(3), short, tmp_path / "moved")
    run(worlds(1), make_config(data, *settings, "train.steps=15"), tmp_path / "moved")
    result = run(
        worlds(2),
        make_config(data, *settings, "train.steps=20", "embedding.placement=table_wise"),
        tmp_path / "moved",
    )[0]
    assert result["evaluations"][-1] == pytest.approx(expected["evaluations"][-1], rel=1e-4)
    assert result["summary"].steps == 20 and result["summary"].samples == 2000


def test_a_plan_from_a_file(worlds, data, tmp_path):
    config = make_config(data, *PLAIN, "train.steps=4")
    expected = run(worlds(2), config, tmp_path / "row_wise")[0]
    tables = build_tables(config, EncodedDataset.open(data).num_rows)
    plan = Plan.of(tables, 2, {"": "table_wise", "C5": "column_wise"})
    plan.save(tmp_path / "plan.json")
    with_plan = make_config(
        data, *PLAIN, "train.steps=4", f"embedding.plan='{tmp_path / 'plan.json'}'"
    )
    assert run(worlds(2), with_plan, tmp_path / "planned")[0]["losses"] == expected["losses"]


def test_settings_of_placement(data, tmp_path):
    with pytest.raises(ConfigError, match="placement` or `plan"):
        make_config(data, "embedding.plan=p.json", "embedding.placement=table_wise")
    with pytest.raises(ConfigError, match=r"`embedding\.exchange\.placement = "):
        make_config(data, "embedding.placement={C1='diagonal'}")
    config = make_config(data, "embedding.placement={'C 1'='table_wise', ''='replicated'}")
    run = RunDirectory(tmp_path / "run")
    run.create(config)
    assert run.config() == config and config.embedding.exchange.placement == {
        "C 1": "table_wise",
        "": "replicated",
    }


def test_one_process_only(worlds, data, tmp_path):
    with pytest.raises(AssertionError, match="'local' with 2 ranks"):
        run(worlds(2), make_config(data, "embedding.exchange=local"), tmp_path / "run")


def test_ranks_that_have_different_things_are_refused_before_a_step(worlds, data, tmp_path):
    """Shapes agree in each case.

    Without a look at the rest they would train a model that nobody meant.
    """
    other = make_dataset(tmp_path / "other", num_samples=2000)
    plain = make_config(data).model_dump()
    settings = make_config(data, "optimizer.lr=0.02").model_dump()
    elsewhere = make_config(other).model_dump()
    for configs, code, what in (
        (
            [plain, elsewhere],
            None,
            r"got data set \w+ \(2,100 training samples\) on rank 0 and \w+ \(1,400 ",
        ),
        ([plain, settings], None, r"got configuration \w+ on rank 0 and \w+ on rank 1"),
        (
            [plain, plain],
            "0" * 64,
            r"got pibroch \S+ \(\w+\) on rank 0 and \S+ \(000000000000\) on rank 1",
        ),
    ):
        for message in worlds(2).run(
            cases.name_what_differs, configs, str(tmp_path / "run"), code=code
        ):
            assert re.match(what, message), message
    assert not (tmp_path / "run").exists()
