"""`pibroch train --by-role` under torchrun.

Some of its processes train, the others serve them, and all end together.
"""

import json
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import training_cases as cases
from benchmarks.lab import Lab, obstacle
from launched_team import steps, wait_until
from test_processors_train import RAGGED, check_same_run

from certificates import authority, signed
from forked import Program, ranks
from pibroch.config import to_toml
from pibroch.ports import free_port
from pibroch.wire.secret import new_secret
from small_run import make_config, start_command

ENDS_S = 20.0

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pibroch"]


ONE_SERVER_ALONE = [
    argument
    for change in ("embedding.servers=1", "data.processors=0", "embedding.oracle=replicated")
    for argument in ("--set", change)
]


@pytest.fixture
def recipe(data, tmp_path):
    path = tmp_path / "roles.toml"
    lookahead = [
        "embedding.exchange=lookahead",
        "embedding.lookahead=5",
        "embedding.oracle=central",
    ]
    own = [*lookahead, "embedding.servers=2", "data.processors=1"]
    path.write_text(to_toml(make_config(data, *RAGGED, *own).model_dump()))
    return path


@pytest.fixture(scope="module")
def expected(worlds, data, tmp_path_factory):
    """A run of two ranks that do everything themselves."""
    folder = tmp_path_factory.mktemp("expected") / "run"
    worlds(2).run(cases.train, make_config(data, *RAGGED).model_dump(), str(folder))
    return folder


def test_all_roles_end_with_the_same_bits(recipe, expected, tmp_path):
    run = tmp_path / "run"
    with ranks(6, "-m", "pibroch", "train", recipe, "--run-dir", run, "--by-role") as everyone:
        ended = [each.end() for each in everyone]
    output = "".join(each.stdout + each.stderr for each in ended)
    assert [each.returncode for each in ended] == [0] * 6, output
    check_same_run(run, expected)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["world_size"] == 2 and summary["bytes_by_purpose"]["data"] > 0
    assert output.count("test AUC") == 1 and "stopped" not in output, output
    assert {path.parent.name for path in run.glob("*/0.log")} == {"servers", "processors", "oracle"}


def test_a_killed_server_ends_the_run(recipe, tmp_path):
    """Under a launcher that is not torchrun."""
    run = tmp_path / "run"
    arguments = [
        "train",
        recipe,
        "--run-dir",
        run,
        "--by-role",
        "--set",
        "train.epochs=1000",
        *ONE_SERVER_ALONE,
    ]
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    with (
        start_command(*arguments, env=place | {"RANK": "0", "LOCAL_RANK": "0"}) as trainer,
        start_command(*arguments, env=place | {"RANK": "1", "LOCAL_RANK": "1"}) as server,
    ):
        wait_until(lambda: steps(run) >= 5 or trainer.poll() is not None)
        server.send_signal(signal.SIGKILL)
        ended = trainer.end(ENDS_S)
    assert ended.returncode == 1 and "'embedding0' out of reach" in ended.stderr, ended.stderr


def test_torchrun_starts_roles(recipe, tmp_path):
    """A trainer and a server, of which nothing is forked."""
    run = tmp_path / "run"
    with Program(
        *TORCHRUN, "train", recipe, "--run-dir", run, "--by-role", *ONE_SERVER_ALONE
    ) as torchrun:
        ended = torchrun.end()
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    assert json.loads((run / "summary.json").read_text())["world_size"] == 1
    assert output.count("test AUC") == 1 and "stopped" not in output, output


@pytest.mark.skipif(
    obstacle() is not None or shutil.which("openssl") is None, reason="needs a lab, and openssl"
)
@pytest.mark.alone  # a lab
def test_roles_on_two_hosts_meet_by_secret_and_tls(recipe, expected, tmp_path):
    """Trainers on one host, most of those who serve them on the other."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "pibroch", "train", str(recipe), "--by-role", "--run-dir"]
    tls = ",".join(map(str, signed(tmp_path, "worker", authority(tmp_path, "job"))))
    with Lab(hosts=2) as lab:
        refused = lab.run([*command, str(tmp_path / "refused"), *ONE_SERVER_ALONE], timeout_s=60)
    assert refused.exit_codes[refused.first_failed] == 2
    assert "no secret for workers on several machines" in refused.outputs[refused.first_failed]
    with Lab(hosts=2, ranks_per_host=3) as lab:
        variables = {"PIBROCH_RPC_SECRET": new_secret(), "PIBROCH_SERVERS_TLS": tls}
        ended = lab.run([*command, str(run)], env=variables, timeout_s=120)
    assert ended.exit_codes == (0,) * 6, ended.outputs
    check_same_run(run, expected)


def command_on_two_hosts(data, folder, exchange, *own):
    """Under `lookahead` rows are on servers of both hosts, and a central oracle plans."""
    roles = ["embedding.oracle=central", "embedding.servers=2", "data.processors=1"]
    served = exchange == "lookahead"
    changes = [f"embedding.exchange={exchange}", *(roles if served else []), *own]
    recipe = folder / "recipe.toml"
    recipe.write_text(to_toml(make_config(data, *RAGGED, *changes).model_dump()))
    arguments = ["train", str(recipe), "--run-dir", str(folder / "run"), *(["--by-role"] * served)]
    return [sys.executable, "-m", "pibroch", *arguments]


DOWN_S = 2.0  # half of what makes a host count as lost


@pytest.mark.skipif(obstacle() is not None, reason="needs a lab")
@pytest.mark.alone  # a lab
@pytest.mark.parametrize("exchange", ["alltoall", "lookahead"])
def test_a_link_that_is_down_for_a_while_is_waited_for(data, expected, tmp_path, exchange):
    run = tmp_path / "run"
    served = exchange == "lookahead"
    command = command_on_two_hosts(data, tmp_path, exchange)
    before = []

    def pull():
        wait_until(lambda: steps(run) >= 5, 60)
        lab.network.plug(1, is_in=False)
        before.append(steps(run))
        time.sleep(DOWN_S)
        before.append(steps(run))
        lab.network.plug(1, is_in=True)

    with Lab(hosts=2, ranks_per_host=3 if served else 1) as lab, ThreadPoolExecutor(1) as threads:
        pulling = threads.submit(pull)
        ended = lab.run(command, env={"PIBROCH_RPC_SECRET": new_secret()}, timeout_s=120)
        pulling.result(60)
    assert set(ended.exit_codes) == {0}, ended.outputs
    assert before[1] <= before[0] + 3 < 40, "nothing goes on without the link"
    check_same_run(run, expected)


NAMED_WITHIN_S = 5.0


@pytest.mark.skipif(obstacle() is not None, reason="needs a lab")
@pytest.mark.alone  # a lab
def test_a_lost_host_is_named_by_every_role(data, tmp_path):
    run = tmp_path / "run"
    command = command_on_two_hosts(data, tmp_path, "lookahead", "train.epochs=1000")
    lines = []

    def say(rank, line):
        lines.append(line)

    def words():
        """What the trainers say, of which rank 0 has no log, and what three roles do."""
        names = ["ranks/rank-1", "oracle/0", "processors/0", "servers/1"]
        return ["\n".join(lines), *((run / f"{name}.log").read_text() for name in names)]

    with Lab(hosts=2, ranks_per_host=3) as lab, ThreadPoolExecutor(1) as threads:
        environment = {"PIBROCH_RPC_SECRET": new_secret()}
        running = threads.submit(lab.run, command, environment, 60.0, None, say)
        wait_until(lambda: steps(run) >= 5 or running.done(), 60)
        lab.network.plug(1, is_in=False)
        began = time.monotonic()
        wait_until(lambda: all("gives no sign of life" in text for text in words()), 30)
        seconds = time.monotonic() - began
        lab.network.plug(1, is_in=True)
        running.result(90)
    assert seconds <= NAMED_WITHIN_S
