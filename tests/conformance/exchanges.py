"""The exchanges that are held to the contract.

All that are registered, and that of ``examples/own_exchange.py``.
"""

import runpy
from pathlib import Path

from pibroch.config.exchange import exchanges, find_exchange

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_exchange.py"
runpy.run_path(str(EXAMPLE))  # registers its own

EXCHANGES = list(exchanges())
OF_SEVERAL_RANKS = [name for name, spec in exchanges().items() if spec.most_ranks is None]
MIXTURES = {
    "mixed": {"a": "replicated", "b": "table_wise", "c": "column_wise"},
    "halves": {"a": "column_wise", "b": "table_wise_pooled", "": "row_wise"},
}


HOSTS = {"towers": {"ranks_per_host": 1}}
"""Of exchanges that behave differently over several: here each rank is one."""
SOME = {"towers": ("halves",)}
"""Of an exchange that moves rows by another's lanes; ``test_tower_exchange.py`` has more."""


def placements_of(name):
    """By words: what an exchange can be told about where rows lie.

    One that cannot be told anything has one way.
    """
    kinds = find_exchange(name).placements
    if name in SOME:
        return {words: MIXTURES[words] for words in SOME[name]}
    mixtures = {
        words: mixture for words, mixture in MIXTURES.items() if set(mixture.values()) <= set(kinds)
    }
    return {kind: kind for kind in kinds} | mixtures or {"its own": None}


FEW = {"retrieve": ("row_wise", "mixed")}
"""Placements of exchanges whose lanes are another's, which is held to the contract under all."""
CASES = [
    (name, words)
    for name in OF_SEVERAL_RANKS
    if name != "auto"
    for words in placements_of(name)
    if words in FEW.get(name, (words,))
]


def options_of(name, words, tables):
    """The options that such a placement takes, for these tables."""
    placement = placements_of(name)[words]
    if isinstance(placement, dict):
        names = {table.name for table in tables}
        placement = {
            table: kind for table, kind in placement.items() if table in names or not table
        }
    return (
        {"exchange": name}
        | HOSTS.get(name, {})
        | ({} if placement is None else {"placement": placement})
    )


def takes(name, option):
    """Whether an exchange has an option."""
    return option in find_exchange(name).section.model_fields
