"""How much memory a cache may take when nobody says."""

from types import SimpleNamespace

import pibroch as pb
from pibroch.embedding import RowSpace
from pibroch.exchange.layout import lay_out, plan_for
from pibroch.exchange.lookahead import build

ROW_BYTES = 4 * (4 + 1)  # dim 4, row-wise state


def slots(world_size, free, monkeypatch, cache_rows=None):
    space = RowSpace([pb.Table("a", 10_000, 4)])
    (layout,) = lay_out(space, plan_for(space.tables, "row_wise", world_size, "ranks"), 0)
    ranks = SimpleNamespace(rank=0, world_size=world_size)
    channel = SimpleNamespace(ranks=ranks, gather=lambda offered: [offered] * world_size)
    monkeypatch.setattr(build, "free_memory", lambda: free)
    return build.spare_rows([layout], [pb.RowWiseAdagrad(lr=1.0)], cache_rows, channel)[0]


def test_half_of_what_is_left_when_the_own_rows_are_there(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert (
        slots(2, 2 * ROW_BYTES * 5_600, monkeypatch) == 300
    )  # of 5,600 rows a rank, 5,000 are its own
    assert slots(2, ROW_BYTES, monkeypatch) == 0
    assert slots(2, 1 << 40, monkeypatch) == 10_000, "no more than there are rows"
    assert slots(1, 1 << 40, monkeypatch) == 0, "all rows are at home"
    assert slots(2, ROW_BYTES, monkeypatch, cache_rows=77) == 77
