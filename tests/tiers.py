"""The tiers of tests, said in one place: `make test`, `make test-all` and `make soak`.

`make test` runs what is not marked `full`, `make test-all` the rest. `make soak` runs those of
:data:`SOAK` again, at the length that its environment variables ask for.

A test is `full` when one of these holds:

1. :data:`FOLDERS` says so of the longest path in it that the test lies under;
2. it is parametrised to more than :data:`MOST_RANKS` ranks, by an argument named ``size``;
3. it has a long form (:data:`SOAK`), is marked `slow` or `alone`, or hypothesis draws its input;
4. it is marked `full` where it stands.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_RANKS = 2
FOLDERS = {
    "tests": "test",
    "tests/conformance": "full",
    "tests/conformance/test_exchange.py": "test",  # the contract, in one process
    "tests/conformance/test_world.py": "test",  # and with two ranks
    "tests/distributed": "full",
    "tests/distributed/rpc/test_examples.py": "test",
    "tests/unit/benchmarks": "full",  # workers, peers and labs
    "tests/unit/test_retries.py": "full",
    "tests/unit/test_uncompiled_kernels.py": "full",
}
"""Paths of folders and files, and the tier of what lies under them."""
SOAK = (
    "tests/conformance/test_lagged_transport.py::test_every_part",
    "tests/distributed/rpc/test_hostile.py::test_a_bombardment",
    "tests/distributed/rpc/test_torch_suites.py",
    "tests/distributed/test_lab.py",
    "tests/distributed/test_recovery.py::test_random_kills",
    "tests/unit/rpc/test_fuzz_callables.py",
    "tests/unit/serve/test_connections.py::test_health_beside_connections",
    "tests/unit/serve/test_delta_reload.py",
    "tests/unit/serve/test_inference_protocol.py::test_a_request_is_read",
    "tests/unit/serve/test_mutations.py",
    "tests/unit/serve/test_one_reading.py",
    "tests/unit/serve/test_openapi.py",
    "tests/unit/serve/test_refusals.py::test_thousands",
    "tests/unit/test_uncompiled_kernels.py",
)
"""What tests that have a long form begin with; the short one stays in its tier."""


def is_full(item: pytest.Item) -> bool:
    """Whether a test is for `make test-all`."""
    if any(map(item.get_closest_marker, ("full", "slow", "alone", "soak", "hypothesis"))):
        return True
    call = getattr(item, "callspec", None)
    size = call.params.get("size", 0) if call else 0
    if isinstance(size, int) and size > MOST_RANKS:
        return True
    path = item.path.relative_to(ROOT)
    (tier, *_) = (
        FOLDERS[place.as_posix()] for place in (path, *path.parents) if place.as_posix() in FOLDERS
    )
    return tier == "full"


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by what is marked here
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(SOAK):
            item.add_marker("soak")
        if is_full(item):
            item.add_marker("full")
