"""Whether tests notice faults: one change of the source at a time, and the tests that must fail.

``python tools/mutants.py`` takes each mutant of ``tools/mutants.toml`` into a copy of the package,
runs its tests there, and says which were killed and which survived. Nothing here is changed. A
mutant that survives wants a test: write it, so that a fault like it does not get through.

Tests that fail, or take too long, kill a mutant. They have to pass without it, which is looked at
first unless ``--trust`` says that they do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from pibroch.cli.console import results, say
from pibroch.cli.progress import counted

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".toml")
PACKAGE = "src/pibroch"
TIME_LIMIT_S = 120.0
_ALL_PASSED = 0
_SOME_FAILED = 1


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one file.

    Attributes:
        name: the fault, in words.
        file: below the package.
        text: that stands there once.
        replacement: of it.
        tests: words of pytest that choose the tests which must fail.
    """

    name: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]

    def applied(self, source: str) -> str:
        """The source with the fault.

        Raises:
            ValueError: when the text does not stand there exactly once.
        """
        count = source.count(self.text)
        if count != 1 or self.replacement == self.text:
            raise ValueError(
                f"got {self.text.strip()!r} {count} times in {self.file}; need it once, and another"
                " text in its place"
            )
        return source.replace(self.text, self.replacement)


class Verdict(Enum):
    """What became of a mutant."""

    KILLED = "killed"
    TIMED_OUT = "killed, time limit"
    SURVIVED = "survived"
    NOT_APPLIED = "could not apply"
    NO_TESTS = "no verdict"

    @property
    def is_killed(self) -> bool:
        """Whether tests have noticed it."""
        return self in (Verdict.KILLED, Verdict.TIMED_OUT)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one mutant.

    Attributes:
        mutant: it.
        verdict: what became of it.
        seconds: that its tests took.
        reason: of a verdict that says nothing of the tests.
    """

    mutant: Mutant
    verdict: Verdict
    seconds: float = 0.0
    reason: str = ""


def read_mutants(path: Path = LIST) -> list[Mutant]:
    """The list.

    Raises:
        ValueError: for a file that is none, or names that are not distinct.
    """
    tables = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    mutants = [Mutant(**table | {"tests": tuple(table["tests"])}) for table in tables]
    names = [mutant.name for mutant in mutants]
    if len(set(names)) < len(names):
        raise ValueError(f"got {path} with a name twice; need distinct ones")
    return mutants


class Copy:
    """A copy of the package, in which one mutant lives at a time.

    Args:
        root: of the repository, whose tests run.
        folder: for the copy.
        time_limit_s: of the tests of a mutant.
        trusts: that tests pass without mutants.
    """

    def __init__(
        self, root: Path, folder: Path, time_limit_s: float = TIME_LIMIT_S, trusts: bool = False
    ) -> None:
        self._root = root
        self._source = folder / "src"
        self._kernels = folder / "kernels"
        self._time_limit_s = time_limit_s
        self._trusts = trusts
        # with what is compiled, which counts by a file's time and size
        shutil.copytree(root / "src", self._source)
        # which the package finds beside its source
        (folder / "recipes").symlink_to(root / "recipes")
        self._problems: dict[tuple[str, ...], str] = {}

    def outcome(self, mutant: Mutant) -> Outcome:
        """Whether a mutant's tests pass without it, and fail with it. Blocks."""
        started = time.monotonic()
        file = self._source / Path(PACKAGE).name / mutant.file
        try:
            source = mutant.applied(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return Outcome(mutant, Verdict.NOT_APPLIED, reason=str(error))
        if reason := self._problem_without(mutant.tests):
            return Outcome(mutant, Verdict.NO_TESTS, reason=reason)
        with self._written(file, source):
            code, output = self._run(mutant.tests, compiles="kernels" in Path(mutant.file).parts)
        seconds = time.monotonic() - started
        if code is None:
            return Outcome(mutant, Verdict.TIMED_OUT, seconds)
        if code in (_ALL_PASSED, _SOME_FAILED):
            return Outcome(mutant, Verdict.SURVIVED if code == 0 else Verdict.KILLED, seconds)
        return Outcome(mutant, Verdict.NO_TESTS, seconds, _last_line(output))

    def _problem_without(self, tests: tuple[str, ...]) -> str:
        """Why tests say nothing of mutants; empty where they pass."""
        if not self._trusts and tests not in self._problems:
            code, output = self._run(tests)
            is_passed = code == _ALL_PASSED
            self._problems[tests] = "" if is_passed else f"without it: {_last_line(output)}"
        return self._problems.get(tests, "")

    @contextmanager
    def _written(self, file: Path, source: str) -> Iterator[None]:
        """A file with other text; the old one has its old time again, as caches go by it."""
        before = file.read_bytes()
        status = file.stat()
        file.write_text(source, encoding="utf-8")
        try:
            yield
        finally:
            file.write_bytes(before)
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    def _run(self, tests: Sequence[str], compiles: bool = False) -> tuple[int | None, str]:
        """The exit code of pytest, ``None`` beyond the time limit, and what it says."""
        path = os.pathsep.join([str(self._source), os.environ.get("PYTHONPATH", "")])
        environment = {
            **os.environ,
            "PYTHONPATH": path.rstrip(os.pathsep),
            # it counts by a file's size and second: the next mutant may have both of the last one
            "PYTHONDONTWRITEBYTECODE": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self._source.parent / "hypothesis"),
        }
        if compiles:
            # numba looks at the file of a kernel alone, not at those of kernels that it calls
            environment["NUMBA_CACHE_DIR"] = str(self._kernels)
            shutil.rmtree(self._kernels, ignore_errors=True)
        options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=self._root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self._time_limit_s)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            if process.poll() is None:  # with all that the tests have started
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        return process.returncode, output


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def run(
    mutants: Sequence[Mutant],
    root: Path = ROOT,
    time_limit_s: float = TIME_LIMIT_S,
    trusts: bool = False,
    tell: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """The outcome of each mutant, one after the other; ``tell`` gets each at once."""
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(root, Path(folder), time_limit_s, trusts)
        for mutant in mutants:
            outcomes.append(copy.outcome(mutant))
            tell(outcomes[-1])
    return outcomes


def show(outcomes: Sequence[Outcome]) -> None:
    """Print a table of them, those that tests did not notice last."""
    table = Table("mutant", "file", "verdict", "seconds")
    for each in sorted(outcomes, key=lambda each: not each.verdict.is_killed):
        verdict = each.verdict.value + (f": {each.reason}" if each.reason else "")
        row = (each.mutant.name, each.mutant.file, verdict, f"{each.seconds:.0f}")
        style = None if each.verdict.is_killed else "bold red"
        table.add_row(*map(escape, row), style=style)
    results.print(table)
    num_killed = sum(each.verdict.is_killed for each in outcomes)
    results.print(f"{num_killed} of {len(outcomes)} mutants killed")


def main() -> None:
    """Run what is asked for; exit with 1 unless all of it was killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the mutants, and run none")
    parser.add_argument("--only", metavar="NAME", help="those whose name or file has this in it")
    parser.add_argument(
        "--time-limit", type=float, default=TIME_LIMIT_S, metavar="SECONDS", help="of each one"
    )
    parser.add_argument(
        "--trust", action="store_true", help="that the tests pass without mutants: half the time"
    )
    wanted = parser.parse_args()
    part = (wanted.only or "").lower()
    mutants = [
        mutant
        for mutant in read_mutants()
        if part in mutant.name.lower() or part in mutant.file.lower()
    ]
    if not mutants:
        sys.exit(f"got --only {wanted.only!r}; need a part of a name that --list prints")
    if wanted.list:
        for mutant in mutants:
            results.print(f"{mutant.name}: {mutant.file}", markup=False, soft_wrap=True)
        return
    with counted(len(mutants), "mutants") as advance:

        def tell(outcome: Outcome) -> None:
            advance(1)
            if not outcome.verdict.is_killed:
                say(f"{outcome.verdict.value}: {outcome.mutant.name} {outcome.reason}".rstrip())

        outcomes = run(mutants, ROOT, wanted.time_limit, wanted.trust, tell)
    show(outcomes)
    if not all(outcome.verdict.is_killed for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
