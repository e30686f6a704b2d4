"""Programs in TorchRec's manner on several ranks learn as one process does.

That process has the global batches.
"""

import numpy as np
import pytest
import torchrec_cases as cases

SIZES = {  # of each rank's batches
    "ragged": [[5, 3, 6, 2], [1, 4, 2, 7]],
    "one rank ends early": [[5, 3, 6, 2, 4, 1], [1, 4]],
}


@pytest.mark.parametrize(
    "exchange",
    [{"exchange": "alltoall"}, {"exchange": "lookahead", "lookahead": 2, "cache_rows": 90}],
)
@pytest.mark.parametrize("sizes", SIZES)
def test_ranks_learn_what_one_process_learns(worlds, exchange, sizes):
    sizes = SIZES[sizes]
    want_losses, want_pieces, want_parameters, want_metrics = cases.train_alone(sizes)
    results = worlds(2).run(cases.train, sizes, **exchange)
    steps = max(map(len, sizes))
    for rank, (kinds, losses, pieces, parameters, metrics) in enumerate(results):
        own = sizes[rank] + [0] * (steps - len(sizes[rank]))
        assert kinds == [("Batch", size, size) for size in own], (
            "the user's own batches, then empty ones of their kind"
        )
        assert len(losses) == steps
        for table, (rows, weights) in pieces.items():
            np.testing.assert_allclose(
                weights,
                want_pieces[table][1][rows.start : rows.stop : rows.step],
                rtol=1e-5,
                atol=1e-6,
            )
        for actual, want in zip(parameters, want_parameters, strict=True):
            np.testing.assert_allclose(actual, want, rtol=1e-5, atol=1e-6)
        want = want_metrics["label"].lifetime
        assert (metrics.num_samples, metrics.auc) == (
            want.num_samples,
            pytest.approx(want.auc, abs=1e-6),
        )
        assert metrics.normalized_entropy == pytest.approx(want.normalized_entropy, rel=1e-5)
    summed = np.add(results[0][1], results[1][1])
    np.testing.assert_allclose(summed, want_losses, rtol=1e-5)


def test_copies_of_a_batch_and_a_function_s_empty_ones_are_as_good(worlds):
    sizes = SIZES["one rank ends early"]
    plain, copied = (
        worlds(2).run(cases.train, sizes, exchange="lookahead", **each)
        for each in ({}, {"copies": True, "empty": True})
    )
    for one, other in zip(plain, copied, strict=True):
        assert one[0] == other[0] and one[1] == other[1]
        assert all(np.array_equal(one[2][table][1], other[2][table][1]) for table in one[2])
