"""``python -m benchmarks.lab up | down | run``.

Hosts on this machine, see the README beside this file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.lab.lab import Lab, RunResult
from benchmarks.lab.network import Network, standing_labs, sweep
from pibroch.errors import ConfigError, PibrochError


def main() -> int:
    """Carry out one command; returns the exit code."""
    arguments = _parser().parse_args()
    try:
        code: int = arguments.do(arguments)
    except PibrochError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return code


def _up(arguments: argparse.Namespace) -> int:
    sweep()
    network = Network.build(arguments.hosts, arguments.rate, is_standing=True)
    print(network.name)
    for index in range(network.num_hosts):
        print(
            f"host {index}: {network.address(index)}, ip netns exec {network.host(index)} COMMAND",
            file=sys.stderr,
        )
    return 0


def _down(arguments: argparse.Namespace) -> int:
    sweep()
    for name in arguments.names or standing_labs():
        Network.find(name).remove()
        print(f"removed {name}", file=sys.stderr)
    return 0


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.command:
        raise ConfigError("no command", "one after --", "e.g. run --hosts 2 -- python train.py")
    if arguments.lab and (arguments.hosts or arguments.rate):
        raise ConfigError("--lab with --hosts or --rate", "a standing lab as it is, or a new one")
    hosts = Network.find(arguments.lab) if arguments.lab else arguments.hosts or 2
    with Lab(hosts, arguments.ranks_per_host, arguments.rate, arguments.threads) as lab:
        result = lab.run(arguments.command, None, arguments.timeout, arguments.logs, _say)
    _report(result)
    return 0


def _say(rank: int, line: str) -> None:
    print(f"[{rank}] {line}", flush=True)


def _report(result: RunResult) -> None:
    for index, link in enumerate(result.links):
        print(
            f"host {index}: {link.sent:,} bytes sent, {link.received:,} received", file=sys.stderr
        )
    result.check()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="make a standing lab; prints its name")
    up.add_argument("--hosts", type=int, default=2)
    up.add_argument("--rate", help="of each link, e.g. 200mbit; absent: no limit")
    up.set_defaults(do=_up)
    down = commands.add_parser("down", help="remove standing labs")
    down.add_argument("names", nargs="*", metavar="NAME", help="which; absent: all of them")
    down.set_defaults(do=_down)
    run = commands.add_parser(
        "run", help="run a command once per rank, in a lab of its own unless --lab says otherwise"
    )
    run.add_argument("--lab", metavar="NAME", help="a standing lab")
    run.add_argument("--hosts", type=int, help="2 when absent")
    run.add_argument("--ranks-per-host", type=int, default=1)
    run.add_argument("--rate", help="of each link, e.g. 200mbit; absent: no limit")
    run.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of each rank")
    run.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS")
    run.add_argument(
        "--logs", type=Path, metavar="DIR", help="keep each rank's output there as rankR.log"
    )
    run.add_argument("command", nargs="*", metavar="-- COMMAND")
    run.set_defaults(do=_run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
