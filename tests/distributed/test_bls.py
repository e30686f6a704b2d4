"""The backend ``bls`` beside gloo, on real ranks."""

import subprocess
import sys
import time
from importlib.util import find_spec

import bls_cases as cases
import pytest


@pytest.mark.parametrize(("size", "bound"), [(2, 0), (3, 1), (4, 3)])
def test_all_to_all_gives_what_gloo_gives(worlds, size, bound):
    assert worlds(size).run(cases.beside_gloo, bound) == [len(cases.DTYPES) * 3 * (2 + size)] * size


@pytest.mark.alone
@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_and_over_mpi(worlds):
    assert worlds(2).run(cases.over_mpi, 2) == [len(cases.DTYPES) * 3 * 4] * 2


@pytest.mark.skipif(find_spec("mpi4py") is not None, reason="mpi4py is installed")
def test_without_mpi_the_extra_is_named(worlds):
    for said in worlds(2).run(cases.without_mpi):
        assert "pibroch[mpi]" in said


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


@pytest.mark.parametrize(("value", "bound"), [("5", 5), (None, 1)])
def test_the_environment_gives_the_bound(worlds, value, bound):
    assert worlds(2).run(cases.by_environment, value) == [bound] * 2


def test_a_bound_that_cannot_be_is_an_error(worlds):
    for said in worlds(2).run(cases.by_environment, "many"):
        assert "PIBROCH_BLS_BOUND=many" in said


FIRST = """
import sys, time
start = time.perf_counter(); import pibroch; took = time.perf_counter() - start
assert not {"torch", "numba", "numpy"} & set(sys.modules)
import torch.distributed as dist
assert dist.is_backend_available("bls"), dist.Backend.backend_list
assert not any(type(each).__module__ == "pibroch.after_import" for each in sys.meta_path)
assert "pibroch.collectives" not in sys.modules
print(took)
"""
LATER = """
import torch.distributed as dist
assert not dist.is_backend_available("bls")
import pibroch
assert dist.is_backend_available("bls")
dist.init_process_group("bls", store=dist.HashStore(), rank=0, world_size=1)
import torch
dist.all_to_all_single(out := torch.zeros(3), torch.arange(3.0))
assert out.tolist() == [0, 1, 2]
dist.destroy_process_group()
print(0)
"""


@pytest.mark.parametrize("program", [FIRST, LATER], ids=["first", "later"])
def test_importing_pibroch_is_enough_before_or_after_torch(program):
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""


def test_the_import_takes_no_time():
    from pibroch.after_import import after_import

    start = time.perf_counter()
    for _ in range(10):
        after_import("pibroch_has_no_such_module", lambda: None)
    took = (time.perf_counter() - start) / 10
    del sys.meta_path[:10]
    assert took < 0.005


@pytest.mark.parametrize("transport", ["auto", "stream"])
def test_a_group_that_is_destroyed_leaves_neither_descriptors_nor_threads(worlds, transport):
    for before, opened, after in worlds(2).run(cases.destroyed, transport):
        assert opened != before and after == before
