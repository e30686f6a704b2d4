"""`pibroch` whose ranks are forked from it instead of started anew: real processes, but without seconds of imports each."""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

PR_SET_NAME = 15


class Rank:
    """What ``subprocess.Popen`` would be to the launcher."""

    def __init__(self, command, env, stdin):
        sys.stdout.flush()
        sys.stderr.flush()
        self._process = multiprocessing.get_context("fork").Process(target=become, args=(command, env))
        self._process.start()

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout_s):
        self._process.join(timeout_s)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("a rank", timeout_s)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self._process.pid, number)


def become(command, env):
    """This process is from now on one rank; the tests find it by the name that it gets."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ |= env
    ctypes.CDLL(None).prctl(PR_SET_NAME, f"rank {env['RANK']}".encode(), 0, 0, 0)
    sys.argv = command[1:]
    for name in [name for name in sys.modules if name.startswith("pibroch.cli")]:
        del sys.modules[name]
    from pibroch.cli.main import main

    main()


if __name__ == "__main__":
    os.setsid()
    from pibroch.cli import launch
    from pibroch.cli.main import main

    launch.subprocess = SimpleNamespace(
        Popen=Rank, TimeoutExpired=subprocess.TimeoutExpired, DEVNULL=subprocess.DEVNULL
    )
    main()
