"""Order and bytes of every exchange's messages are those of ``tests/golden/traces.json``.

A difference that is wanted is a commit of its own, with its reason and a file made anew; what
differs is found by comparing what ``traces.py --show CASE`` prints before and after.
"""

import json

import pytest
import traces
from role_team import RoleTeam

from grids import some
from pibroch.kernels.target import compile_target
from pibroch.processors import serve

KEPT = json.loads(traces.FILE.read_text())
HAS_ITS_BITS = KEPT["target"] == compile_target()
SIZED_BY_BITS = "compressed"
HAS_DENSE_LAYERS = ("modules", "a run")
"""Their bits are torch's, and may depend on where in memory its tensors lie."""


def test_each_case_is_kept():
    assert KEPT["cases"].keys() == traces.CASES.keys()


@pytest.fixture(scope="module")
def processors():
    made = RoleTeam(2, serve)
    yield made
    made.close()


@pytest.mark.parametrize("case", some(traces.CASES, 0, 3))
def test_order_and_bytes(worlds, server_team, oracle_team, processors, case):
    if not HAS_ITS_BITS and SIZED_BY_BITS in case:
        pytest.skip("its messages have other sizes on other processors")
    ranks = traces.sums_of(
        traces.record(case, worlds, server_team.rendezvous, processors.rendezvous)
    )
    for rank, (now, kept) in enumerate(zip(ranks, KEPT["cases"][case], strict=True)):
        assert now.keys() == kept.keys(), rank
        for thread, (count, order, bits) in kept.items():
            assert now[thread][:2] == [count, order], f"rank {rank}, {thread}: the order of events"
            if HAS_ITS_BITS and not any(each in case for each in HAS_DENSE_LAYERS):
                assert now[thread][2] == bits, f"rank {rank}, {thread}: bytes of messages"
