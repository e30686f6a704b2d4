import dataclasses
from itertools import pairwise

import pytest

from pibroch.errors import ConfigError
from pibroch.rpc.info import WorkerInfo, new_ids


def test_a_worker_is_a_value_with_name_and_id():
    worker = WorkerInfo("trainer", 3)
    assert (worker.name, worker.id) == ("trainer", 3)
    assert worker == WorkerInfo(name="trainer", id=3) != WorkerInfo("trainer", 4)
    assert {worker: 1}[WorkerInfo("trainer", 3)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        worker.id = 4


def test_numbers_of_one_source_follow_each_other_and_fit_63_bits():
    source = new_ids()
    numbers = [next(source) for _ in range(1000)]
    assert numbers == list(range(numbers[0], numbers[0] + 1000))
    assert numbers[0] >= 0
    assert numbers[-1] < 2**63


def test_sources_start_far_from_each_other():
    starts = sorted(next(new_ids()) for _ in range(1000))
    gaps = [after - before for before, after in pairwise(starts)]
    assert min(gaps) > 1_000_000


@pytest.mark.parametrize(
    ("name", "need"),
    [
        ("abc*", "Worker name must match"),
        (" ", "must match"),
        ("", "must be non-empty"),
        (500 * "a", "shorter than 128"),
    ],
)
def test_a_name_that_nobody_can_have_is_a_runtime_error_and_a_config_error(name, need):
    for kind in (RuntimeError, ConfigError):
        with pytest.raises(kind, match=need):
            WorkerInfo(name, 0)
