"""What each rank does in the tests of training over ranks."""

from pathlib import Path

from pibroch.collectives.world import World
from pibroch.config import RunConfig
from pibroch.observability.records import FanOut
from pibroch.train.data_source import open_dataset
from pibroch.train.run import run_training
from pibroch.train.run_directory import RunDirectory


def train(channel, config, folder):
    """A run from a configuration given as plain values; its losses and its summary as this rank knows them."""
    config = RunConfig.model_validate(config)
    run = RunDirectory(Path(folder), channel.ranks.rank)
    if run.rank == 0 and not run.exists():
        run.create(config)
    channel.barrier()
    sent = channel.ranks.traffic.sent
    result = run_training(
        config, open_dataset(config.data), run, lambda total_steps: FanOut([]), World(channel.ranks, channel)
    )
    evaluations = [
        [record[name] for name in ("step", "auc", "logloss", "is_best")]
        for record in run.metrics()
        if record["kind"] == "evaluation"
    ]
    losses = [record["loss"] for record in run.metrics() if record["kind"] == "training"]
    return {
        "losses": losses,
        "evaluations": evaluations,
        "summary": result.summary,
        "sent": channel.ranks.traffic.sent - sent,
    }
