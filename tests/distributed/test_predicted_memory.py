"""Memory that `pibroch simulate` reckons, beside what processes of real ranks take."""

import json
import subprocess
import sys
from pathlib import Path

import memory_program as program
import pytest

import pibroch as pb
from pibroch.embedding import group_tables
from pibroch.models.activations import activation_bytes
from pibroch.planner import Plan
from pibroch.sim.counting import Job, count
from pibroch.sim.machine import DenseCost
from pibroch.sim.process import process_bytes
from pibroch.sim.recipe import COPIES, ModelBytes
from pibroch.sim.steps import Dense
from pibroch.sim.sweep import memory_of

ADAMS = 2  # numbers that it keeps of each parameter


@pytest.fixture(scope="module")
def running():
    return process_bytes().running


def most_beyond_imports(store, exchange):
    """Of two ranks, each a process that has done nothing else."""
    command = [sys.executable, program.__file__]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(program.RANKS), store, exchange],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(program.RANKS)
    ]
    try:
        taken = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return max(each["peak"] - each["imports"] for each in taken)


@pytest.mark.full
@pytest.mark.parametrize("exchange", ["alltoall", "lookahead"])
def test_of_a_process_beyond_its_imports(tmp_path, running, exchange):
    made = program.tables()
    groups = group_tables(made, pb.RowWiseAdagrad(lr=0.1))
    options = pb.Lookahead(lookahead=program.LOOKAHEAD)
    options = options if exchange == "lookahead" else pb.AllToAll()
    job = Job(groups, Plan.of(made, program.RANKS), program.batch_of, options)
    counts = count(job, 4)
    model = program.model()
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    nothing = dict.fromkeys(("begin", "forward", "backward", "rest"), (0.0, 0.0))
    cost = DenseCost(**nothing, optimizer=0, flops=0, early_bytes=num_bytes, late_bytes=0)
    of_model = ModelBytes(COPIES + ADAMS, activation_bytes(model) * program.BATCH_SIZE)
    memory = memory_of(job, counts, Dense(cost, program.BATCH_SIZE), of_model, running)
    taken = most_beyond_imports(str(Path(tmp_path) / "store"), exchange)
    # on two machines 5 and 7 to 8 % too little under alltoall, 2 and 4 to 6 % under lookahead:
    # what malloc and libraries keep differs; docs/simulate.md promises 10 %
    assert sum(memory.values()) == pytest.approx(taken, rel=0.1), memory
