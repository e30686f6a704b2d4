"""Everything that peers may name, called with odd arguments in a process of its own."""

import os

import pytest

import fuzz_callables
from forked import context
from fuzz_callables import run

SECONDS = float(os.environ.get("PIBROCH_FUZZ_S", "10"))


@pytest.mark.timeout(120 + 3 * SECONDS)
def test_odd_arguments_neither_crash_nor_hold_the_lock(tmp_path):
    seed = int(os.environ.get("PIBROCH_FUZZ_SEED", "0"))
    num_calls, num_done, stalls, _slow, ending = run(SECONDS, seed, tmp_path, context=context())
    assert not ending
    assert not stalls
    assert num_calls > 100 * SECONDS and num_done > num_calls / 20  # it gets somewhere


def test_the_fuzzer_sees_a_crash_and_a_held_lock(tmp_path):
    for name, sign in [("crash", "ended with -6"), ("hold", "")]:
        *_, stalls, _slow, ending = run(2, 0, tmp_path, [f"fuzz_callables:{name}"], context())
        assert sign in ending and bool(stalls) == (name == "hold"), (ending, stalls)
    assert callable(fuzz_callables.crash)
