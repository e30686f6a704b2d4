"""Tests that failed are tried once more, alone, and those that pass then are counted and named.

A loaded machine may make a test of real processes fail now and then, which should stop nobody; more
than a few are a fault, of the tests or of what they test.
"""

import subprocess
import sys

import pytest

MOST_FAILED = 20  # more is no chance: nothing is tried again
RETRIED = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--most-retried",
        type=int,
        metavar="N",
        help="try what fails once more; fail when more than N tests pass only then",
    )


@pytest.hookimpl(trylast=True)  # after the cache knows what failed
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if config.option.most_retried is None or hasattr(config, "workerinput") or not reporter:
        return
    if session.exitstatus != pytest.ExitCode.TESTS_FAILED:
        return
    reports = [*reporter.stats.get("failed", ()), *reporter.stats.get("error", ())]
    failed = list(dict.fromkeys(report.nodeid for report in reports))
    if len(failed) > MOST_FAILED:
        return
    reporter.write_line(f"\ntrying {len(failed)} again")
    options = ["--rootdir", str(config.rootpath), "--tb", "short"]
    if config.inipath:
        options += ["-c", str(config.inipath)]
    again = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *failed], cwd=config.rootpath, check=False
    )
    still = config.cache.get("cache/lastfailed", {})
    passed = [name for name in failed if name not in still]
    config.stash[RETRIED] = passed
    if again.returncode == 0 and len(passed) <= config.option.most_retried:
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    passed = config.stash.get(RETRIED, [])
    if passed:
        terminalreporter.write_line(f"retried: {len(passed)} ({', '.join(passed)})")
    if len(passed) > (config.option.most_retried or 0):
        terminalreporter.write_line(
            f"got {len(passed)} tests that passed only when tried again, need at most"
            f" {config.option.most_retried}: find what makes them fail",
            red=True,
        )
