"""What each rank does in the tests of training over ranks."""

from contextlib import suppress
from pathlib import Path

from pibroch.collectives.world import World
from pibroch.config import RunConfig
from pibroch.errors import ConfigError, PibrochError
from pibroch.observability.records import FanOut
from pibroch.roles.group import leave
from pibroch.train import replanning, sameness
from pibroch.train.data_source import open_dataset
from pibroch.train.run import run_training
from pibroch.train.run_directory import RunDirectory


def train(channel, config, folder):
    """A run from a configuration given as plain values.

    Its losses and its summary as this rank knows them.
    """
    config = RunConfig.model_validate(config)
    run = RunDirectory(Path(folder), channel.ranks.rank)
    if run.rank == 0 and not run.exists():
        run.create(config)
    channel.barrier()
    sent = channel.ranks.traffic.sent
    result = run_training(
        config,
        open_dataset(config.data),
        run,
        lambda total_steps: FanOut([]),
        World(channel.ranks, channel),
    )
    evaluations = [
        [record[name] for name in ("step", "auc", "logloss", "is_best")]
        for record in run.metrics()
        if record["kind"] == "evaluation"
    ]
    losses = [record["loss"] for record in run.metrics() if record["kind"] == "training"]
    tasks = [each["tasks"] for each in run.metrics() if each["kind"] == "evaluation"]
    return {
        "losses": losses,
        "evaluations": evaluations,
        "tasks": tasks,
        "summary": result.summary,
        "sent": channel.ranks.traffic.sent - sent,
    }


def train_or_refuse(channel, config, folder):
    """As :func:`train`; returns the error that refuses the run, ``None`` when it was trained."""
    try:
        train(channel, config, folder)
    except PibrochError as error:
        with suppress(RuntimeError):  # where there was nobody to meet
            leave()
        return error
    return None


def name_what_differs(channel, configs, folder, code=None):
    """The outcome of a run whose ranks have these configurations each.

    The last rank may have other code.
    """
    config = RunConfig.model_validate(configs[channel.ranks.rank])
    usual = sameness.code_digest
    if code is not None and channel.ranks.rank == channel.ranks.world_size - 1:
        sameness.code_digest = lambda: code
    try:
        run_training(
            config,
            open_dataset(config.data),
            RunDirectory(Path(folder), channel.ranks.rank),
            lambda total_steps: FanOut([]),
            World(channel.ranks, channel),
        )
    except ConfigError as error:
        return str(error)
    finally:
        sameness.code_digest = usual


def train_and_wait_for_plans(channel, config, folder):
    """As :func:`train`, but a plan that is being made is waited for."""
    usual = replanning.Replanner._decide

    def decide(replanner, step):
        if replanner._found is not None:
            replanner._found.exception(timeout=60)
        return usual(replanner, step)

    replanning.Replanner._decide = decide
    try:
        return train(channel, config, folder)
    finally:
        replanning.Replanner._decide = usual
