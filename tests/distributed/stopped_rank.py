"""A rank enters a collective of three; the test stops one of them before it does."""

import sys

from pibroch.cli.console import leave_with
from pibroch.collectives import failure_detector
from pibroch.collectives.world import world_of_environment
from pibroch.errors import PibrochError

TIMEOUT_S = 2.0
failure_detector.REASON_TIMEOUT_S = failure_detector.ROLL_S = 1.0
with world_of_environment(leave_with) as world:
    world.enter(3)
    world.control.barrier()
    channel = world.ranks.patient(TIMEOUT_S).open_channel()
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        channel.barrier()
    except PibrochError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise
