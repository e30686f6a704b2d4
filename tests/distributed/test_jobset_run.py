"""The processes of a manifest, run as they stand in it."""

import json

import yaml
from test_lookahead_train import COMMON, check_same_files, curve

from pibroch.config import to_toml
from pibroch.wire.secret import new_secret
from pods import Pods
from small_run import make_config, run_command

ROLES = ["--embedding-servers", 2, "--oracle", "--data-processors", 1]
CLAIMS = ["--claim", "runs:/runs", "--claim", "clicks:/data:ro"]


def recipe_of(data, folder):
    recipe = folder / "mine.toml"
    config = make_config(data, *COMMON, "embedding.exchange=lookahead", "embedding.lookahead=5")
    recipe.write_text(to_toml(config.model_dump()))
    return recipe


def documents_of(recipe, data, *arguments):
    given = ["--image", "none", "--run-dir", "/runs/a", "--data", f"/data/{data.name}", *CLAIMS]
    ended = run_command("job", "manifest", recipe, *given, *arguments)
    assert ended.returncode == 0, ended.stderr
    return list(yaml.safe_load_all(ended.stdout))


def test_the_processes_of_a_manifest_end_with_the_bits_of_one_machine(data, tmp_path):
    recipe = recipe_of(data, tmp_path)
    documents = documents_of(recipe, data, "--ranks", 2, *ROLES)
    volumes = {"runs": tmp_path / "runs", "clicks": data.parent}
    (tmp_path / "recipe").mkdir()
    with Pods(documents, volumes, tmp_path / "recipe", new_secret()) as pods:
        assert [code for code, _ in pods.end()] == [0, 0], pods.end()
        for role, index in (("embedding-server", 1), ("oracle", 0), ("data-processor", 0)):
            assert pods.program(role, index).poll() is None, f"{role} {index} has ended"
    run = tmp_path / "runs" / "a"
    expected = tmp_path / "expected"
    ended = run_command("train", recipe, "--ranks", 2, "--run-dir", expected)
    assert ended.returncode == 0, ended.stderr
    check_same_files(run, expected)
    assert curve(run) == curve(expected)
    assert json.loads((run / "summary.json").read_text())["world_size"] == 2
