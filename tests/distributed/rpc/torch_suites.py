"""Run torch's own RPC suites with ``pibroch.rpc`` in place of torch's.

From the wheel, with their text as it is. All of them take three minutes; parts of names choose.

    PYTHONPATH=src python tests/distributed/rpc/torch_suites.py
    PYTHONPATH=src python tests/distributed/rpc/torch_suites.py RpcTest.test_add ...

Each test gets processes of its own, one a worker, forked from one that has loaded everything. Which
tests do not pass, and why, is listed in torch_tests.md; one that fails and is not listed there is
an error.
"""

import argparse
import contextlib
import io
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import unittest
from dataclasses import dataclass
from pathlib import Path

import torch_names

SUITES = {
    "RpcTest": "rpc_test",
    "TensorPipeAgentRpcTest": "rpc_test",
    "CudaRpcTest": "rpc_test",
    "DistAutogradTest": "dist_autograd_test",
    "TensorPipeAgentDistAutogradTest": "dist_autograd_test",
    "CudaDistAutogradTest": "dist_autograd_test",
    "TensorPipeCudaDistAutogradTest": "dist_autograd_test",
    "DistOptimizerTest": "dist_optimizer_test",
    "ParameterServerTest": "parameter_server_test",
    "ReinforcementLearningRpcTest": "reinforcement_learning_rpc_test",
    "RemoteModuleTest": "remote_module_test",
    "ThreeWorkersRemoteModuleTest": "remote_module_test",
    "FaultyAgentRpcTest": "faulty_agent_rpc_test",
    "FaultyAgentDistAutogradTest": "dist_autograd_test",
}
LISTED = Path(__file__).with_name("torch_tests.md")
TIMEOUT_S = 60  # of a test
GRACE_S = 2.0  # for the others, when one worker of a test has failed
SKIPPED = 77
FAILED = 1


@dataclass
class Outcome:
    """The outcome of a test, and what its workers printed.

    ``passed``, ``skipped``, ``failed`` or ``late``.
    """

    name: str
    status: str
    text: str
    seconds: float


def case_class(modules, suite):
    """The suite's class with what stands for torch's fixture and its spawning of processes."""
    from torch.testing._internal.common_utils import TestCase

    base = getattr(modules[SUITES[suite]], suite)

    class Case(base, TestCase):
        def __init__(self, name, rank, file_name):
            super().__init__(name)
            self.rank = rank
            self.file_name = file_name

        @property
        def rpc_backend(self):
            import torch.distributed.rpc as rpc

            return rpc.BackendType.TENSORPIPE

        @property
        def rpc_backend_options(self):
            import torch.distributed.rpc as rpc

            return rpc.TensorPipeRpcBackendOptions(init_method=self.init_method)

        def get_shutdown_error_regex(self):
            return "lost"

        def get_timeout_error_regex(self):
            return "timeout|within"

        def __reduce__(self):  # bound methods of a test travel as pickles
            return make_case, (suite, self._testMethodName, self.rank, self.file_name)

    return Case


_classes: dict = {}


def make_case(suite, name, rank, file_name):
    return _classes[suite](name, rank, file_name)


def names_of_tests():
    for suite, module in SUITES.items():
        for name in dir(getattr(_modules[module], suite)):
            if name.startswith("test_"):
                yield f"{suite}.{name}"


def listed_differences():
    """The tests of which the page says why they do not pass."""
    _, _, section = LISTED.read_text().partition("## Torch's own tests")
    return {
        f"{suite}.test_{name}"
        for suite, names in re.findall(r"(\w+Test): ([\w, ]+)", section)
        for name in names.strip().split(", ")
    }


def run_worker(suite, name, rank, file_name):
    """The exit code of one worker of a test."""
    import torch

    torch.set_num_threads(1)
    case = make_case(suite, name, rank, file_name)
    try:
        getattr(case, name)()
    except unittest.SkipTest as skip:
        print(f"skipped: {skip}")
        return SKIPPED
    except SystemExit as end:  # the suites' own way to skip
        print(f"skipped: exit code {end.code}")
        return SKIPPED if end.code else 0
    except BaseException:
        traceback.print_exc()
        return FAILED
    return 0


def start_worker(suite, name, rank, folder):
    """A forked worker's process id; what it says goes into a file."""
    pid = os.fork()
    if pid:
        return pid
    code = FAILED
    try:
        os.setsid()
        output = os.open(folder / f"out{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        import faulthandler

        faulthandler.dump_traceback_later(TIMEOUT_S - 3, file=sys.stderr)
        code = run_worker(suite, name, rank, str(folder / "meeting"))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_test(test, timeout_s=TIMEOUT_S):
    """Run ``Suite.test_name`` with its workers."""
    suite, _, name = test.partition(".")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        size = make_case(suite, name, 0, "").world_size
        pids = {start_worker(suite, name, rank, folder): rank for rank in range(size)}
        codes, is_late = wait_for(pids, began + timeout_s)
        text = "\n".join(
            f"--- {rank}\n{(folder / f'out{rank}').read_text(errors='replace')}"
            for rank in range(size)
        )
    if is_late:
        status = "late"
    elif any(code not in (0, SKIPPED) for code in codes.values()):
        status = "failed"
    else:
        status = "skipped" if SKIPPED in codes.values() else "passed"
    return Outcome(test, status, text, time.monotonic() - began)


def wait_for(pids, deadline):
    """Exit codes by rank, and whether it took too long.

    Then all are killed, and soon after one of them has failed.
    """
    codes = {}
    left = dict(pids)
    while left and time.monotonic() < deadline:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[left.pop(pid)] = os.waitstatus_to_exitcode(status)
                if codes and set(codes.values()) - {0, SKIPPED}:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.01)
    is_late = bool(left) and not set(codes.values()) - {0, SKIPPED}
    for pid, rank in left.items():
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        codes[rank] = -signal.SIGKILL
    return codes, is_late


def prepare():
    """Load everything, once in a process that has no other threads."""
    global _modules
    torch_names.install()
    with contextlib.redirect_stderr(io.StringIO()):
        _modules = torch_names.load()
    for suite in SUITES:
        _classes[suite] = case_class(_modules, suite)


def run_share(tests, log, verbose):
    """Run tests one after another.

    An exit code: whether one failed of which the guide does not say so.
    """
    is_bad = False
    listed = listed_differences()
    for test in tests:
        outcome = run_test(test)
        is_bad |= outcome.status != "passed" and test not in listed
        print(
            f"{outcome.status:8}{outcome.seconds:6.1f} s  {test}{', as listed' * (test in listed)}",
            flush=True,
        )
        if outcome.status != "passed":
            if verbose:
                print(outcome.text, flush=True)
            if log:
                with log.open("a") as file:
                    file.write(f"\n======== {outcome.status} {test}\n{outcome.text}")
    return int(is_bad)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="*", help="parts of names; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    parser.add_argument(
        "--every",
        type=int,
        default=0,
        metavar="N",
        help="those that are named, and each Nth of all; as far as they are to pass",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="show what the workers of failed tests said"
    )
    parser.add_argument("--log", type=Path, help="add what the workers of failed tests said there")
    given = parser.parse_args()
    prepare()
    everything = list(names_of_tests())
    tests = [
        test for test in everything if not given.tests or any(part in test for part in given.tests)
    ]
    if given.every:
        to_pass = sorted(set(everything) - listed_differences())
        tests = sorted(
            {*to_pass[:: given.every], *(set(tests if given.tests else []) & set(to_pass))}
        )
    pids = []
    for job in range(given.jobs):
        pid = os.fork()
        if pid == 0:
            os._exit(run_share(tests[job :: given.jobs], given.log, given.verbose))
        pids.append(pid)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))


if __name__ == "__main__":
    main()
