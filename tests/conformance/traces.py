"""What each exchange does in which order, to the last byte, and the file that keeps it.

``--write`` makes ``traces.json`` anew, ``--show CASE`` prints all events of a case, to be compared
with those of another version; both with
``PYTHONPATH=src:tests:tests/conformance:tests/distributed python tests/conformance/traces.py``.

Sizes are the same on all processors. Bits are not, see note 0009: checksums are compared where
kernels are compiled for what they were compiled for when the file was written.
"""

import argparse
import json
from pathlib import Path
from typing import Any
from zlib import crc32

import recorder

import pibroch as pb
from cases import SHAPES
from pibroch.kernels.target import compile_target
from row_plans import random_plan

FILE = Path(__file__).parents[1] / "golden" / "traces.json"
AHEAD = {"exchange": "lookahead", "lookahead": 5}
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "evaluation": {"evaluates": True},
    "dropped steps": {"drops": True},
    "a feed left": {"breaks": True},
    "rows looked at": {"looks": True},
    "a second lookup": {"twice": True},
}
EXCHANGES: dict[str, dict[str, Any]] = {
    "alltoall": {"exchange": "alltoall"},
    "lookahead": AHEAD,
    "retrieve": {"exchange": "retrieve"},
    "towers": {"exchange": "towers", "ranks_per_host": 1},
}
RAW = pb.Hashed(admit=pb.AfterCount(2), expire_after=9)


def _trained(size, **options):
    return size, "traced_cases", "train", (), options


RUNS = {
    "goes on": ["train.evaluate_every=20"],
    "several passes": ["train.accumulate=3", "model.batch_norm=false"],
    "assigned": ["embedding.exchange.assign=rows"],
    "data processors": ["data.processors=2"],
}
"""Settings of runs of `pibroch train`."""


CASES = (
    {
        f"{exchange}, {how}": _trained(2 + number % 2, **options, **more)
        for exchange, options in EXCHANGES.items()
        for number, (how, more) in enumerate(HOW.items())
    }
    | {
        "alltoall, alone": _trained(1, exchange="alltoall"),
        "alltoall, four ranks, columns": _trained(4, exchange="alltoall", placement="column_wise"),
        "alltoall, any tables": _trained(3, exchange="alltoall", shape="any", name="adam"),
        "alltoall, compressed": _trained(2, exchange="alltoall", wire="bfloat16", compress=True),
        "lookahead, alone": _trained(1, **AHEAD),
        "lookahead, four ranks": _trained(4, **AHEAD, evaluates=True, drops=True),
        "lookahead, tight": _trained(3, **AHEAD, cache_rows=60),
        "lookahead, one step ahead": _trained(2, exchange="lookahead", lookahead=1),
        "lookahead, far": _trained(2, exchange="lookahead", lookahead=200),
        "lookahead, partitioned": _trained(3, **AHEAD, cache="partitioned"),
        "lookahead, replicated": _trained(2, **AHEAD, cache="replicated", delayed_sync=False),
        "lookahead, any tables": _trained(2, **AHEAD, shape="any", name="adam"),
        "lookahead, compressed": _trained(2, **AHEAD, compress=True),
        "lookahead, servers": _trained(2, **AHEAD, evaluates=True, servers=2),
        "lookahead, central oracle": _trained(2, **AHEAD, evaluates=True, servers=0, central=True),
        "lookahead, servers and central oracle": _trained(
            2, **AHEAD, breaks=True, servers=2, central=True
        ),
        "towers, 2 x 2": _trained(4, exchange="towers", ranks_per_host=2),
        "towers, modules": (
            4,
            "tower_cases",
            "train",
            (30, "tower_dlrm"),
            {"exchange": "towers", "ranks_per_host": 2},
        ),
        "retrieve, two hosts": _trained(4, exchange="retrieve", hosts=[0, 0, 1, 1]),
    }
    | {
        f"{exchange}, raw ids": (2, "raw_id_cases", "train", (RAW,), options)
        for exchange, options in EXCHANGES.items()
        if exchange != "towers"
    }
    | {
        f"{exchange}, rows that move": (
            2,
            "movement_cases",
            "train_and_move",
            (
                "adam",
                "odd_dims",
                [random_plan(SHAPES["odd_dims"], 2, seed, copies=True) for seed in (7, 11)],
            ),
            {"at": (1, 9), "rows_per_step": 120, **options},
        )
        for exchange, options in EXCHANGES.items()
        if exchange in ("alltoall", "retrieve")
    }
    | {
        "lookahead, rows that move": (
            2,
            "movement_cases",
            "look_ahead_and_move",
            (
                "adam",
                "odd_dims",
                [random_plan(SHAPES["odd_dims"], 2, seed, copies=False) for seed in (7, 11)],
                (3, 20),
                120,
                False,
            ),
            {"lookahead": 5},
        ),
    }
    | {
        f"{exchange}, two at a time": (3, "traced_cases", "train_by_twos", (), options)
        for exchange, options in EXCHANGES.items()
    }
    | {
        f"{exchange}, a run, {how}": (
            2 + number % 2,
            "traced_cases",
            "train_and_go_on",
            (f"embedding.exchange={exchange}", *settings),
            {"processors": True} if how == "data processors" else {},
        )
        for exchange in ("alltoall", "lookahead")
        for number, (how, settings) in enumerate(RUNS.items())
    }
)
"""By name: number of ranks, module and function of the case, its arguments and options."""


def record(case, worlds, rendezvous, processors):
    """Of each rank the events of each thread.

    Args:
        case: its name.
        worlds: of ranks.
        rendezvous: of embedding servers and a central oracle.
        processors: where two data processors meet.
    """
    size, module, function, arguments, options = CASES[case]
    if options.get("processors"):
        return worlds(size).run(
            recorder.run, module, function, *arguments, f"data.rendezvous='{processors}'"
        )
    if "servers" in options:
        options = {name: value for name, value in options.items() if name != "exchange"}
        options["rendezvous"] = rendezvous
    return worlds(size).run(recorder.run, module, function, *arguments, **options)


def sums_of(ranks):
    """Of each rank and thread: number of events, checksum of their order and sizes, of all."""
    return [
        {
            thread: [
                len(events),
                crc32(repr([(what, sizes) for what, sizes, _ in events]).encode()),
                crc32(repr(events).encode()),
            ]
            for thread, events in sorted(threads.items())
        }
        for threads in ranks
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="make the file anew")
    parser.add_argument("--show", metavar="CASE", choices=CASES, help="print all of its events")
    chosen = parser.parse_args()

    from role_team import RoleTeam
    from world import Worlds

    from pibroch import processors
    from pibroch.servers import serve, serve_plans

    worlds = Worlds()
    servers = RoleTeam(3, serve)
    oracle = RoleTeam(1, serve_plans, servers.rendezvous)
    makers = RoleTeam(2, processors.serve)
    there = (worlds, servers.rendezvous, makers.rendezvous)
    try:
        if chosen.show:
            for rank, threads in enumerate(record(chosen.show, *there)):
                for thread, events in sorted(threads.items()):
                    for event in events:
                        print(rank, thread, *event)
        if chosen.write:
            cases = {case: sums_of(record(case, *there)) for case in CASES}
            FILE.write_text(
                json.dumps({"target": compile_target(), "cases": cases}, indent=1) + "\n"
            )
    finally:
        makers.close()
        oracle.close()
        servers.close()
        worlds.close()


if __name__ == "__main__":
    main()
