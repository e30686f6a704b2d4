"""``pibroch simulate``: what a step would take on hosts that are not here."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table as Grid
from typer.core import TyperGroup

from pibroch.cli.console import results, say
from pibroch.overlap import refuse_overlap

DEFAULT = "recipe"


class _Simulate(TyperGroup):
    """A group whose own name stands for ``recipe`` as well."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """`pibroch simulate RECIPE` is `pibroch simulate recipe RECIPE`."""
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Simulate,
    no_args_is_help=True,
    help="What a step would take on hosts that are not here: `pibroch simulate RECIPE`.",
)


@app.command(DEFAULT)
def recipe_command(
    recipe: Annotated[str, typer.Argument(help="A TOML file or the name of a shipped recipe.")],
    hosts: Annotated[
        str, typer.Option(metavar="N[..M]", help="Hosts; a range is doubled from N to M.")
    ] = "2",
    ranks_per_host: Annotated[int, typer.Option(min=1, help="Ranks of each host.")] = 1,
    link: Annotated[
        str, typer.Option(metavar="RATE", help="Of each host's link, each way, e.g. 100gbit.")
    ] = "100gbit",
    local: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|RATE", help="Within a host, of each rank: nvlink, pcie, or a rate."
        ),
    ] = None,
    calibration: Annotated[
        str,
        typer.Option(metavar="NAME|FILE", help="By `simulate calibrate`, or v100, a100, h100."),
    ] = "a100",
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Of a rank's batch; the recipe's whole batch when absent."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe; repeatable."),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="An encoded dataset to read instead.")] = None,
    utilisation: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of a device's rate that layers reach.")
    ] = 1.0,
    jitter: Annotated[
        float | None,
        typer.Option(
            min=0, max=2, help="Spread of the times of work, as a share; default: as calibrated."
        ),
    ] = None,
    hosts_per_machine: Annotated[
        int, typer.Option(min=1, help="Hosts that share a machine's cores, as in a lab.")
    ] = 1,
    link_burst: Annotated[
        int,
        typer.Option(
            metavar="BYTES", min=0, help="That an idle link lets through at once: a token bucket."
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of samples and of jitter.")] = 0,
    death_every: Annotated[
        float | None,
        typer.Option(
            metavar="HOURS", min=1e-3, help="Between two deaths of one rank, on average: goodput."
        ),
    ] = None,
    recovery: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="From a death to the next new step; `pibroch bench recovery` measures it.",
        ),
    ] = 5.0,
    saving: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="What a cut in memory, or a checkpoint by time, takes of the training thread.",
        ),
    ] = None,
    host_price: Annotated[
        float | None,
        typer.Option(metavar="PRICE", min=0, help="Of a host and hour: price of samples."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a page with plots.")
    ] = None,
    traces: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Also write Chakra traces of one number of hosts."),
    ] = None,
) -> None:
    """Predict the steps of a recipe: their time by part, bytes by link, memory.

    Ids come from the recipe's data, and what ranks do with them is done by what they run; only the
    time that it takes is that of a calibration.

    **Examples**

        pibroch simulate criteo_kaggle --hosts 64 --ranks-per-host 8 --local nvlink

        pibroch simulate criteo_kaggle --hosts 8..1024 --calibration h100 --page sweep.html

        pibroch simulate criteo_kaggle --hosts 4 --traces traces
    """
    from pibroch.cli.progress import stages
    from pibroch.config import load_recipe
    from pibroch.errors import ConfigError
    from pibroch.sim.chakra import make_folder
    from pibroch.sim.economy import Economy
    from pibroch.sim.machine import Machine
    from pibroch.sim.page import tables, write_page
    from pibroch.sim.provenance import notes_on
    from pibroch.sim.recipe import Workload
    from pibroch.sim.sweep import Question, answer
    from pibroch.train.data_source import open_dataset

    if page is not None:
        refuse_overlap(page, [data, recipe], "--page")
    changes = [*(overrides or []), *([f"data.dir={str(data)!r}"] if data else [])]
    numbers = _hosts(hosts)
    if traces is not None:
        refuse_overlap(traces, [data, recipe], "--traces")
        if len(numbers) > 1:
            raise ConfigError(f"--traces of --hosts {hosts}", "one number", "e.g. --hosts 8")
    config = load_recipe(recipe, changes)
    machine = Machine.load(calibration)
    question = Question(
        machine=machine,
        ranks_per_host=ranks_per_host,
        link=link,
        local=local,
        samples=samples or config.train.batch_size,
        utilisation=utilisation,
        jitter=jitter,
        hosts_per_machine=hosts_per_machine,
        link_burst=link_burst,
        seed=seed,
        economy=Economy(death_every, recovery, host_price, saving),
        notes=notes_on(machine, calibration, recipe, datetime.now(UTC)),
    )
    question.check()
    workload = Workload.of(config, open_dataset(config.data), seed)
    if traces is not None:
        make_folder(traces)
    answers = []
    with stages() as progress:
        for place, number in enumerate(numbers):
            progress(f"{number:,} hosts", place / len(numbers))
            answers.append(answer(workload, question, number, traces))
    for note in dict.fromkeys(note for each in answers for note in each.notes):
        say(note)
    if page is not None:
        write_page(page, recipe, question, answers)
    if as_json:
        results.print_json(json.dumps([each.content() for each in answers]))
        return
    for title, columns, rows in tables(answers):
        grid = Grid(title=title, title_justify="left")
        for column in columns:
            grid.add_column(column, justify="left" if column == columns[0] else "right")
        for row in rows:
            grid.add_row(*row)
        results.print(grid)
    for path in (page, traces):
        if path is not None:
            results.print(f"wrote {path}")


@app.command("calibrate")
def calibrate_command(
    recipes: Annotated[
        list[str] | None, typer.Argument(help="Whose dense models and rows to measure.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--output", metavar="FILE", help="The file to write.")
    ] = Path("machine.json"),
    processes: Annotated[
        int, typer.Option(min=1, max=64, help="That work at once, a thread each, as ranks do.")
    ] = 2,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change the recipes; repeatable."),
    ] = None,
    name: Annotated[str, typer.Option(help="Of the machine.")] = "this machine",
) -> None:
    """Measure rows, dense models and links of this machine, which should do nothing else.

    **Example**

        pibroch simulate calibrate criteo_kaggle_sample --output machine.json
    """
    from functools import partial

    from pibroch.config import load_recipe
    from pibroch.sim.calibrate import calibrate
    from pibroch.sim.measuring import Sample
    from pibroch.sim.recipe import Workload
    from pibroch.train.data_source import open_dataset

    _check_writable(out)
    samples = []
    for each in recipes or ["synthetic_small"]:
        config = load_recipe(each, overrides or [])
        workload = Workload.of(config, open_dataset(config.data))
        size = config.train.batch_size
        job = partial(workload.job, 2, seed=config.seed)
        sizes = (size, max(1, size // 2))
        samples.append(Sample(workload.model_key, job, workload.model, sizes))
    machine = calibrate(samples, name, say, processes)
    machine.save(out)
    results.print(f"wrote {out}: {machine.cpu}, {machine.cores} cores")


def _check_writable(path: Path) -> None:
    """Raise StorageError now and not after the measurement."""
    from pibroch.storage import storage_errors

    with storage_errors(path, do="pass --output FILE"):
        was_there = path.exists()
        path.open("ab").close()
        if not was_there:
            path.unlink()


def _hosts(text: str) -> list[int]:
    """``8`` or ``8..1024``, doubled.

    Raises:
        ConfigError: for anything else.
    """
    from pibroch.errors import ConfigError

    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    first = int(match[1]) if match else 0
    last = int(match[2] or first) if match else 0
    if not 1 <= first <= last:
        raise ConfigError(
            f"--hosts {text}", "N or N..M, from 1 on, N no more than M", "e.g. 8..1024"
        )
    numbers = []
    while first < last:
        numbers.append(first)
        first *= 2
    return [*numbers, last]
