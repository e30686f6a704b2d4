"""torch's tools around tables of two ranks.

Ranks decide alike, and the bits are those of a program without the tool.
"""

import pytest
import torch
import torch_tools_cases as cases

EXCHANGES = ["alltoall", "lookahead", "retrieve", "towers"]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_step_that_overflows_on_one_rank_is_left_out_on_all(worlds, exchange):
    want = worlds(2).run(cases.scaled, "alltoall", "left out")
    got = worlds(2).run(cases.scaled, exchange, "overflows")
    for (rows, step, scales), (want_rows, want_step, _) in zip(got, want, strict=True):
        assert step == want_step == cases.STEPS - 1
        assert cases.same(rows, want_rows)
        assert scales == [2.0**16] * cases.SKIPPED + [2.0**15] * (cases.STEPS - cases.SKIPPED)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_recomputed_lookups_read_what_they_read_and_send_nothing(worlds, exchange):
    want = worlds(2).run(cases.recomputed, exchange, "plain")
    got = worlds(2).run(cases.recomputed, exchange, "checkpoint")
    for (rows, gradients, sent), (want_rows, want_gradients, want_sent) in zip(
        got, want, strict=True
    ):
        assert cases.same(rows, want_rows)
        assert all(map(torch.equal, gradients, want_gradients))
        assert exchange == "lookahead" or sent == want_sent


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_frozen_model_moves_no_row(worlds, exchange):
    for (before, frozen, thawed), step in worlds(2).run(cases.frozen, exchange):
        assert cases.same(before, frozen) and not cases.same(before, thawed)
        assert step == cases.STEPS


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_copies_are_refused_in_words(worlds, exchange):
    assert all("pibroch.save" in text for text in worlds(2).run(cases.copied, exchange))


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "fsdp1"])
def test_ddp_and_fsdp_around_a_model_with_tables(worlds, how):
    """Ranks have equally many samples, so that torch's mean over ranks is the mean over samples."""
    want = worlds(2).run(cases.wrapped, "data_parallel")
    for (losses, rows), (want_losses, want_rows) in zip(
        worlds(2).run(cases.wrapped, how), want, strict=True
    ):
        assert losses == pytest.approx(want_losses, rel=1e-5)
        for name, tensor in rows.items():
            torch.testing.assert_close(tensor, want_rows[name], rtol=1e-4, atol=1e-5)
