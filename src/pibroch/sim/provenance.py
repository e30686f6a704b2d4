"""When, where and with what a calibration was measured, and what of it a reader should know.

A file of any age predicts without an error. What moved since then, a new version of a library or a
machine that was changed, only shows in wrong numbers; so it is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from importlib.metadata import PackageNotFoundError, version

from pibroch.sim.machine import Machine

MEASURED_PACKAGES = ("pibroch", "torch", "numba", "numpy")
"""Those whose code the calibration times."""
FRESH = timedelta(days=90)
"""How long a measurement is used without a word.

Kernels, firmware and neighbours of a machine change within months, and no file names them.
"""


def installed_versions() -> dict[str, str]:
    """Versions of the packages that a calibration depends on; those that are not there are left."""
    versions = {}
    for name in MEASURED_PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # run from a checkout that is not installed
            continue
    return versions


def notes_on(machine: Machine, calibration: str, recipe: str, now: datetime) -> list[str]:
    """What to say before a prediction is believed; nothing of a fresh measurement made here.

    Args:
        machine: what was loaded.
        calibration: name or file that it was loaded from.
        recipe: that is predicted, which a new measurement should be of.
        now: with a time zone.
    """
    if machine.sources:
        return [f"{machine.name}: published rates, the least time: {'; '.join(machine.sources)}"]
    notes = []
    if not machine.is_here:
        notes.append(
            f"calibrated on {machine.name} ({machine.cpu}, {machine.cores} cores), which is another"
            f" machine than this one: {calibration}"
        )
    if doubts := [*_of_age(machine, now), *_of_versions(machine)]:
        where = "" if machine.is_here else "there "
        notes.append(
            f"calibration {calibration} {' and '.join(doubts)}: measure {where}anew with"
            f" `pibroch simulate calibrate {recipe} --output {calibration}`"
        )
    return notes


def _of_age(machine: Machine, now: datetime) -> Iterator[str]:
    if machine.measured_at is None:
        yield "does not say when it was measured"
        return
    age = now - machine.measured_at
    day = f"{machine.measured_at:%Y-%m-%d}"
    if age < timedelta(days=-1):
        yield f"says that it was measured on {day}, which is yet to come"
    elif age > FRESH:
        yield f"was measured {age.days:,} days ago, on {day}"


def _of_versions(machine: Machine) -> Iterator[str]:
    installed = installed_versions()
    changed = [
        f"{name} {was}, not {installed[name]}"
        for name, was in machine.versions.items()
        if installed.get(name, was) != was
    ]
    if changed:
        yield f"was measured with {', '.join(changed)}"
