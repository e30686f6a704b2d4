"""Modules that groups of ranks hold.

Gradients, clipping and checkpoints are those of one process that holds everything.
"""

import group_module_cases as cases
import numpy as np
import pytest
import torch


def assert_close(got, want, **tolerance):
    for name, tensor in got.items():
        torch.testing.assert_close(
            tensor, want[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


def assert_same_bits(got, want):
    for name, tensor in got.items():
        assert torch.equal(tensor, want[name]), name


@pytest.fixture(scope="module")
def reference():
    return cases.train(cases.alone())


@pytest.mark.parametrize("size", [2, 4])
def test_steps_are_those_of_one_process_and_bits_agree_within_groups(worlds, reference, size):
    """Ragged, empty and single batches, batch norm in the towers.

    A tower's rank may be alone in its group.
    """
    want_steps, want_state = reference
    results = worlds(size).run(cases.train)
    names = [set(steps[0][0]) for steps, _ in results]
    assert names[0] != names[-1] and set().union(*names) == set(want_steps[0][0])
    for step, (want, want_blocks, want_clipped, want_norm) in enumerate(want_steps):
        got = [steps[step] for steps, _ in results]
        for gradients, _, clipped, norm in got:
            assert_close(gradients, want, rtol=1e-4, atol=1e-6)
            assert_close(clipped, want_clipped, rtol=1e-4, atol=1e-6)
            assert norm == pytest.approx(want_norm, rel=1e-6 if step == 0 else 1e-5, abs=1e-9)
            assert norm == got[0][3]
            for _, _, others, _ in got:
                assert_same_bits(
                    {name: clipped[name] for name in clipped.keys() & others.keys()}, others
                )
        assert want_norm > cases.CLIP or sum(cases.STEPS[step]) == 0
        torch.testing.assert_close(
            torch.cat([blocks for _, blocks, _, _ in got]), want_blocks, rtol=1e-4, atol=1e-6
        )
    for _, state in results:
        assert_close(state, want_state, rtol=1e-3, atol=1e-4)
        for _, others in results:
            assert_same_bits({name: state[name] for name in state.keys() & others.keys()}, others)


def test_a_checkpoint_of_four_ranks_is_whole_and_any_number_of_ranks_loads_its_part(
    worlds, data, tmp_path
):
    results = worlds(4).run(cases.save, data, tmp_path)
    saved, went_on = (
        {name: t for result in results for name, t in result[i].items()} for i in (0, 1)
    )
    assert any("towers.0" in name for name in saved) and any("towers.1" in name for name in saved)
    for size in (1, 2, 4):
        loads = worlds(size).run(cases.load, data, tmp_path)
        held = [set(loaded) for loaded, _ in loads]
        assert set().union(*held) == saved.keys() and (size == 1) == (held[0] == saved.keys())
        for loaded, state in loads:
            assert_same_bits(loaded, saved)
            if size == 4:
                assert_same_bits(state, went_on)
            else:
                assert_close(state, went_on, rtol=1e-3, atol=1e-4)


def test_a_group_may_take_the_mean_over_its_own_samples(worlds):
    results = worlds(3).run(cases.mean_in_a_group)
    assert results[1] is None
    parts = [
        np.arange(2.0)[None],
        np.arange(6.0).reshape(3, 2) + 10,
    ]  # of ranks 2 and 0, the group's first and second
    want = torch.tensor(np.concatenate(parts).mean(0, keepdims=True), dtype=torch.float32)
    for weight, gradient in (results[0], results[2]):
        assert weight.tolist() == [[1.0, 1.0]]
        torch.testing.assert_close(gradient, want)


@pytest.mark.parametrize(
    "how", ["one name for two groups", "a member without it", "held by all elsewhere"]
)
def test_parts_that_do_not_fit_together_are_named_on_all_ranks(worlds, how):
    for message in worlds(3).run(cases.wrong_parts, how):
        assert message and "tower" in message and "rank" in message
