"""What is said of a calibration that is old, of another version, or from elsewhere."""

from datetime import UTC, datetime, timedelta

import pytest

from pibroch.errors import ConfigError
from pibroch.sim.machine import Machine, cpu_model, num_cores
from pibroch.sim.provenance import installed_versions, notes_on

NOW = datetime(2026, 6, 30, 12, tzinfo=UTC)
AGAIN = "anew with `pibroch simulate calibrate criteo --output m.json`"


def measured(days=0, **changes):
    here = {"name": "a", "cpu": cpu_model(), "cores": num_cores(), "flops_per_second": 1e9}
    at = NOW - timedelta(days=days)
    return Machine(**here | {"versions": installed_versions(), "measured_at": at} | changes)


def notes(machine):
    return notes_on(machine, "m.json", "criteo", NOW)


@pytest.mark.parametrize("days", [0, 1, 89.9, -0.9])
def test_nothing_of_a_fresh_one_of_this_machine(days):
    assert not notes(measured(days))


def test_the_age_in_days_and_the_command():
    assert notes(measured(412)) == [
        f"calibration m.json was measured 412 days ago, on 2025-05-14: measure {AGAIN}"
    ]


def test_a_day_that_is_yet_to_come_and_none_at_all():
    (note,) = notes(measured(-30))
    assert "m.json says that it was measured on 2026-07-30, which is yet to come" in note
    (note,) = notes(measured(measured_at=None))
    assert f"m.json does not say when it was measured: measure {AGAIN}" in note


def test_versions_that_are_others_now():
    installed = installed_versions()
    assert {"torch", "numba", "numpy"} <= installed.keys()
    before = installed | {"torch": "1.0", "numpy": "0.9", "gone": "3"}
    (note,) = notes(measured(100, versions=before))
    assert "was measured 100 days ago" in note and note.endswith(f"measure {AGAIN}")
    assert f"with torch 1.0, not {installed['torch']}, numpy 0.9, not {installed['numpy']}" in note
    assert "gone" not in note and "numba" not in note


def test_another_machine_is_to_be_measured_there():
    first, second = notes(measured(100, cpu="Abacus", cores=3))
    assert "on a (Abacus, 3 cores), which is another machine than this one: m.json" in first
    assert f"measure there {AGAIN}" in second
    assert len(notes(measured(cores=num_cores() + 1))) == 1


@pytest.mark.parametrize("name", ["v100", "a100", "h100"])
def test_published_rates_have_no_age(name):
    (note,) = notes_on(Machine.load(name), name, "criteo", NOW)
    assert "published rates" in note and "datasheet" in note


def test_a_date_comes_back_and_one_without_a_zone_is_refused(tmp_path):
    path = tmp_path / "m.json"
    machine = measured(3)
    machine.save(path)
    assert Machine.load(str(path)) == machine
    path.write_text(path.read_text().replace("2026-06-27T12:00:00Z", "2026-06-27T12:00:00"))
    with pytest.raises(ConfigError, match=r"measured_at"):
        Machine.load(str(path))
