"""What a trainer sees of a central oracle that is lost."""

import os
import signal

from pibroch.collectives.task_thread import TaskThread
from pibroch.errors import PibrochError
from pibroch.exchange.lookahead import remote_planner
from pibroch.servers import ORACLE_NAME, join, leave


def problem_of_loss(channel, rendezvous, oracle):
    """What a request ends with whose oracle is killed, when nobody takes its place."""
    remote_planner.COME_BACK_S = 0.5
    join(rendezvous, 0, 0, with_oracle=True)
    try:
        settings = [[[0, 10]], [10], 1, 1, "lrpp", True]
        thread = TaskThread("pibroch-planner")
        planner = remote_planner.RemotePlanner(
            thread, ORACLE_NAME, channel, settings, lambda purpose, size: None
        )
        opening = planner.open(1, 1)
        os.kill(oracle, signal.SIGKILL)
        opening.result(60)
    except PibrochError as error:
        return type(error).__name__, str(error), error.is_loss
    finally:
        leave()
