"""Every example runs, and what it prints shows that it learned.

Two start as a user starts them; the others are forked, which saves each process two seconds of
imports.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forked import Program
from pibroch.ports import free_port

pytestmark = pytest.mark.timeout(240)

EXAMPLES = Path(__file__).parents[3] / "examples"
TIMEOUT_S = 200
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def environment():
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("MASTER_", "PIBROCH_"))
    }


def run(name, raises="nothing raises"):
    """What the example prints; the only tracebacks are of those who raise, on purpose, these words.

    Callees log them.
    """
    with Program(EXAMPLES / f"rpc_{name}.py", env=environment()) as program:
        ended = program.end(TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("Traceback") == ended.stderr.count(f"RuntimeError: {raises}"), (
        ended.stderr
    )
    return ended.stdout


def run_by_hand(name, *launcher):
    """What the example prints. Whatever happens, none of its processes is left."""
    command = [sys.executable, *launcher, str(EXAMPLES / f"rpc_{name}.py")]
    started = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    try:
        output, errors = started.communicate(timeout=TIMEOUT_S)
        assert started.returncode == 0, errors
        assert "Traceback" not in errors, errors
        return output
    finally:
        with_children(started.pid, signal.SIGKILL)


def with_children(group, sign):
    try:
        os.killpg(group, sign)
    except ProcessLookupError:
        return


def test_quick_start_of_the_guide(tmp_path):
    guide = (EXAMPLES.parent / "docs" / "rpc.md").read_text()
    code = re.search(r"## Quick start.*?```python\n(.*?)```", guide, re.DOTALL).group(1)
    (tmp_path / "first_call.py").write_text(code.replace("29500", str(free_port())))
    command = [sys.executable, str(tmp_path / "first_call.py")]
    second = subprocess.Popen([*command, "1"])
    try:
        first = subprocess.run(
            [*command, "0"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
        assert "tensor([4., 4.])" in first.stdout
        assert second.wait(TIMEOUT_S) == 0
    finally:
        second.kill()


def numbers(pattern, output):
    """Groups of all matches as numbers."""
    matches = [tuple(map(float, match)) for match in re.findall(pattern, output)]
    assert matches, output
    return matches


def test_model_parallel():
    ((first, last),) = numbers(
        r"loss .*: ([\d.]+) in the first step, ([\d.]+) in the last", run("model_parallel")
    )
    assert last < first / 4


def test_model_parallel_under_torchrun():
    output = run_by_hand("model_parallel", *TORCHRUN, "3")
    ((first, last),) = numbers(r"loss .*: ([\d.]+) in the first step, ([\d.]+)", output)
    assert last < first / 4


def test_parameter_server():
    output = run("parameter_server")
    losses = numbers(
        r"trainer\d: log loss ([\d.]+) in the first ten steps, ([\d.]+) in the last", output
    )
    assert len(losses) == 2
    for first, last in losses:
        assert 0.5 < first < 0.75 and last < first / 2


def test_pipeline():
    whole, cut = numbers(
        r"(\d+) micro-batches: ([\d.]+) ms a step; loss from ([\d.]+) to ([\d.]+)", run("pipeline")
    )
    assert (whole[0], cut[0]) == (1, 4)
    assert whole[2] > 2.5 and cut[3] < 0.7


def test_actor_critic():
    output = run("actor_critic")
    steps = numbers(
        r"actor\d: (\d+) steps upright in the first 50 of \d+ episodes, (\d+) in the last", output
    )
    assert len(steps) == 2
    assert min(first for first, _ in steps) < 40, (
        "who is late begins with what the other one has learned"
    )
    assert all(last > 60 for _, last in steps)


def test_federated():
    rounds = re.findall(
        r"round (\d+): accuracy ([\d.]+) with (.*)", run("federated", raises="I am about to leave")
    )
    assert [int(number) for number, _, _ in rounds] == list(range(20))
    takers = [names.split(", ") for _, _, names in rounds]
    assert takers[0] == ["client1", "client2"]
    assert ["client1", "client2", "client3"] in takers
    assert takers[-1] == ["client1", "client3"]
    assert float(rounds[0][1]) < 0.6 and float(rounds[-1][1]) > 0.8
