"""What is touched when: the bookkeeping of the lookahead oracle."""

from pibroch.exchange.lookahead.oracle.kernels.window.leaving import close, go_home, waiting_for
from pibroch.exchange.lookahead.oracle.kernels.window.masks import (
    MAX_RANKS,
    mask_type,
    rank_type,
    words_for,
)
from pibroch.exchange.lookahead.oracle.kernels.window.numba import (
    arrive,
    count_arrivals,
    enter,
    forget,
    move,
    places_of,
    split,
)
from pibroch.exchange.lookahead.oracle.kernels.window.rules import (
    HOME,
    LRPP,
    PARTITIONED,
    REPLICATED,
    Gradients,
    Places,
    Ranks,
    Site,
    Slots,
    Transfer,
    Window,
)
from pibroch.exchange.lookahead.oracle.kernels.window.settle import settle

__all__ = [
    "HOME",
    "LRPP",
    "MAX_RANKS",
    "PARTITIONED",
    "REPLICATED",
    "Gradients",
    "Places",
    "Ranks",
    "Site",
    "Slots",
    "Transfer",
    "Window",
    "arrive",
    "close",
    "count_arrivals",
    "enter",
    "forget",
    "go_home",
    "mask_type",
    "move",
    "places_of",
    "rank_type",
    "settle",
    "split",
    "waiting_for",
    "words_for",
]
