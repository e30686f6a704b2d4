"""``pibroch search``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pibroch.cli.console import results, say
from pibroch.cli.progress import counted

if TYPE_CHECKING:
    from pibroch.train.search import Search, Trial

_BEST_SHOWN = 10


def search(
    recipe: Annotated[str, typer.Argument(help="A recipe's file or name.")],
    space: Annotated[Path, typer.Option(help="A TOML file: what may be chosen for which setting.")],
    trials: Annotated[int, typer.Option(min=1, help="Trials in all, earlier ones included.")] = 20,
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs a trial; its worth is the mean of their figures.")
    ] = 1,
    parallel: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a value of all trials."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Its folder; `runs/search-<recipe>` when absent.")
    ] = None,
) -> None:
    """Search for a recipe's best settings on the validation split.

    The space is TOML in the shape of a recipe, a list of choices or a range for each setting:

        train.batch_size = [512, 1024, 2048]

        optimizer.lr = {low = 1e-4, high = 1e-2, log = true}

    Each trial trains the recipe with one choice of them. What is best follows from
    `train.monitor` on the validation split; no trial reads the test split. Given again, the command
    goes on where it was, or makes more trials. It writes `best.toml`, a recipe, and `search.html`.

    **Examples**

        pibroch search criteo_kaggle_sample_dcnv2 --space space.toml --trials 30 --seeds 3

        pibroch train runs/search-criteo_kaggle_sample_dcnv2/best.toml
    """
    from pibroch.config.secret import refuse_in_full
    from pibroch.train.search import Search, read_space

    refuse_in_full(overrides or [])  # they are written down with the search
    folder = out or Path("runs") / f"search-{Path(recipe).stem}"
    given = Search(recipe, tuple(overrides or ()), read_space(space), seeds, folder, parallel)
    over = given.num_over
    if over:
        say(f"{over} trials are done in {folder}")
    with counted(max(0, trials - over), "trials") as advance:

        def show(trial: Trial) -> None:
            advance(1)
            say(_line(given, trial))

        given.run(trials, show)
    if not given.done:
        from pibroch.errors import TrainingError

        raise TrainingError("trials that failed all", "one that trains", f"look at {folder}")
    best = given.write_best()
    page = given.write_page(folder / "search.html")
    for trial in given.done[:_BEST_SHOWN]:
        results.print(_line(given, trial), markup=False, soft_wrap=True)
    results.print(f"wrote {best} and {page}", markup=False, soft_wrap=True)
    results.print(f"its test figures: pibroch train {best}", markup=False, soft_wrap=True)


def _line(given: Search, trial: Trial) -> str:
    settings = "  ".join(f"{key}={json.dumps(value)}" for key, value in trial.settings.items())
    worth = f"{given.monitor} {trial.value:.5f}" if trial.figures else trial.problem or "not done"
    return f"trial {trial.number}  {worth}  {settings}"
