"""A row index of one's own (``reversed_rows.py``) under every exchange.

The bits are those of ids that were reversed by hand. The shape ``any`` of the other suites has
tables with this index, too.
"""

import numpy as np
import pytest
import role_team as on_servers
import torch

import cases

CACHES = ("lrpp", "partitioned", "replicated")
WAYS = {
    "alltoall": [{"placement": kind} for kind in ("row_wise", "column_wise", "table_wise_pooled")],
    "lookahead": [{"cache": cache, "lookahead": 3} for cache in CACHES],
    "retrieve": [{"placement": {"a": "replicated", "": "row_wise"}}],
    "towers": [{"ranks_per_host": 1, "placement": {"b": "table_wise_pooled", "": "row_wise"}}],
}


def check_alike(actual, right):
    for (pooled, pieces, message), (pooled_by_hand, pieces_by_hand, message_by_hand) in zip(
        actual, right, strict=True
    ):
        assert all(map(torch.equal, pooled, pooled_by_hand))
        for (piece, *numbers), (by_hand, *numbers_by_hand) in zip(
            pieces, pieces_by_hand, strict=True
        ):
            assert (piece.table.name, str(piece.rows)) == (by_hand.table.name, str(by_hand.rows))
            np.testing.assert_equal(numbers, numbers_by_hand)
        assert message == message_by_hand
        assert "id 9 for feature 'y' in sample 4 of the batch; need an id from 0 to 8" in message


@pytest.mark.parametrize("exchange", WAYS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_reversed_ids_train_to_the_bits_of_ids_reversed_by_hand(worlds, size, exchange):
    for options in WAYS[exchange][: None if size == 2 else 1]:
        run = worlds(size).run
        actual, right = (
            run(cases.train_reversed, by_hand, exchange=exchange, **options)
            for by_hand in (False, True)
        )
        check_alike(actual, right)


def test_in_one_process(worlds):
    actual, right = (
        worlds(1).run(cases.train_reversed, by_hand, exchange="local") for by_hand in (False, True)
    )
    check_alike(actual, right)


@pytest.mark.parametrize("size", [1, 3])
def test_with_rows_on_servers(worlds, server_team, size):
    actual, right = (
        worlds(size).run(
            on_servers.run, server_team.rendezvous, 2, "train_reversed", by_hand, lookahead=3
        )
        for by_hand in (False, True)
    )
    check_alike(actual, right)
