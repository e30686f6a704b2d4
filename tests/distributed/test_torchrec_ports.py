"""Programs written for TorchRec, and the same moved to pibroch: equal losses, few lines changed."""

import difflib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.environments import peers_python

from pibroch.errors import MissingDependencyError
from pibroch.ports import free_port

PROGRAMS = Path(__file__).with_name("torchrec_ports")
NAMES = ["dlrm", "two_tower", "bert4rec"]
MOST_LINES = 10
TIMEOUT_S = 300


@pytest.mark.parametrize("name", NAMES)
def test_few_lines_change(name):
    other, ours = (
        PROGRAMS.joinpath(f"{name}_{system}.py").read_text().splitlines()
        for system in ("torchrec", "pibroch")
    )
    changed = [
        line for line in difflib.ndiff(other, ours) if line.startswith("+ ") and line.strip("+ ")
    ]
    assert 0 < len(changed) <= MOST_LINES, changed


def start(python, system, world, folder, *packages):
    """All ranks of one system's programs."""
    rendezvous = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
    }
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" or system == "pibroch"
    }
    command = [python, "-W", "ignore", PROGRAMS / "run.py", folder, system, *packages]
    return [
        subprocess.Popen(
            command,
            env=inherited | rendezvous | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=folder.joinpath(f"{system}-{world}-{rank}.log").open("w"),
        )
        for rank in range(world)
    ]


def end(processes, folder):
    try:
        for process in processes:
            process.wait(TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join(log.read_text()[-1500:] for log in sorted(folder.glob("*.log")))
    assert not any(process.returncode for process in processes), logs


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """``losses(name, system, world)``: means over all ranks, step by step."""
    try:
        python = peers_python()
    except MissingDependencyError as error:
        pytest.skip(error.got)
    probe = "; ".join(
        [
            "import sys, sysconfig, torch",
            (
                "print(torch.__version__, *sys.version_info[:2], sysconfig.get_path('purelib'),"
                " sep='|')"
            ),
        ]
    )
    ran = subprocess.run(
        [python, "-c", probe], capture_output=True, text=True, check=True, timeout=120
    )
    *versions, packages = ran.stdout.strip().split("|")
    if versions != [torch.__version__, *map(str, sys.version_info[:2])]:
        pytest.skip(
            f"TorchRec's models need the torch and the Python of their own environment, {versions}"
        )
    folder = tmp_path_factory.mktemp("ports")
    end(start(python, "torchrec", 1, folder), folder)  # writes the weights with which all start
    others = start(python, "torchrec", 2, folder)
    for world in (1, 2):
        others += start(sys.executable, "pibroch", world, folder, packages)
    end(others, folder)

    def read(name, system, world):
        return np.mean(
            [torch.load(folder / f"{name}-{system}-{world}-{rank}.pt") for rank in range(world)],
            axis=0,
        )

    return read


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_same_program_has_the_same_losses(losses, name):
    want = losses(name, "torchrec", 1)
    assert len(want) == 20 and np.ptp(want) > 0.01
    for system, world in (("torchrec", 2), ("pibroch", 1), ("pibroch", 2)):
        np.testing.assert_allclose(
            losses(name, system, world), want, rtol=1e-6, err_msg=f"{system}, {world} ranks"
        )


@pytest.mark.slow
def test_torchrec_s_own_objects_are_taken(losses):
    assert losses("objects", "pibroch", 1) == [1.0], "objects_pibroch.py came to its end"
