"""From a trained model to groups of features, and to a model with towers.

That model saves and scores.
"""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from pibroch.cli.plan import app
from pibroch.data import EncodedDataset, Loader
from pibroch.errors import ConfigError
from pibroch.score.checkpoint import open_for
from pibroch.score.tower_groups import group_features, read_categories
from pibroch.serve.predictor import Predictor
from small_run import make_config, train_here


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    config = make_config(data, "train.steps=12")
    return train_here(config, tmp_path_factory.mktemp("runs") / "run")[0].path


@pytest.mark.parametrize("name", ["tower_dlrm", "tower_dcn"])
def test_groups_that_were_found_train_a_model_with_towers(run, data, tmp_path, name):
    out = tmp_path / "groups.json"
    page = tmp_path / "map.html"
    requested = [
        "--checkpoint",
        run,
        "--data",
        data,
        "--towers",
        3,
        "--out",
        out,
        "--page",
        page,
        "--samples",
        500,
    ]
    output = CliRunner().invoke(app, ["towers", *map(str, requested)])
    assert output.exit_code == 0, output.output
    towers = json.loads(out.read_text())["towers"]
    assert len(towers) == 3 and sorted(name for tower in towers for name in tower) == sorted(
        EncodedDataset.open(data).num_rows
    )
    assert "<svg" in page.read_text() and all(feature in page.read_text() for feature in towers[1])
    config = make_config(
        data,
        f"model.name={name}",
        f"model.towers.groups={out}",
        "model.towers.width=2",
        "train.steps=8",
    )
    out.unlink()  # the run has the groups themselves
    folder, _ = train_here(config, tmp_path / "run")
    assert [
        list(group) for group in Predictor.open(folder.path).config.model.towers.groups
    ] == towers


def test_similar_features_share_a_tower_and_categories_are_kept(run, data, tmp_path):
    dataset = EncodedDataset.open(data)
    predictor, _ = open_for(run, dataset)
    counted = []
    actual = group_features(predictor, dataset, 4, 700, "coherent", advance=counted.append)
    assert sum(counted) == 700
    other = group_features(predictor, dataset, 4, 700, "diverse", weigh_bytes=False)
    assert actual.inside > actual.between and other.inside < actual.inside
    batch = next(iter(Loader(dataset.split("train"), 2048)))
    units = torch.nn.functional.normalize(predictor.embed(batch.select(predictor.features)), dim=2)
    right = (units @ units.transpose(1, 2)).abs().mean(0)
    np.testing.assert_allclose(actual.similarity, right.numpy(), atol=1e-4)
    centred = group_features(
        predictor, dataset, 4, 700, "coherent", centred=True, advance=counted.append
    )
    assert sum(counted) == 1400 and not np.allclose(centred.similarity, actual.similarity)
    path = tmp_path / "kinds.toml"
    names = list(predictor.features)
    path.write_text(f"user = {names[:5]}\nitem = {names[5:]}\n")
    kinds = read_categories(path, names)
    for group in group_features(predictor, dataset, 5, 200, "coherent", categories=kinds).groups:
        assert len({name in names[:5] for name in group}) == 1
    path.write_text(f"user = {names[:5]}\nitem = {names[4:]}\n")
    with pytest.raises(ConfigError, match="in 2 categories"):
        read_categories(path, names)
