"""Plans survive their way through numbers, to the type of each array."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pibroch.errors import ProtocolError
from pibroch.exchange.lookahead.oracle import DESIGNS, Opening, Oracle, StepPlan
from pibroch.exchange.lookahead.oracle.encoding import Parts, decode_opening, decode_plan, encode
from pibroch.exchange.lookahead.oracle.kernels.window import Gradients, Transfer


def check_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, Opening | StepPlan):
        for name in one.__slots__:
            check_same(getattr(one, name), getattr(other, name))
    elif isinstance(one, tuple | list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            check_same(a, b)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype and one.shape == other.shape and other.flags.writeable
        assert np.array_equal(one, other)
    else:
        assert one == other


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_what_an_oracle_says_comes_back(data):
    num_ranks = data.draw(st.integers(1, 4))
    num_servers = data.draw(st.integers(0, 2))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    num_rows = 12 * (num_ranks + num_servers)
    bounds = np.linspace(0, num_rows, num_ranks + num_servers + 1).astype(np.int64)
    options = {
        "lookahead": data.draw(st.integers(1, 5)),
        "design": data.draw(st.sampled_from(sorted(DESIGNS))),
    }
    oracle = Oracle(
        bounds,
        0,
        capacity=num_rows // data.draw(st.integers(1, 2)),
        num_trainers=num_ranks,
        **options,
    )
    for _ in range(6):
        oracle.add(
            [np.unique(rng.integers(0, num_rows, rng.integers(0, 6))) for _ in range(num_ranks)]
        )
    opening = oracle.open()
    check_same(opening, decode_opening(encode(opening)))
    for _ in range(6):
        plan = oracle.plan()
        check_same(plan, decode_plan(encode(plan)))


def drawn_array(rng, dtype, shape=None):
    limit = rng.choice([5, (1 << 31) - 1, 1 << 31, 1 << 40]) if dtype == np.int64 else 1 << 31
    return rng.integers(-limit, limit, rng.integers(0, 4) if shape is None else shape).astype(dtype)


def drawn_plan(rng):
    def travel():
        arrays = [drawn_array(rng, np.int64) for _ in range(6)]
        return Transfer(*arrays[:4], drawn_array(rng, np.int64, (4, 3)), *arrays[4:])

    def gradients():
        kinds = (np.int64, np.int32, np.int32)
        return Gradients(
            drawn_array(rng, np.int64),
            drawn_array(rng, np.int64, (2, 3)),
            *(drawn_array(rng, kind) for kind in kinds),
        )

    early = travel() if rng.random() < 0.5 else None
    leaving = [travel() for _ in range(rng.integers(0, 4))]
    places = drawn_array(rng, rng.choice([np.int32, np.int64]))
    used = drawn_array(rng, np.int64)
    return StepPlan(
        int(rng.integers(0, 1 << 40)),
        gradients(),
        bool(rng.random() < 0.5),
        travel(),
        gradients(),
        gradients(),
        leaving,
        early,
        places,
        7,
        used,
        places,
    )


@pytest.mark.parametrize("seed", range(20))
def test_numbers_of_any_size_come_back(seed):
    plan = drawn_plan(np.random.default_rng(seed))
    check_same(plan, decode_plan(encode(plan)))


def test_a_plan_takes_few_bytes():
    """Rows that rise by one, or fall, take none; scattered ones two bytes."""
    oracle = Oracle(np.array([0, 50_000, 100_000]), 0, lookahead=1, capacity=100_000)
    for step in range(2):
        oracle.add([np.arange(step, 80_000), np.arange(20_000, 100_000)])
    oracle.open()
    plan = oracle.plan()
    arrays = [*plan.critical, *plan.deferred, *plan.local, *plan.next_step, plan.places]
    assert encode(plan).num_bytes < 1.5 * sum(array.size for array in arrays)


@pytest.mark.parametrize("seed", range(5))
def test_torn_plans_are_refused(seed):
    plan = drawn_plan(np.random.default_rng(seed))
    head, body = encode(plan)
    for parts in (
        Parts(head[:-7], body),
        Parts(head[:4], body),
        Parts(head[:-1], body),
        Parts(head, body[:-1]),
        Parts(head, np.append(body, 1)),
        Parts(np.append(head, 0), body),
    ):
        with pytest.raises(ProtocolError, match="no plan"):
            decode_plan(parts)
    with pytest.raises(ProtocolError, match="no plan"):
        decode_opening(Parts(head, body))
