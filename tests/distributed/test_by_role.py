"""`pibroch train --by-role` under torchrun: some of its processes train, the others serve them, and all end together."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import training_cases as cases
from crew import Crew, wait_until
from test_processors_train import RAGGED, check_same_run

from certificates import authority, signed
from pibroch.config import to_toml
from pibroch.rpc.secret import new_secret
from small_run import make_config

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT))

from benchmarks.lab import Lab, obstacle  # noqa: E402


def torchrun(num_processes):
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_processes),
        "-m",
        "pibroch",
    ]


def test_roles_under_torchrun_end_with_the_same_bits(worlds, data, tmp_path):
    recipe, run, expected = tmp_path / "roles.toml", tmp_path / "run", tmp_path / "expected"
    worlds(2).run(cases.train, make_config(data, *RAGGED).model_dump(), str(expected))
    lookahead = ["embedding.exchange=lookahead", "embedding.lookahead=5", "embedding.oracle=central"]
    own = [*lookahead, "embedding.servers=2", "data.processors=1"]
    recipe.write_text(to_toml(make_config(data, *RAGGED, *own).model_dump()))
    with Crew(recipe, "--run-dir", run, "--by-role", program=torchrun(6)) as crew:
        assert crew.end() == 0, crew.output
    check_same_run(run, expected)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["world_size"] == 2 and summary["bytes_by_purpose"]["data"] > 0
    assert crew.output.count("test AUC") == 1 and "stopped" not in crew.output, crew.output
    assert {path.parent.name for path in run.glob("*/0.log")} == {"servers", "processors", "oracle"}

    endless = tmp_path / "endless"
    fewer = ["embedding.servers=1", "data.processors=0", "embedding.oracle=replicated", "train.epochs=1000"]
    own = [argument for change in fewer for argument in ("--set", change)]
    with Crew(recipe, "--run-dir", endless, "--by-role", *own, program=torchrun(2)) as crew:
        ranks = crew.wait_for_step(endless, 5)
        os.kill(ranks[1], signal.SIGKILL)
        assert crew.end() == 1
        wait_until(crew.is_gone, 5)


@pytest.mark.skipif(obstacle() is not None or shutil.which("openssl") is None, reason="needs a lab, and openssl")
def test_roles_on_two_hosts_meet_by_secret_and_tls(worlds, data, tmp_path):
    """A launcher that is not torchrun; trainers on one host, most of those who serve them on the other."""
    recipe, run, expected = tmp_path / "roles.toml", tmp_path / "run", tmp_path / "expected"
    worlds(2).run(cases.train, make_config(data, *RAGGED).model_dump(), str(expected))
    lookahead = ["embedding.exchange=lookahead", "embedding.lookahead=5", "embedding.oracle=central"]
    own = [*lookahead, "embedding.servers=2", "data.processors=1"]
    recipe.write_text(to_toml(make_config(data, *RAGGED, *own).model_dump()))
    command = [sys.executable, "-m", "pibroch", "train", str(recipe), "--by-role", "--run-dir"]
    tls = ",".join(map(str, signed(tmp_path, "worker", authority(tmp_path, "job"))))
    with Lab(hosts=2, ranks_per_host=3) as lab:
        refused = lab.run([*command, str(tmp_path / "refused")], timeout_s=60)
        ended = lab.run(
            [*command, str(run)], env={"PIBROCH_RPC_SECRET": new_secret(), "PIBROCH_SERVERS_TLS": tls}, timeout_s=120
        )
    first = refused.first_failed
    assert refused.exit_codes[first] == 2 and "no secret for workers on several machines" in refused.outputs[first]
    assert ended.exit_codes == (0,) * 6, ended.outputs
    check_same_run(run, expected)
