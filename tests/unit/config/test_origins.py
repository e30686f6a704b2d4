import tomllib

import pytest

from pibroch.config import load_recipe, recipe_names
from pibroch.config.origins import purpose, resolve
from pibroch.config.recipes import check_config
from pibroch.errors import ConfigError


@pytest.mark.parametrize("name", recipe_names())
def test_what_is_shown_of_a_shipped_recipe_is_the_same_recipe(name):
    config = load_recipe(name)
    assert check_config(tomllib.loads(resolve(name).to_toml()), "shown") == config


def test_shipped_recipes_say_in_a_line_what_each_is_for():
    purposes = {name: purpose(name) for name in recipe_names()}
    assert len(set(purposes.values())) == len(purposes)
    assert all(said.endswith(".") and len(said) <= 90 for said in purposes.values()), purposes


def test_each_value_has_the_one_who_said_it_last(tmp_path):
    (tmp_path / "base.toml").write_text(
        'optimizer = "sgd"\nmodel = "dcnv2"\n[data]\ndir = "x"\n[train]\nepochs = 2\n'
        "batch_size = 7\n"
    )
    (tmp_path / "child.toml").write_text(
        'extends = "base.toml"\n[optimizer]\nlr = 0.5\n[train]\nbatch_size = 9\n'
        '[embedding.tables.b.rows]\nname = "hashed"\ncapacity = 64\n'
    )
    recipe = resolve(str(tmp_path / "child.toml"), ["train.steps=5", "model=dlrm"])
    assert [path.name for path in recipe.files] == ["base.toml", "child.toml"]
    said = {
        "optimizer.name": "base.toml",
        "optimizer.lr": "child.toml",
        "optimizer.weight_decay": "default",
        "model.name": "--set",
        "data.dir": "base.toml",
        "train.batch_size": "child.toml",
        "train.steps": "--set",
        "train.epochs": "default",
        "embedding.exchange.name": "default",
        "embedding.tables.b.rows.capacity": "child.toml",
    }
    assert {key: recipe.origin(key) for key in said} == said
    assert "lr = 0.5  # child.toml\n" in recipe.to_toml()
    assert recipe.config == load_recipe(
        str(tmp_path / "child.toml"), ["train.steps=5", "model=dlrm"]
    )


def test_what_a_replaced_component_said_is_forgotten(tmp_path):
    (tmp_path / "a.toml").write_text(
        '[data]\ndir = "x"\n[optimizer]\nname = "adam"\nlr = 0.1\nweight_decay = 0.5\n'
        "[train]\nepochs = 2\n"
    )
    recipe = resolve(str(tmp_path / "a.toml"), ["optimizer={name='sgd', lr=1.0}"])
    assert recipe.origin("optimizer.lr") == "--set"
    assert recipe.origin("optimizer.weight_decay") == "default"


def test_a_key_of_earlier_recipes_is_no_default(tmp_path):
    (tmp_path / "a.toml").write_text(
        '[data]\ndir = "x"\n[train]\nepochs = 2\n[embedding]\nexchange = "alltoall"\n'
        'placement = "table_wise"\n'
    )
    recipe = resolve(str(tmp_path / "a.toml"))
    assert recipe.origin("embedding.exchange.name") == "a.toml"
    assert recipe.origin("embedding.exchange.placement") == "given under an earlier name"
    with pytest.raises(ConfigError, match="no shipped recipe"):
        resolve("synthetic_smal")
