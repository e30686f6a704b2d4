"""A search over a recipe's settings: trials of which each is a run, chosen on validation alone.

A trial is a choice of settings. It is trained once for each seed, and worth the mean of the best
models' figures on the validation split. Runs leave the test split alone. What to try next is
Optuna's choice (Akiba et al., KDD 2019; tree-structured Parzen estimator).
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

from pibroch.config import RunConfig
from pibroch.config.differences import settings
from pibroch.config.origins import resolve
from pibroch.config.recipes import load_recipe
from pibroch.config.toml import to_toml
from pibroch.data import EncodedDataset
from pibroch.errors import ConfigError, TrainingError
from pibroch.launch.child import STOPPED
from pibroch.observability import plots
from pibroch.observability.records import UNWEIGHTED
from pibroch.observability.report import shown_figure, write_page
from pibroch.observability.run_files import read_run
from pibroch.process import LAUNCHER, num_processors
from pibroch.storage import new_file, storage_errors
from pibroch.train.monitored import is_lower_better, monitored
from pibroch.train.run_directory import RunDirectory

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.study import Study

FAILURES = 5
"""So many trials that fail before one has succeeded end a search."""
END_S = 20.0
"""How long runs have to end when the search is interrupted."""
_RANDOM_TRIALS = 10
_RANGE = {"low", "high", "log", "step"}
_OURS = {"seed": "--seeds", "train.evaluate_test": "nothing: no trial reads the test split"}


@dataclass(frozen=True, slots=True)
class Trial:
    """One choice of settings.

    Attributes:
        number: from 1 on.
        settings: by key with dots.
        figures: on the validation split, one a seed; empty while it is not done, or when it failed.
        problem: why it failed; empty otherwise.
        seconds: that its runs took.
        was_killed: whether a signal ended it, as where memory runs out: that says nothing of its
            settings, so it is open again when the search goes on.
    """

    number: int
    settings: Mapping[str, Any]
    figures: tuple[float, ...] = ()
    problem: str = ""
    seconds: float = 0.0
    was_killed: bool = False

    @property
    def is_open(self) -> bool:
        """Whether it was begun, and has no result."""
        return not self.figures and not self.problem

    @property
    def value(self) -> float:
        """The mean over the seeds."""
        return statistics.fmean(self.figures)


def read_space(path: Path) -> dict[str, BaseDistribution]:
    """What may be chosen for each setting, from TOML in the shape of a recipe.

    A list holds choices, ``{low = 1e-4, high = 1e-1, log = true}`` is a range of numbers, with
    ``step`` one of every so many-th.

    Raises:
        ConfigError: for a file or an entry that is none of these.
    """
    import tomllib

    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--space {path}: {error}", "a TOML file in the shape of a recipe"
        ) from error
    space = {key: _distribution(key, said) for key, said in _leaves(tables, "")}
    if not space:
        raise ConfigError(f"--space {path}, which is empty", "settings with what to choose from")
    return space


def check_validation(config: RunConfig) -> None:
    """Open a run's data and look whether their validation split says which model is best.

    Raises:
        DataError: for data that cannot be opened.
        ConfigError: without validation samples, or where all their labels are alike and AUC, which
            they do not define, is to choose.
    """
    from pibroch.data.health import click_rates
    from pibroch.train.data_source import open_dataset

    dataset = open_dataset(config.data)
    if not dataset.samples["validation"]:
        raise ConfigError(
            f"no validation samples in {dataset.path}",
            "a validation split, on which a search goes by",
            "prepare the data with --split time:0.8/0.1/0.1, or with --validation FILE",
        )
    label, figure = monitored(config.train.monitor, dataset.schema)
    rate = click_rates(dataset, ["validation"]).get(label, {}).get("validation")
    if figure.removesuffix(UNWEIGHTED) == "auc" and rate in (0.0, 1.0):
        raise ConfigError(
            f"validation labels that are all {rate:.0f} in {dataset.path}, by which AUC is not"
            " defined",
            "a figure that says which model is best",
            "pass --set train.monitor=logloss",
        )


def _contents(configs: Sequence[RunConfig]) -> dict[str, object]:
    """Digests of the data, and of all other files that settings name."""
    folders = dict.fromkeys(config.data.dir for config in configs if config.data.dir is not None)
    files = {}
    for config in configs:
        for key, value in settings(config.model_dump(mode="json")).items():
            if isinstance(value, str) and Path(value).is_file():
                with open(value, "rb") as file:
                    files[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return {"data": [EncodedDataset.open(folder).digest for folder in folders], "files": files}


def _leaves(tables: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        if isinstance(value, Mapping) and not ({"low", "high"} & value.keys()):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _distribution(key: str, said: Any) -> BaseDistribution:
    distributions = need_optuna().distributions
    if key in _OURS:
        raise ConfigError(f"`{key}` in a space", "other settings", f"use {_OURS[key]}")
    if isinstance(said, list) and said:
        choices: BaseDistribution = distributions.CategoricalDistribution(
            [json.dumps(each) for each in said]
        )
        return choices
    shape = "a list of choices, or {low = ..., high = ...} with `log = true` or `step` if need be"
    if not isinstance(said, Mapping) or not {"low", "high"} <= said.keys() <= _RANGE:
        raise ConfigError(f"`{key} = {said!r}` in a space", shape)
    numbers = [value for name, value in said.items() if name != "log"]
    if not all(map(_is_number, numbers)):
        raise ConfigError(f"`{key} = {said!r}` in a space", "numbers")
    are_whole = all(isinstance(value, int) for value in numbers)
    kind: type[BaseDistribution] = (
        distributions.IntDistribution if are_whole else distributions.FloatDistribution
    )
    try:
        return kind(**said)
    except ValueError as error:
        raise ConfigError(f"`{key} = {said!r}` in a space", str(error)) from error


def need_optuna() -> Any:
    """The package, which is silent.

    Raises:
        ConfigError: where it is not installed.
    """
    try:
        import optuna
    except ModuleNotFoundError:
        raise ConfigError(
            "a search without optuna", "the extra `search`", "pip install 'pibroch[search]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


@dataclass
class Search:
    """A search in a folder; given again it goes on, and repeats no trial that is done.

    Args:
        recipe: name or file.
        overrides: ``KEY=VALUE``, of all trials.
        space: see :func:`read_space`.
        seeds: runs a trial, by as many seeds from the recipe's on.
        folder: ``trials/`` with a file a trial, ``runs/`` with a run for each seed of each.
        parallel: processes at a time.

    Raises:
        ConfigError: when a value of the space is none of the recipe's, or the folder holds another
            search: of other settings, whatever the recipe is called.
    """

    recipe: str
    overrides: Sequence[str]
    space: Mapping[str, BaseDistribution]
    seeds: int
    folder: Path
    parallel: int = 1
    trials: dict[int, Trial] = field(default_factory=dict)
    _configs: list[RunConfig] = field(init=False)
    _stop: Event = field(default_factory=Event)
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        config = load_recipe(self.recipe, self.overrides)
        self._configs = [] if any(key.startswith("data.") for key in self.space) else [config]
        for key, distribution in self.space.items():
            for value in _extremes(distribution):
                change = f"{key}={_spelled(distribution, value)}"
                changed = load_recipe(self.recipe, [*self.overrides, change])
                if key.startswith("data."):
                    self._configs.append(changed)
        self.monitor = config.train.monitor
        self.first_seed = config.seed
        self.threads = config.train.threads
        self._check_folder(config)
        for path in sorted((self.folder / "trials").glob("*.json")):
            said = _read(path)
            trial = Trial(**said | {"figures": tuple(said["figures"])})
            if trial.was_killed:
                trial = replace(trial, problem="", was_killed=False)
            self.trials[trial.number] = trial

    @property
    def is_lower_better(self) -> bool:
        """Whether the figure is a loss."""
        return is_lower_better(self.monitor.rpartition(":")[2])

    @property
    def done(self) -> list[Trial]:
        """Trials with a result, the best one first."""
        done = [trial for trial in self.trials.values() if trial.figures]
        sign = 1.0 if self.is_lower_better else -1.0
        return sorted(done, key=lambda trial: (sign * trial.value, trial.number))

    @property
    def num_over(self) -> int:
        """Trials that are done or failed."""
        return sum(not trial.is_open for trial in self.trials.values())

    def _check_folder(self, config: RunConfig) -> None:
        about = {
            "settings": settings(config.model_dump(mode="json", exclude={"data": {"dir"}})),
            "seeds": self.seeds,
            "space": {key: repr(each) for key, each in self.space.items()},
        }
        self._must_be_same("search.json", about)
        with storage_errors(self.folder):
            (self.folder / "trials").mkdir(parents=True, exist_ok=True)
            (self.folder / "runs").mkdir(exist_ok=True)

    def _must_be_same(self, name: str, about: Mapping[str, Any]) -> None:
        """Keep what decides the figures of trials; refuse to go on with other such.

        Raises:
            ConfigError: says what differs.
        """
        path = self.folder / name
        if not path.exists():
            with storage_errors(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
            self._write(name, about)
            return
        before = _read(path)
        for key, now in about.items():
            if (then := before.get(key)) == now:
                continue
            if key == "settings" and isinstance(then, dict):
                changed = [each for each in {**then, **now} if then.get(each) != now.get(each)]
                then = then.get(changed[0])
                key = f"`{changed[0]}` in its settings"
            raise ConfigError(
                f"another {key} than the search in {self.folder} has",
                str(then)[:300],
                "pass another --out",
            )

    def _write(self, name: str, content: object) -> None:
        with new_file(self.folder / name) as file:
            file.write_text(json.dumps(content, indent=1), "utf-8")

    def run(self, num_trials: int, say: Callable[[Trial], None]) -> None:
        """Make trials until there are so many.

        Args:
            num_trials: those of earlier calls included.
            say: told of each trial that is over.

        Raises:
            TrainingError: when the first few fail all.
            ConfigError: while another search goes on in the folder; before the first trial, for
                data whose validation split does not say which model is best.
            DataError: likewise, for data that cannot be opened.
        """
        if not self.done:
            for config in self._configs:
                check_validation(config)
        self._must_be_same("contents.json", _contents(self._configs))
        claimed = RunDirectory(self.folder)
        claimed.claim()
        study = self._study()
        left = [trial for trial in self.trials.values() if trial.is_open]
        asked: dict[Future[Trial], Any] = {}
        with ThreadPoolExecutor(self.parallel, "pibroch-search") as threads:
            try:
                while asked or left or len(self.trials) < num_trials:
                    while len(asked) < self.parallel and (left or len(self.trials) < num_trials):
                        trial, of_study = self._next(study, left)
                        asked[threads.submit(self._train, trial)] = of_study
                    for future in wait(asked, return_when=FIRST_COMPLETED).done:
                        trial = future.result()
                        self._take(trial, study, asked.pop(future))
                        say(trial)
            finally:
                self._end_runs()

    def _study(self) -> Study:
        optuna = need_optuna()
        sampler = optuna.samplers.TPESampler(
            seed=self.num_over, n_startup_trials=_RANDOM_TRIALS, constant_liar=self.parallel > 1
        )
        direction = "minimize" if self.is_lower_better else "maximize"
        study: Study = optuna.create_study(sampler=sampler, direction=direction)
        for trial in sorted(self.trials.values(), key=lambda each: each.number):
            params = self._params(trial)
            if trial.figures:
                study.add_trial(
                    optuna.trial.create_trial(
                        params=params, distributions=dict(self.space), value=trial.value
                    )
                )
            elif trial.is_open:
                study.enqueue_trial(params)
        return study

    def _next(self, study: Study, left: list[Trial]) -> tuple[Trial, Any]:
        """One that was begun before, else a new one; and the study's own object."""
        of_study = study.ask(dict(self.space))
        if left:
            return left.pop(0), of_study
        settings = {
            key: json.loads(_spelled(each, of_study.params[key]))
            for key, each in self.space.items()
        }
        trial = Trial(1 + max(self.trials, default=0), settings)
        self._keep(trial)
        return trial, of_study

    def _params(self, trial: Trial) -> dict[str, Any]:
        """As Optuna knows them."""
        return {
            key: json.dumps(value) if hasattr(self.space[key], "choices") else value
            for key, value in trial.settings.items()
        }

    def _take(self, trial: Trial, study: Study, of_study: Any) -> None:
        optuna = need_optuna()
        if trial.figures:
            study.tell(of_study, trial.value)
        else:
            study.tell(of_study, state=optuna.trial.TrialState.FAIL)
        self._keep(trial)
        failed = [each for each in self.trials.values() if each.problem]
        if len(failed) >= FAILURES and not self.done:
            raise TrainingError(
                f"{len(failed)} trials that failed, the last with: {trial.problem}",
                "settings that train",
                f"look at {self.folder / 'runs'}, and at the space",
            )

    def _keep(self, trial: Trial) -> None:
        self.trials[trial.number] = trial
        self._write(f"trials/{trial.number:04}.json", asdict(trial))

    def _train(self, trial: Trial) -> Trial:
        """One run after the other; on a thread of its own."""
        started = time.monotonic()
        figures: list[float] = []
        for seed in range(self.first_seed, self.first_seed + self.seeds):
            run_dir = self.folder / "runs" / f"{trial.number:04}-seed-{seed}"
            if not (run_dir / "summary.json").exists():
                code = self._run(trial, seed, run_dir)
                if self._stop.is_set():
                    return trial
                if code:
                    return _failed(trial, code, _log_of(run_dir))
            figure = self._figure(run_dir)
            if figure is None:
                return replace(trial, problem=f"no {self.monitor} on the validation split")
            figures.append(figure)
        seconds = round(time.monotonic() - started, 1)
        return replace(trial, figures=tuple(figures), seconds=seconds)

    def _run(self, trial: Trial, seed: int, run_dir: Path) -> int:
        """Train; returns the exit code, negative for a signal."""
        changes = [
            *self.overrides,
            *self.changes(trial),
            f"seed={seed}",
            "train.evaluate_test=false",
        ]
        if self.parallel > 1 and self.threads is None:
            changes.append(f"train.threads={max(1, num_processors() // self.parallel)}")
        words = [self.recipe, *(word for change in changes for word in ("--set", change))]
        if (run_dir / "config.toml").exists():
            words = []  # as it was begun
        command = [sys.executable, "-m", "pibroch", "train", *words]
        with _log_of(run_dir).open("ab") as output, self._lock:
            if self._stop.is_set():
                return STOPPED[0]
            process = subprocess.Popen(
                [*command, "--run-dir", str(run_dir), "--resume"],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env={**os.environ, LAUNCHER: str(os.getpid())},  # ends when this process does
            )  # fmt: skip
            self._running.add(process)
        try:
            return process.wait()
        finally:
            with self._lock:
                self._running.discard(process)

    def _figure(self, run_dir: Path) -> float | None:
        """The best model's, on the validation split."""
        best = [each for each in read_run(run_dir).evaluations if each["is_best"]]
        tasks: Mapping[str, Mapping[str, float | None]] = best[-1].get("tasks", {}) if best else {}
        label, _, name = self.monitor.rpartition(":")
        return tasks[label or next(iter(tasks))].get(name) if tasks else None

    def _end_runs(self) -> None:
        """Have what still runs go: only after an error, or a signal."""
        with self._lock:
            self._stop.set()
            running = list(self._running)
        for process in running:
            process.terminate()
        deadline = time.monotonic() + END_S
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()

    def changes(self, trial: Trial) -> list[str]:
        """A trial's settings as the command line takes them."""
        return [f"{key}={json.dumps(value)}" for key, value in trial.settings.items()]

    def write_page(self, out: Path) -> Path:
        """Write a page that works offline: all trials, their worth over each setting."""
        done = self.done
        by_number = sorted((trial.number, trial.value) for trial in done)
        note = "of the validation split"
        figures = [("Trials", note, plots.trials_plot(by_number, "trial", self.monitor))]
        for key, distribution in self.space.items():
            points = [(trial.settings[key], trial.value) for trial in done]
            if all(_is_number(value) for value, _ in points):
                is_log = getattr(distribution, "log", False)
                svg = plots.trials_plot(points, key, self.monitor, is_log=is_log)
                figures.append((key, note, svg))
        rows = [
            [
                str(trial.number),
                *(shown_figure(value) for value in (trial.value, _spread(trial), trial.seconds)),
                *(json.dumps(trial.settings[key]) for key in self.space),
            ]
            for trial in done
        ]
        columns = ["trial", self.monitor, "deviation", "seconds", *self.space]
        failed = [[str(each.number), each.problem] for each in self.trials.values() if each.problem]
        tables = [("Trials, the best one first", columns, rows)]
        tables += [("Failed", ["trial", "why"], failed)] if failed else []
        content = {
            "name": f"search of {self.recipe}",
            "tiles": [("trials", f"{len(done)}"), ("runs a trial", f"{self.seeds}")],
            "sentences": [
                f"Chosen by {self.monitor} on the validation split; the test split was not read.",
                f"For all trials: {' '.join(self.overrides) or 'the recipe as it is'}.",
            ],
            "tables": tables,
        }
        return write_page(out, "comparison", "--out", figures, content)

    def write_best(self) -> Path:
        """Write the recipe of the best trial, which evaluates on the test split again."""
        best = self.done[0]
        config = resolve(self.recipe, [*self.overrides, *self.changes(best)]).config
        spread = "" if (deviation := _spread(best)) is None else f" ± {deviation:.5f}"
        comment = (
            f"# {self.recipe} with the settings of trial {best.number} of {self.num_over}:"
            f" validation {self.monitor} {best.value:.5f}{spread}.\n"
        )
        path = self.folder / "best.toml"
        with new_file(path) as file:
            file.write_text(comment + to_toml(config.model_dump(mode="json")), "utf-8")
        return path


def _log_of(run_dir: Path) -> Path:
    return run_dir.with_suffix(".log")


def _failed(trial: Trial, code: int, log: Path) -> Trial:
    """A trial of which a run ended with this exit code."""
    lines = log.read_text("utf-8", "replace").strip().splitlines()
    # a launcher of several ranks says 128 and the signal of the one that was killed
    number = -code if code < 0 else code - 128
    was_killed = number > 0
    how = f"killed by signal {number}" if was_killed else f"exit code {code}"
    problem = f"{how}: {' '.join(lines[-3:])[-300:]} ({log.name})"
    return replace(trial, problem=problem, was_killed=was_killed)


def _read(path: Path) -> dict[str, Any]:
    try:
        said: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}", "what a search wrote there", "remove it") from error
    return said


def _spread(trial: Trial) -> float | None:
    """The standard deviation over the seeds."""
    return statistics.stdev(trial.figures) if len(trial.figures) > 1 else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _extremes(distribution: Any) -> Sequence[Any]:
    """Choices, or both ends of a range."""
    if hasattr(distribution, "choices"):
        choices: Sequence[Any] = distribution.choices
        return choices
    return distribution.low, distribution.high


def _spelled(distribution: BaseDistribution, value: Any) -> str:
    """A value as JSON, which is TOML too."""
    return value if hasattr(distribution, "choices") else json.dumps(value)
