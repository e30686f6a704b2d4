"""Versions that several ranks publish while they train, and a server that follows them."""

import os
import signal

import numpy as np
import pytest
import training_cases as cases
from launched_team import Team, wait_until
from test_killed_move import SETTINGS as MOVING
from test_killed_move import moves
from test_recovery import restarts
from test_retrieve_train import make_plan_file
from test_towers_train import HOSTS

import pibroch as pb
from grids import some
from pibroch.config import to_toml
from pibroch.serve.export import ExportOptions, export_checkpoint
from pibroch.state.export_format import is_export
from published_versions import check_same, versions
from raw_clicks import RAW_IDS, SCHEMA, prepared, raw_rows
from served import serving, until
from small_run import make_config, make_dataset

COMMON = [
    "train.steps=14",
    "train.checkpoint_every=1",
    "train.keep=999",
    "train.evaluate_every=1000",
    "train.publish_every_seconds=1e-9",
    "train.publish_compact_every=2",
]
WAYS = {
    "alltoall": ["embedding.exchange=alltoall"],
    "columns": [
        "embedding.exchange=alltoall",
        "embedding.placement={C1='column_wise', C2='replicated', C3='table_wise'}",
    ],
    "retrieve": ["embedding.exchange=retrieve"],
    "lookahead": ["embedding.exchange=lookahead", "embedding.lookahead=3"],
    "servers": ["embedding.exchange=lookahead", "embedding.lookahead=3", "embedding.servers=2"],
    "towers": [
        "model.name=tower_dlrm",
        "model.towers={count=4, width=2, combined=1}",
        "model.batch_norm=false",
        *HOSTS,
    ],
}
HASHED = [
    "embedding.rows={name='hashed', capacity=24}",
    "embedding.tables.C2.rows=identity",
    "train.batch_size=10",
]
RAW_ROWS = [
    "embedding.tables.user.rows={name='hashed', capacity=30}",
    "embedding.tables.tags.rows={name='hashed', capacity=12, admit_after=2}",
]
WAYS |= {f"{way} of raw ids": [*WAYS[way], *HASHED] for way in ("alltoall", "columns", "lookahead")}


@pytest.mark.parametrize("way", WAYS)
def test_each_version_is_an_export_of_its_step(worlds, data, server_team, tmp_path, way):
    more = [f"train.publish_to={tmp_path / 'models'}", *WAYS[way]]
    if way == "servers":
        more.append(f"embedding.rendezvous='{server_team.rendezvous}'")
    if way.startswith("columns"):
        more.append("train.publish_dtype=int8")
    config = make_config(data, *COMMON, *more).model_dump()
    worlds(2).run(cases.train, config, str(tmp_path / "run"))
    steps = check_same(
        tmp_path / "models", tmp_path / "run" / "checkpoints", config["train"]["publish_dtype"]
    )
    # of a busy machine few, but the last step is always published
    assert len(steps) >= 2 and steps[-1] == 14
    assert len({is_export(path) for path in versions(tmp_path / "models")}) == 2


def test_another_number_of_ranks_goes_on_where_the_first_one_published(worlds, data, tmp_path):
    """With a delta: the rows of all steps since the checkpoint are marked."""
    more = ["train.publish_compact_every=99", f"train.publish_to={tmp_path / 'models'}"]
    for size, steps in ((2, 7), (3, 14)):
        config = make_config(data, *COMMON, *more, *WAYS["alltoall"], f"train.steps={steps}")
        worlds(size).run(cases.train, config.model_dump(), str(tmp_path / "run"))
    paths = versions(tmp_path / "models")
    assert [is_export(path) for path in paths] == [True, *[False] * (len(paths) - 1)]
    steps = check_same(tmp_path / "models", tmp_path / "run" / "checkpoints")
    assert 7 in steps and steps[-1] == 14


def test_rows_that_have_moved_to_another_plan_are_published(worlds, tmp_path):
    data = make_dataset(tmp_path / "data", max_table_rows=5000)
    config = make_config(
        data,
        *MOVING,
        "embedding.exchange=retrieve",
        "train.replan_above=1.1",
        f"embedding.exchange.plan={make_plan_file(data, tmp_path / 'plan.json', 3)}",
        f"train.publish_to={tmp_path / 'models'}",
        "train.publish_every_seconds=0.2",
    )
    worlds(3).run(cases.train, config.model_dump(), str(tmp_path / "run"))
    assert any(look["in_force_after"] is not None for look in moves(tmp_path / "run"))
    for path in versions(tmp_path / "models")[:-1]:
        path.rename(path.with_name(f"before-{path.name}"))
    assert check_same(tmp_path / "models", tmp_path / "run" / "checkpoints") == [300]


FOLLOWED = {
    "servers": (SCHEMA, WAYS["servers"]),
    "raw ids": (RAW_IDS, [*WAYS["lookahead"], *RAW_ROWS, "train.batch_size=20"]),
    "raw ids from memory": (
        RAW_IDS,
        [*WAYS["alltoall"], *RAW_ROWS, "train.batch_size=20", "train.cut_every_seconds=0.05"],
    ),
}


@pytest.mark.parametrize("way", some(FOLLOWED, 0, 2))
def test_a_server_follows_a_run_whose_ranks_are_killed(tmp_path, way):
    """Each answer is of one version, and has the bits of an export of that step."""
    schema, settings = FOLLOWED[way]
    rows = raw_rows(3000)
    data = prepared(tmp_path / "data", rows, text=schema)
    run = tmp_path / "run"
    models = tmp_path / "models"
    config = make_config(
        data,
        *COMMON,
        *settings,
        "train.steps=80",
        "train.publish_every_seconds=0.1",
        "train.publish_compact_every=4",
        f"train.publish_to={models}",
    )
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(config.model_dump()))
    embeddings = {}
    scores = {}
    some = rows[:24]
    with Team(recipe, "--run-dir", run, "--ranks", 2, "--restarts", 9) as team:
        wait_until(lambda: models.is_dir() and versions(models), 120)
        with serving(models, "--reload-every", 0.02) as server:

            def look():
                answer = server.ask("POST", "/embed", {"rows": some})
                assert answer.status == 200
                rows = np.array(answer.json["embeddings"], np.float32)
                version = answer.json["model_version"]
                assert np.array_equal(embeddings.setdefault(version, rows), rows)
                answer = server.ask("POST", "/score", {"rows": some})
                scores[answer.json["model_version"]] = np.array(answer.json["scores"])
                return version

            def look_until(is_so):
                until(lambda: (look() and is_so()) or team.process.poll() is not None, 400)

            for victim in (1, 0):
                seen = len(embeddings)
                killed = len(restarts(run))
                look_until(lambda seen=seen: len(embeddings) > seen + 2)
                if team.process.poll() is None:
                    os.kill(team.pids()[victim], signal.SIGKILL)
                    look_until(lambda killed=killed: len(restarts(run)) > killed)
            look_until(lambda: False)
            assert team.end() == 0, team.output
            until(lambda: look().startswith("80-"))
            assert server.metric("pibroch_model_load_failures") == 0
    assert len(embeddings) > 6 and restarts(run)
    for version, rows in embeddings.items():
        step = int(version.partition("-")[0])
        whole = tmp_path / f"served-{step}"
        export_checkpoint(run / "checkpoints" / f"step-{step:08d}", whole, ExportOptions())
        predictor = pb.Predictor.open(whole)
        assert np.array_equal(predictor.embed(predictor.encode(some)).numpy(), rows)
        if version in scores:  # which threads round otherwise
            expected = predictor.score_raw(some).numpy()
            np.testing.assert_allclose(scores[version], expected, rtol=0, atol=1e-6)
    check_same(models, run / "checkpoints")
