"""A rank that is killed while rows move to another plan.

The run goes on to the bits of one in which no row ever moved.
"""

import json
import os
import signal

import numpy as np
import pytest
import training_cases as cases
from launched_team import Team, steps, wait_until
from test_retrieve_train import make_plan_file

import pibroch as pb
from pibroch.config import to_toml
from pibroch.data import EncodedDataset
from pibroch.state.checkpoint_folder import CheckpointFolder
from pibroch.state.manifest import read_manifest
from pibroch.state.tables import load_tables
from pibroch.train.session import build_tables
from small_run import files_below, make_config, make_dataset

SETTINGS = [
    "train.epochs=1000",
    "train.steps=300",
    "train.batch_size=40",
    "train.evaluate_every=90",
    "train.checkpoint_every=20",
    "train.full_checkpoint_every=4",
    "train.keep=1",
]


def looks(run):
    path = run / "plan_decay.json"
    return json.loads(path.read_text()) if path.exists() else []


def moves(run):
    """Looks after which rows began to move."""
    return [look for look in looks(run) if look["moved_to"] is not None]


def saved(run, data):
    """Records of all tables in the last checkpoint, and its other files.

    Without the manifest, which names the run's settings.
    """
    folders = CheckpointFolder(run / "checkpoints", 9)
    folder = run / "checkpoints" / f"step-{folders.steps()[-1]:08d}"
    manifest = read_manifest(folder)
    tables = build_tables(manifest.config, EncodedDataset.open(data).num_rows)
    embeddings = pb.Embeddings(tables, pb.Adam(lr=0.01), exchange="local")
    load_tables(folder, manifest.tables, embeddings.pieces())
    files = {
        name: content for name, content in files_below(folder).items() if "tables/" not in name
    }
    del files["manifest.json"]
    return folder.name, files, [shard.records for shard in embeddings.exchange.shards]


def check_same(run, expected, data):
    name, files, records = saved(run, data)
    other_name, others, right = saved(expected, data)
    assert (name, sorted(files)) == (other_name, sorted(others)) and len(files) > 0
    assert all(files[each] == others[each] for each in files)
    assert all(map(np.array_equal, records, right))


@pytest.mark.parametrize("exchange", ["retrieve"])
def test_killed_in_the_middle_of_a_move_and_resumed_to_the_bits_of_a_run_that_never_moved(
    worlds, tmp_path, exchange
):
    data = make_dataset(tmp_path / "data", max_table_rows=5000)
    plan = make_plan_file(data, tmp_path / "plan.json", 3)
    expected = tmp_path / "expected"
    run = tmp_path / "run"
    settings = [*SETTINGS, f"embedding.exchange.plan={plan}"]
    config = make_config(data, "embedding.exchange=alltoall", *settings)
    worlds(3).run(cases.train, config.model_dump(), str(expected))
    recipe = tmp_path / "recipe.toml"
    config = make_config(
        data, f"embedding.exchange={exchange}", "train.replan_above=1.1", *settings
    )
    recipe.write_text(to_toml(config.model_dump()))

    def is_on_its_way():
        return any(steps(run) > look["step"] + 12 for look in moves(run))

    with Team(recipe, "--run-dir", run, "--ranks", 3) as team:
        wait_until(lambda: is_on_its_way() or team.process.poll() is not None)
        os.kill(team.pids()[1], signal.SIGKILL)
        assert team.end() == 128 + signal.SIGKILL, team.output
    (move,) = moves(run)
    assert move["in_force_after"] is None, "rows were still on their way"
    with Team("--run-dir", run, "--resume", "--ranks", 3) as team:
        assert team.end() == 0, team.output
    assert any(look["in_force_after"] is not None for look in moves(run)), looks(run)
    check_same(run, expected, data)
