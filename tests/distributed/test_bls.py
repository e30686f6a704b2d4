"""The backend ``bls`` beside gloo, on real ranks."""

import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import bls_cases as cases
import pytest

from pibroch.ports import free_port

NEEDS_MPI = pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
ROUNDS = int(os.environ.get("PIBROCH_SOAK_DROPPED", "300"))
ROOT = Path(__file__).parents[2]
MPIEXEC = Path(sys.executable).with_name("mpiexec")


@pytest.mark.parametrize(("size", "bound"), [(2, 0), (3, 1), (4, 3)])
def test_all_to_all_gives_what_gloo_gives(worlds, size, bound):
    assert worlds(size).run(cases.beside_gloo, bound) == [len(cases.DTYPES) * 3 * (2 + size)] * size


@pytest.mark.alone
@NEEDS_MPI
def test_and_over_mpi(worlds):
    assert worlds(2).run(cases.over_mpi, 2) == [len(cases.DTYPES) * 3 * 4] * 2


WHOLE_RUN_OVER_MPI = """
import os, sys
rank, size = (int(os.environ.get("PMI_" + name, os.environ.get(name))) for name in ("RANK", "SIZE"))
import torch, torch.distributed as dist, pibroch as pb
options = pb.BoundedLagOptions(transport="mpi") if sys.argv[1] == "options" else None
dist.init_process_group("bls", pg_options=options, rank=rank, world_size=size)
for group in (None, dist.new_group([0, 1])):
    dist.all_to_all_single(out := torch.zeros(size), torch.full((size,), float(rank)), group=group)
    assert out.tolist() == [0.0, 1.0], out
print(type(dist.group.WORLD.lag.transport).__name__, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.alone  # ranks of MPI look for messages all the time
@NEEDS_MPI
@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec")
@pytest.mark.parametrize("choice", ["options", "variable"])
def test_a_run_may_be_over_mpi_from_its_first_group_on(choice):
    command = [sys.executable, "-c", WHOLE_RUN_OVER_MPI, choice]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if choice == "variable":
        environment["PIBROCH_BLS_TRANSPORT"] = "mpi"
    ended = subprocess.run(
        [str(MPIEXEC), "-n", "2", *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended
    assert ended.stdout.count("MpiTransport") == 2, "lines of two ranks may run together"


@pytest.mark.skipif(find_spec("mpi4py") is not None, reason="mpi4py is installed")
def test_without_mpi_the_extra_is_named(worlds):
    for message in worlds(2).run(cases.without_mpi):
        assert "pibroch[mpi]" in message


@pytest.mark.parametrize(("size", "bound"), [(2, 0), (2, 3), (3, 8)])
def test_waits_complete_everything_before(worlds, size, bound):
    assert worlds(size).run(cases.asynchronous, bound) == [True] * size


def test_bad_arguments_raise_what_gloo_raises(worlds):
    for ours, gloo in worlds(2).run(cases.errors)[0]:
        assert ours is not None and gloo is not None and ours[0] == gloo[0]
        if "gloo" not in gloo[1].lower():
            assert ours[1] == gloo[1]


@pytest.mark.parametrize("size", [2, 3])
def test_all_else_is_gloos(worlds, size):
    for rank, (total, objects, got, gradient, traded, name) in enumerate(
        worlds(size).run(cases.all_else)
    ):
        assert total == size * (size - 1) / 2 and objects == [
            {"rank": each} for each in range(size)
        ]
        assert got == (rank - 1) % size and gradient == [[(size + 1) / 2] * 2]
        assert traded == list(range(size)) and name == "bls"


@pytest.mark.timeout(120 + ROUNDS // 20)
def test_works_of_gloo_may_be_dropped_without_a_wait(worlds):
    assert worlds(2).run(cases.dropped, ROUNDS) == [2.0, 2.0]


def test_torchs_profiler_shows_exchanges_and_waits(worlds):
    for spans in worlds(2).run(cases.profiled):
        assert spans["bls:all_to_all"] == 4 and spans["bls:wait"] >= 3


@pytest.mark.parametrize(("value", "bound"), [("5", 5), (None, 1)])
def test_the_environment_gives_the_bound(worlds, value, bound):
    assert worlds(2).run(cases.by_environment, value) == [bound] * 2


def test_a_bound_that_cannot_be_is_an_error(worlds):
    for message in worlds(2).run(cases.by_environment, "many"):
        assert "PIBROCH_BLS_BOUND=many" in message


FIRST = """
import pibroch
assert not {"torch", "numba", "numpy"} & set(sys.modules)
import torch.distributed as dist
"""
LATER = """
import torch.distributed as dist
import pibroch
"""
NEITHER = """
import torch.distributed as dist
assert {name for name in sys.modules if name.startswith("pibroch.")} <= {
    "pibroch.errors", "pibroch.torch_backend", "pibroch.version"
}
"""
THEN = """
assert dist.is_backend_available("bls"), dist.Backend.backend_list
assert "pibroch.collectives" not in sys.modules
dist.init_process_group("bls", store=dist.HashStore(), rank=0, world_size=1)
import torch
dist.all_to_all_single(out := torch.zeros(3), torch.arange(3.0))
assert out.tolist() == [0, 1, 2]
dist.destroy_process_group()
"""


@pytest.fixture
def installed(tmp_path):
    """A folder for PYTHONPATH, in which pibroch's entry points lie as an installer writes them."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = tmp_path / "pibroch_of_this_tree-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: pibroch_of_this_tree\nVersion: 1\n"
    )
    lines = [
        f"[{group}]\n{name} = {value}" for group in groups for name, value in groups[group].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return os.pathsep.join([str(tmp_path), str(ROOT / "src")])


@pytest.mark.parametrize("program", [FIRST, LATER, NEITHER], ids=["first", "later", "neither"])
def test_the_backend_is_there_wherever_torch_is(program, installed):
    ran = subprocess.run(
        [sys.executable, "-c", "import sys\n" + program + THEN],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"PYTHONPATH": installed},
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""


def test_pibroch_registers_the_backend_where_torch_loads_no_entry_points():
    ran = subprocess.run(
        [sys.executable, "-c", "import sys\n" + LATER + THEN],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("transport", ["auto", "stream"])
def test_a_group_that_is_destroyed_leaves_neither_descriptors_nor_threads(worlds, transport):
    for before, opened, after in worlds(2).run(cases.destroyed, transport):
        assert opened != before and after == before
