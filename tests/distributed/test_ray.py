"""`pibroch train --launcher ray` on a cluster of two nodes, both on this machine."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launched_team import steps, wait_until
from test_lookahead_train import COMMON, check_same_files, curve
from test_titles import command_line

from pibroch.config import to_toml
from small_run import make_config, run_command

pytest.importorskip("ray", reason="needs the extra ray")
SERVERS = ["embedding.exchange=lookahead", "embedding.lookahead=5", "embedding.exchange.servers=2"]
PROCESSORS_PER_NODE = 5
QUICK = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
"""A node is given up after 1.5 s, not after 15."""
NODE = {"num_cpus": PROCESSORS_PER_NODE, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    head = {**NODE, "include_dashboard": False, "_system_config": QUICK}
    result = Cluster(initialize_head=True, head_node_args=head)
    yield result
    result.shutdown()


class Trained:
    """A run on the cluster. Leaving the ``with`` block kills its launcher."""

    def __init__(self, cluster, recipe, run):
        command = ["train", recipe, "--launcher", "ray", "--address", cluster.address]
        command += ["--ranks", 2, "--run-dir", run]
        self._log = run.with_suffix(".log")
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pibroch", *map(str, command)],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def wait_for(self, condition):
        wait_until(lambda: condition() or self.process.poll() is not None)
        assert self.process.poll() is None, self._log.read_text()

    def end(self):
        assert self.process.wait(240) == 0, self._log.read_text()
        return self._log.read_text()


def recipe_of(data, folder, *more):
    recipe = folder / "mine.toml"
    recipe.write_text(to_toml(make_config(data, *COMMON, *SERVERS, *more).model_dump()))
    return recipe


def processes():
    """Of runs called ``mine``, by what they are."""
    results = {}
    for folder in Path("/proc").glob("[0-9]*"):
        title = command_line(folder.name)
        if title.startswith("pibroch: ") and title.endswith(" (mine)"):
            results[title.removeprefix("pibroch: ").removesuffix(" (mine)")] = int(folder.name)
    return results


def test_two_nodes_end_with_the_bits_of_one_machine(cluster, data, expected, tmp_path):
    node = cluster.add_node(**NODE)
    recipe = recipe_of(data, tmp_path, "data.processors=1")
    run = tmp_path / "run"
    with Trained(cluster, recipe, run) as trained:
        trained.wait_for(lambda: steps(run) > 0)
        os.kill(processes()["data processor 0 of 1"], signal.SIGKILL)
        output = trained.end()
    cluster.remove_node(node)
    assert "rank 0" in output and "step 1/42" in output, "what rank 0 says is shown"
    (restart,) = map(json.loads, (run / "restarts.jsonl").read_text().splitlines())
    assert restart["from_step"] is None, "nothing is trained again"
    check_same_files(run, expected)
    assert curve(run) == curve(expected)
    wait_until(lambda: not processes(), 10)


def test_a_killed_trainer_goes_on_from_a_cut_in_memory_and_without_a_node_that_is_killed(
    cluster, data, tmp_path
):
    node = cluster.add_node(**NODE)
    cuts = ["train.checkpoint_every=100", "train.cut_every_seconds=0.1"]
    cuts.append("embedding.exchange.servers=1")
    recipe = recipe_of(data, tmp_path, *cuts, "train.evaluate_every=60", "train.epochs=12")
    run = tmp_path / "run"
    with Trained(cluster, recipe, run) as trained:
        trained.wait_for(lambda: steps(run) > 20)
        os.kill(processes()["trainer 1 of 2"], signal.SIGKILL)
        trained.wait_for(lambda: (run / "restarts.jsonl").exists() and steps(run) > 110)
        cluster.remove_node(node, allow_graceful=False)
        output = trained.end()
    first, second = map(json.loads, (run / "restarts.jsonl").read_text().splitlines())
    assert 0 < first["from_step"] < 100, "where there is no checkpoint"
    assert second["from_step"] >= 100, "from a checkpoint, or a later cut"
    for restart in (first, second):
        assert f"starting again from step {restart['from_step']}" in output
    ended = run_command("train", recipe, "--ranks", 2, "--run-dir", tmp_path / "undisturbed")
    assert ended.returncode == 0, ended.stderr
    check_same_files(run, tmp_path / "undisturbed")
    wait_until(lambda: not processes(), 10)


def test_a_cluster_that_is_not_there(data, tmp_path):
    recipe = recipe_of(data, tmp_path)
    for address, reason in (("127.0.0.1:9", "no cluster at"), ("ray://a:1", "outside the cluster")):
        more = ("--launcher", "ray", "--address", address, "--run-dir", tmp_path / "run")
        ended = run_command("train", recipe, *more)
        assert ended.returncode == 2 and reason in ended.stderr
    ended = run_command("train", recipe, "--ranks", 2, "--address", "a:1")
    assert ended.returncode == 2 and "a launcher on a cluster" in ended.stderr


def test_nobody_imports_ray_who_does_not_ask_for_it(data, tmp_path):
    program = (
        "import sys; from pibroch.__main__ import main\n"
        "from pibroch.launch.base import launchers; assert 'ray' in launchers()\n"
        "try: main()\n"
        "finally: print([name for name in sys.modules if name.split('.')[0] == 'ray'])\n"
    )
    config = make_config(data, "train.epochs=1")
    recipe = tmp_path / "alone.toml"
    recipe.write_text(to_toml(config.model_dump()))
    command = [sys.executable, "-c", program, "train", recipe, "--run-dir", tmp_path / "run"]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"
    assert (tmp_path / "run" / "summary.json").exists()


def test_without_ray_the_extra_is_named(data, tmp_path):
    program = "import sys; sys.modules['ray'] = None\nfrom pibroch.__main__ import main; main()\n"
    command = [sys.executable, "-c", program, "train", recipe_of(data, tmp_path)]
    command += ["--launcher", "ray", "--run-dir", tmp_path / "run"]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert ended.returncode == 1 and "pip install 'pibroch[ray]'" in ended.stderr
