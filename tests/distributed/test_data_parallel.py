"""Dense layers over ranks give the numbers of one process, and the same bits on all ranks."""

import dense_cases as cases
import pytest
import torch

from forked import context
from pibroch.collectives import Ranks, data_parallel
from pibroch.models import MODELS, build_model
from pibroch.ports import free_port


def assert_same_bits(results):
    first, *others = results
    for other in others:
        assert first.keys() == other.keys()
        for name, tensor in first.items():
            assert tensor is other[name] is None or torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.pools])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_models_learn_what_one_process_learns(worlds, size, name):
    """With batch norm and dropout, ragged and empty parts.

    Outputs, all gradients, running statistics, parameters. Models of high order have gradients of
    tens, whose rounding is as much larger.
    """
    want_steps, want_state = cases.train(name, Ranks.alone(), slice(0, 9))
    results = worlds(size).run(cases.train_part, name)
    assert_same_bits([state for _, state in results])
    for step, (logits, embedded, gradients) in enumerate(want_steps):
        got = [steps[step] for steps, _ in results]
        assert_same_bits([part[2] for part in got])
        torch.testing.assert_close(
            torch.cat([part[0] for part in got]), logits, rtol=1e-3, atol=1e-5
        )
        torch.testing.assert_close(
            torch.cat([part[1] for part in got]), embedded, rtol=1e-3, atol=1e-6
        )
        for key, gradient in gradients.items():
            rounding = 1e-6 * max(1.0, float(gradient.abs().max()))
            torch.testing.assert_close(
                got[0][2][key], gradient, rtol=1e-3, atol=rounding, msg=lambda m, k=key: f"{k}: {m}"
            )
    state = results[0][1]
    assert state.keys() == want_state.keys()
    for key, value in want_state.items():
        torch.testing.assert_close(
            state[key], value, rtol=1e-3, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize("sizes", [(4, 1), (3, 0), (2, 0, 5)])
def test_odd_modules_get_the_weighted_mean_of_what_each_part_gives_alone(worlds, sizes):
    """Tied, frozen, unused and rarely used layers, several types.

    Nothing from a rank without samples, be it NaN.
    """
    results = worlds(len(sizes)).run(cases.odd, sizes)
    shares = {part: size / sum(sizes) for part, size in enumerate(sizes) if size}
    alone = {part: cases.odd_gradients(Ranks.alone(), sizes, part) for part in shares}
    untouched = {
        f"{layer}.{kind}"
        for layer in ("frozen", "unused", "later_frozen")
        for kind in ("weight", "bias")
    }
    for moment in range(3):
        gradients = results[0][moment]
        assert_same_bits([result[moment] for result in results])
        assert {name for name, gradient in gradients.items() if gradient is None} == untouched
        for name in gradients.keys() - untouched:
            parts = {
                part: actual[moment][name]
                for part, actual in alone.items()
                if actual[moment][name] is not None
            }
            want = sum(shares[part] * gradient.double() for part, gradient in parts.items())
            assert gradients[name].dtype == parts[0].dtype
            rounding = 1e-2 if gradients[name].dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(gradients[name].double(), want, rtol=rounding, atol=rounding)


def test_all_ranks_start_with_the_bits_of_the_first(worlds):
    results = worlds(3).run(cases.start)
    assert_same_bits(results)
    torch.manual_seed(0)
    assert torch.equal(results[0]["buffer_0"], torch.randn(3, 2) * 9)
    assert len(results[0]) == 8


def test_models_that_differ_are_named_on_all_ranks(worlds):
    for message in worlds(3).run(cases.unequal_models):
        assert "bias" in message
        assert "rank 0" in message
        assert "rank 1" in message


def test_the_top_network_travels_while_the_bottom_one_is_computed(worlds):
    for events in worlds(2).run(cases.order_of_events):
        assert events == ["top"] * 5 + ["sum", "top"] + ["bottom"] * 5 + [
            "sum",
            "bottom",
        ] or events == [
            *["top"] * 6,
            "sum",
            *["bottom"] * 6,
            "sum",
        ]


def test_copies_evaluation_and_failures_leave_the_next_step_alone(worlds):
    for own, copied, of_pickle in worlds(2).run(cases.copies):
        assert all(gradient is not None for gradient in own)
        assert copied == [None] * len(own)
        assert all(of_pickle)


@pytest.mark.parametrize(
    "form", [("in turn",), ("calls first",), ("in turn", "sum"), ("calls first", "sum")]
)
def test_several_passes_add_up_to_those_of_one_process(worlds, form):
    """Each weighs by its own samples, and one without any on any rank changes nothing."""
    results = worlds(2).run(cases.passes, *form)
    for got, want in results:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    for here, there in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("sizes", [((4, 1), (3, 3)), ((2, 2), (5, 5))])
def test_one_pass_through_calls_of_several_sizes_is_refused_on_all_ranks(worlds, sizes):
    for message, before, after, following in worlds(2).run(cases.two_calls_in_one_pass, sizes):
        if sizes[0] == (2, 2):
            # the mean over samples of 1 on one rank and 2 on the other, twice
            assert message is None
            torch.testing.assert_close(after - before, torch.full((1, 2), 2 * (2 + 5 * 2) / 7))
        else:
            assert "several calls" in message and "do:" in message
            assert torch.equal(before, after)
        torch.testing.assert_close(following - after, before)


@pytest.mark.parametrize("how", ["thawed", "added", "replaced"])
def test_layers_that_are_trained_later_are_refused_until_they_belong_to_the_model(worlds, how):
    results = worlds(2).run(cases.later_layers, how)
    for message, got, want in results:
        assert {"thawed": "0.bias", "added": "2.bias", "replaced": "0.weight"}[how] in message
        assert "data_parallel(model) again" in message
        torch.testing.assert_close(got, want)
    assert_same_bits([got for _, got, _ in results])


def test_a_part_that_is_data_parallel_by_itself_is_summed_once(worlds):
    for events, (got, want) in worlds(2).run(cases.part_of_its_own):
        assert events == ["sum"] * 2
        torch.testing.assert_close(got, want)


def test_a_dropped_model_is_freed_with_its_threads_and_descriptors(worlds):
    worlds(2).run(cases.dropped)  # the first sum of a process starts the communication thread
    for is_freed, gives_back, (before, meanwhile) in worlds(2).run(cases.dropped):
        assert is_freed
        assert gives_back
        assert all(more > less for more, less in zip(meanwhile, before, strict=True))


def test_rounds_of_joining_and_leaving_keep_nothing():
    port = free_port()
    ranks = [
        context().Process(target=cases.train_in_rounds, args=(rank, port)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]


def test_moments_are_sound_far_from_zero(worlds):
    results = worlds(3).run(cases.far_from_zero)
    x = results[0][0].double()
    want = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(
        torch.cat([out for _, out in results]).double(), want, rtol=1e-3, atol=2e-3
    )


@pytest.mark.parametrize("num_samples", [0, 1])
def test_a_global_batch_without_variance_passes_by(worlds, num_samples):
    for rank, (out, state) in enumerate(worlds(2).run(cases.few_samples, num_samples)):
        assert out.tolist() == [pytest.approx([2.0] * 3, rel=1e-4)] * (
            num_samples if rank == 1 else 0
        )
        assert int(state["num_batches_tracked"]) == 0


def test_one_process_is_left_alone():
    model = build_model("dlrm", 4, 5, dim=3, bottom=(8,), top=(9, 7), batch_norm=True)
    assert data_parallel(model) is model
    assert not model._forward_hooks
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert model.top.norms[0].gather is None
