import tomllib

from pibroch.config import load_recipe, recipe_names
from small_run import run_command


def test_all_recipes_are_listed(tmp_path):
    listed = run_command("recipes", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    heading, *lines = listed.stdout.splitlines()
    assert heading.split() == ["recipe", "model", "data", "what", "for"]
    assert [line.split()[0] for line in lines] == recipe_names()
    for line, name in zip(lines, recipe_names(), strict=True):
        config = load_recipe(name)
        assert line.split()[1:3] == [config.model.name, config.data.dir or "generated"]


def test_a_recipe_is_shown_with_origins_and_its_data_and_can_be_kept(tmp_path):
    name = "criteo_kaggle_sample_deepfm"
    shown = run_command("recipes", name, "--set", "train.batch_size=99", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    config = load_recipe(name, ["train.batch_size=99"])
    for line in (
        f"# {name}.toml extends criteo_kaggle_sample.toml.",
        f"# Data: {config.data.prepare}",
        f"# Train: pibroch train {name} --set train.batch_size=99",
        "lr = 0.05  # criteo_kaggle_sample_deepfm.toml",
        "lr = 0.001  # criteo_kaggle_sample.toml",
        "batch_size = 99  # --set",
        "seed = 1  # default",
    ):
        assert line in shown.stdout.splitlines()
    assert tomllib.loads(shown.stdout)["model"]["dim"] == config.model.dim
    (tmp_path / "mine.toml").write_text(shown.stdout)
    assert load_recipe(str(tmp_path / "mine.toml")) == config
    again = run_command("recipes", "mine.toml", cwd=tmp_path).stdout
    assert "# Train: pibroch train mine.toml\n" in again and "lr = 0.05  # mine.toml" in again
    generated = run_command("recipes", "synthetic_small", cwd=tmp_path).stdout
    assert "# Data: generated when a run begins.\n" in generated


def test_what_cannot_be_shown(tmp_path):
    unknown = run_command("recipes", "synthetic_smal", cwd=tmp_path)
    assert unknown.returncode == 2 and "did you mean 'synthetic_small'" in unknown.stderr
    nameless = run_command("recipes", "--set", "seed=2", cwd=tmp_path)
    assert nameless.returncode == 2 and "--set without a recipe" in nameless.stderr
