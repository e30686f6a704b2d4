"""``pibroch job``: the processes of a run, for those who start them elsewhere."""

from __future__ import annotations

import re
from dataclasses import replace
from enum import StrEnum
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pibroch.cli.console import results
from pibroch.errors import MissingDependencyError

if TYPE_CHECKING:
    from pibroch.launch.job import Job
    from pibroch.launch.jobset import Cluster

app = typer.Typer(
    help="Write a run's processes down for a cluster that starts them.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
_roles = partial(typer.Option, rich_help_panel="Processes")
_pods = partial(typer.Option, rich_help_panel="Pods")


class Kind(StrEnum):
    """What is written."""

    JOBSET = "jobset"


@app.callback()
def _group() -> None:
    """Write a run's processes down for a cluster that starts them."""


@app.command("manifest")
def manifest_command(
    recipe: Annotated[str, typer.Argument(help="A recipe's file or name.")],
    image: Annotated[str, _pods(help="An image in which `pibroch` runs.")],
    run_dir: Annotated[
        Path, typer.Option(help="Where the run is kept, in pods: on a volume of --claim.")
    ],
    kind: Annotated[
        Kind, typer.Option(help="`jobset`: Kubernetes' JobSet, and a ConfigMap with the recipe.")
    ] = Kind.JOBSET,
    name: Annotated[str | None, typer.Option(help="Of the job; the recipe's when absent.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="The dataset in pods, instead of the recipe's.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe's value."),
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="How often all may be started again when one is lost.")
    ] = 10,
    ranks: Annotated[int, _roles(min=1, help="Trainers, one a pod.")] = 1,
    embedding_servers: Annotated[
        int | None, _roles(min=0, help="Instead of the recipe's; needs `lookahead`.")
    ] = None,
    oracle: Annotated[bool, _roles("--oracle", help="A central oracle.")] = False,
    data_processors: Annotated[int | None, _roles(min=0, help="Instead of the recipe's.")] = None,
    namespace: Annotated[str | None, _pods(help="Of Kubernetes.")] = None,
    claims: Annotated[
        list[str] | None,
        _pods(
            "--claim",
            metavar="NAME:PATH[:ro]",
            help="A persistent volume claim, and where it is in all pods.",
        ),
    ] = None,
    secret: Annotated[
        str,
        _pods(
            help="The Kubernetes Secret whose entry `secret` is the job's; a recipe's secrets by"
            " variable are entries of the variables' names."
        ),
    ] = "pibroch",
    resources: Annotated[
        list[str] | None,
        _pods(
            metavar="[ROLE:]cpu=4,memory=8Gi",
            help="Of each pod, or of each of one role: `trainer`, `embedding-server`, ...",
        ),
    ] = None,
) -> None:
    """Print a manifest of a run's processes: trainers, servers, oracle, data processors."""
    yaml = _yaml()
    from pibroch.config import load_recipe, to_toml
    from pibroch.config.recipes import change_config
    from pibroch.config.secret import secrets_in
    from pibroch.launch.job import TRAINER, Restarts
    from pibroch.launch.jobset import RECIPES, Claim, Cluster, manifest, parse_resources
    from pibroch.train.job import training_job

    changes = [*(overrides or []), *([f"data.dir={str(data)!r}"] if data else [])]
    if embedding_servers is not None:
        changes.append(f"embedding.exchange.servers={embedding_servers}")
    if oracle:
        changes.append("embedding.exchange.oracle=central")
    if data_processors is not None:
        changes.append(f"data.processors={data_processors}")
    config = load_recipe(recipe, changes)
    cluster = Cluster(
        image,
        secret,
        tuple(map(Claim.parse, claims or [])),
        parse_resources(resources or []),
        namespace,
        tuple(sorted({each.env for each in secrets_in(config) if each.env is not None})),
    )
    threads = cluster.processors(TRAINER)
    if config.train.threads is None and threads is not None:
        config = change_config(config, [f"train.threads={threads}"])
    stem = Path(recipe).stem
    arguments = ("train", f"{RECIPES}/{stem}.toml")
    job = training_job(config, run_dir, arguments, ranks, Restarts(restarts))
    documents = manifest(
        _within_limits(job, cluster),
        name or re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-"),
        (f"{stem}.toml", to_toml(config.model_dump(mode="json"))),
        cluster,
    )
    text = yaml.dump_all(documents, Dumper=_dumper(yaml), sort_keys=False, width=100)
    results.print(text, markup=False, end="")


def _within_limits(job: Job, cluster: Cluster) -> Job:
    """The same, with as many threads beside the ranks as their pods have processors."""
    groups = []
    for group in job.groups:
        threads = cluster.processors(group.role)
        if not group.are_ranks and threads is not None:
            group = replace(group, command=(*group.command, "--threads", str(threads)))
        groups.append(group)
    return replace(job, groups=tuple(groups))


def _yaml() -> Any:
    if find_spec("yaml") is None:
        raise MissingDependencyError(
            "pibroch job manifest without yaml",
            "the extra `kubernetes`",
            "pip install 'pibroch[kubernetes]'",
        )
    return import_module("yaml")


def _dumper(yaml: Any) -> Any:
    """Writes texts of several lines, such as the recipe, as they are."""

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        pass

    def text(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    Dumper.ignore_aliases = lambda *_: True
    return Dumper
