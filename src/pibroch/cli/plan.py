"""``pibroch plan``: where each row lives, and why."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as Grid

from pibroch.cli.console import leave_with, results, say
from pibroch.cli.plan_towers import plan_towers
from pibroch.cli.profile import SplitChoice
from pibroch.cli.progress import counted, stages
from pibroch.data.dataset import EncodedDataset
from pibroch.embedding import SparseOptimizer, Table
from pibroch.errors import ConfigError
from pibroch.launch.child import die_with_launcher, is_rank, show_launcher, show_rank
from pibroch.overlap import refuse_overlap
from pibroch.planner.count import CountOptions, count_dataset
from pibroch.planner.diff import diff
from pibroch.planner.explain import (
    POLICY_COLUMNS,
    SHARD_COLUMNS,
    STEP_COLUMNS,
    headlines,
    megabytes,
    policy_rows,
    sentences,
    shard_rows,
    step_rows,
    write_page,
)
from pibroch.planner.make import PlanOptions, Progress, make_plan
from pibroch.planner.measured import (
    MEASURED_COLUMNS,
    for_run,
    measured_payload,
    measured_rows,
    notes,
)
from pibroch.planner.partition import TableSize, sizes_of
from pibroch.planner.prediction import PlanPrediction
from pibroch.planner.profile import AccessProfile
from pibroch.planner.replicate import as_mode, as_policy
from pibroch.planner.store import load_plan, save_plan
from pibroch.planner.topology import ClusterTopology
from pibroch.planner.watch import watch_dataset
from pibroch.process import tune_process
from pibroch.storage import storage_errors

app = typer.Typer(invoke_without_command=True, rich_markup_mode="markdown")
app.command("towers")(plan_towers)


class Mode(StrEnum):
    """What the plan is for."""

    INFERENCE = "inference"
    TRAINING = "training"


class Policy(StrEnum):
    """How copies are chosen."""

    LINKS = "links"
    EVERYWHERE = "everywhere"
    FREQUENCY = "frequency"
    SAFE = "safe"
    NONE = "none"


class Objective(StrEnum):
    """What a link is charged for."""

    TRANSFERS = "transfers"
    ACCESSES = "accesses"


@app.callback()
def plan(
    context: typer.Context,
    profile: Annotated[Path | None, typer.Option(help="A profile made by pibroch profile.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="The dataset that the plan is for: the profile must be of it, or is made of it."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The plan to write; its prediction goes beside it.")
    ] = None,
    topology: Annotated[
        Path | None, typer.Option(help="TOML or JSON: hosts, memory, costs of links.")
    ] = None,
    shards: Annotated[
        int | None, typer.Option(min=1, help="Without a topology: this many ranks, equal links.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="The tables' widths, types and optimizer; its data without --profile and --data."
        ),
    ] = None,
    dim: Annotated[int, typer.Option(min=1, help="Without a recipe: width of all tables.")] = 16,
    table_dim: Annotated[
        list[str] | None,
        typer.Option("--table-dim", metavar="TABLE=DIM", help="Another width; repeatable."),
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="Without a recipe: whose state lies beside the weights in training.")
    ] = "rowwise_adagrad",
    mode: Annotated[
        Mode, typer.Option(help="Copies must be kept equal in training.")
    ] = Mode.INFERENCE,
    policy: Annotated[
        Policy | None, typer.Option(help="links for inference, safe for training, when absent.")
    ] = None,
    extra: Annotated[
        float, typer.Option(min=0, help="Memory for copies, in per cent of the tables.")
    ] = 5.0,
    objective: Annotated[
        Objective, typer.Option(help="Charge links for distinct rows or for accesses.")
    ] = Objective.TRANSFERS,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Of a rank; that of the profile when absent.")
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            help="Most accesses and memory of a partition, in per cent; found when absent."
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write the page of `plan explain`.")
    ] = None,
) -> None:
    """Place all rows by how often they are read, and copy the hottest.

    Rows that are read alike form partitions; these are spread so that memory and lookups are
    balanced, then copied where they relieve the dearest link, within a budget of extra memory.
    Prints what is predicted.

    **Examples**

        pibroch plan --data data/criteo --shards 8 --out plans/criteo

        pibroch plan --profile criteo.profile --topology cluster.toml --extra 10 --out plans/ten

        pibroch plan --profile criteo.profile --recipe recipes/mine.toml --mode training --shards 4
        --out plans/train

        pibroch plan explain plans/criteo --html plan.html

        pibroch plan diff plans/criteo plans/ten

    A topology file says `hosts = [4, 4]` (ranks of each host), and, if need be, `memory_bytes`,
    `within_host`, `between_hosts` (costs of a byte), `p2p_bandwidth`, `all_reduce_bandwidth`;
    docs/planning.md explains them.
    """
    if context.invoked_subcommand is not None:
        return
    if out is None or (profile is None and data is None and recipe is None):
        raise ConfigError(
            "no --out, or none of --profile, --data and --recipe",
            "a place for the plan, and what it is made from",
            "e.g. pibroch plan --data data/criteo --shards 8 --out plans/criteo; see pibroch plan"
            " --help",
        )
    inputs = [profile, data, topology, recipe]
    for written in (out, out.with_name(f"{out.name}.rows")):
        refuse_overlap(written, inputs)
    if html is not None:
        refuse_overlap(html, [*inputs, out], "--html")
    ranks = _topology(topology, shards)
    options = PlanOptions(
        extra=extra / 100,
        mode=mode.value,
        policy=None if policy is None else policy.value,
        objective=objective.value,
        batch_size=batch_size,
        threshold=None if threshold is None else threshold / 100,
    )
    with stages() as progress:
        dataset = _dataset(data, None if profile else recipe)
        counts = _counts(profile, dataset, batch_size, progress)
        tables, sparse = _tables(counts, recipe, dim, table_dim or (), optimizer)
        sizes = sizes_of(tables, sparse if mode is Mode.TRAINING else None)
        fingerprint = None if dataset is None else dataset.digest
        assignment, prediction = make_plan(
            sizes, counts, ranks, options, fingerprint, shards, progress
        )
        prediction = save_plan(out, assignment, prediction, tables, counts)
    _show(prediction, str(out))
    if html is not None:
        results.print(f"wrote {write_page(prediction, out.name, html)}")


@app.command("explain")
def explain_command(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan made by pibroch plan.")],
    run: Annotated[
        Path | None, typer.Option(help="A run trained under it: predicted bytes beside measured.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write one self-contained page with plots.")
    ] = None,
) -> None:
    """Show what a plan decided and what it predicts.

    Shards, balance, links, what each per cent of memory buys.
    """
    if html is not None:
        refuse_overlap(html, [path], "--html")
    assignment, prediction = load_plan(path)
    measured = None
    if run is not None:
        measured = measured_payload(run, prediction.num_shards)
        prediction = for_run(assignment, prediction, run)
    _show(prediction, str(path))
    if run is not None and measured is not None:
        rows = measured_rows(prediction, measured)
        _show_grid(MEASURED_COLUMNS, rows, f"measured in {run}")
        for note in notes(prediction, path, run):
            say(f"note: {note}")
    if html is not None:
        results.print(f"wrote {write_page(prediction, path.name, html, measured)}")


@app.command("diff")
def diff_command(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A plan.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Another plan of the same tables.")],
) -> None:
    """Show what changes from one plan to another.

    Rows that move, copies, and the predictions beside each other.
    """
    (before, predicted) = load_plan(old)
    (after, then) = load_plan(new)
    changes = diff(before, after)
    rows = [
        (name, *(f"{cell:,}" for cell in (table.num_rows, *changed)))
        for name, table in changes.tables.items()
        if any(changed := (table.moved, table.copies_added, table.copies_dropped))
    ]
    columns = ("table", "rows", "move", "copies added", "copies dropped")
    _show_grid(columns, rows, f"{old} to {new}")
    results.print(
        f"{changes.moved:,} of {then.num_rows:,} rows move, {int(changes.rows_sent.sum()):,} are"
        " sent in all"
    )
    now = dict(headlines(then))
    rows = [(label, value, now.get(label, "–")) for label, value in headlines(predicted)]  # noqa: RUF001
    _show_grid(("", "old", "new"), rows)


@app.command("topology")
def topology_command(
    out: Annotated[
        Path, typer.Option(help="The file to write, for `pibroch plan --topology`: .json.")
    ],
    ranks: Annotated[
        int, typer.Option(min=1, help="So many ranks on this machine; torchrun says it otherwise.")
    ] = 1,
) -> None:
    """Measure the links between ranks.

    Own memory, a neighbour's, another host's, and the sum over all.

    On several machines run it as training is run there:

      torchrun --nnodes 2 --nproc-per-node 1 ... -m pibroch plan topology --out topology.json
    """
    die_with_launcher()
    tune_process(is_alone=False if ranks > 1 else None)
    if ranks > 1 and not is_rank():
        from pibroch.launch.local import run_ranks

        show_launcher(ranks, "measurer")
        raise typer.Exit(0 if run_ranks(ranks) is None else 1)
    from pibroch.collectives.world import world_of_environment
    from pibroch.train.measured_topology import measure

    show_rank("measurer")
    with world_of_environment(leave_with) as world:
        size = world.ranks.world_size
        with counted(size * (size - 1) // 2, "pairs", world.is_first) as advance:
            topology = measure(world.control, lambda: advance(1)).content()
        if not world.is_first:
            return
        ClusterTopology.of(topology, "what was measured")
        with storage_errors(out, "a place to write to", ""):
            out.write_text(json.dumps(topology, indent=1) + "\n", encoding="utf-8")
        for number, row in enumerate(topology["cost"]):  # type: ignore[arg-type, var-annotated]
            costs = "  ".join(f"{cost:>7g}" for cost in row)
            results.print(f"rank {number} reads at {costs}")
        results.print(f"wrote {out}")


@app.command("watch")
def watch_command(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan made by pibroch plan.")],
    data: Annotated[Path, typer.Option(help="The dataset whose samples come, in their order.")],
    topology: Annotated[
        Path | None, typer.Option(help="Of the plan: TOML or JSON; equal links when absent.")
    ] = None,
    split: Annotated[SplitChoice, typer.Option(help="Of the dataset.")] = SplitChoice.TRAIN,
    dim: Annotated[int, typer.Option(min=1, help="Width of all tables.")] = 16,
    every: Annotated[int, typer.Option(min=2, help="Batches between two looks.")] = 50,
    threshold: Annotated[
        float,
        typer.Option(min=1, help="Say so where the plan costs this many times a fresh one's."),
    ] = 1.2,
    half_life: Annotated[
        float, typer.Option(min=1, help="Batches after which one counts half.")
    ] = 25.0,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Of a rank; that of the plan when absent.")
    ] = None,
) -> None:
    """Read samples as they come, and compare the plan with one for recent samples.

    Prints for each look what a step's dearest link costs under both plans, in bytes times the
    link's cost.

    **Example**

        pibroch plan watch plans/five --data data/criteo --split test --every 20
    """
    assignment, prediction = load_plan(path)
    ranks = _topology(topology, assignment.num_shards)
    options = PlanOptions(
        extra=prediction.extra, mode=as_mode(prediction.mode), policy=as_policy(prediction.policy)
    )
    dataset = EncodedDataset.open(data)
    tables = [
        TableSize(name, len(rows), 4 * dim, 4 * dim)
        for name, rows in assignment.partition_of.items()
    ]
    looks = watch_dataset(
        dataset,
        split.value,
        assignment,
        tables,
        ranks,
        options,
        batch_size or prediction.batch_size,
        every,
        half_life,
    )
    most = 0.0
    for decay in looks:
        most = max(most, decay.ratio)
        note = "  decayed: plan anew" if decay.ratio > threshold else ""
        results.print(
            f"batch {decay.batches}: {decay.current:,.0f}, a fresh plan {decay.fresh:,.0f},"
            f" {decay.ratio:.2f} times{note}"
        )
    results.print(f"at most {most:.2f} times the cost of a fresh plan")


def _topology(path: Path | None, shards: int | None) -> ClusterTopology:
    if path is not None:
        return ClusterTopology.load(path)
    if shards is None:
        raise ConfigError(
            "neither --topology nor --shards", "one of them", "e.g. --shards 8 for equal links"
        )
    return ClusterTopology.uniform(shards)


def _dataset(data: Path | None, recipe: str | None) -> EncodedDataset | None:
    """What was named, or what the recipe names."""
    if data is not None:
        return EncodedDataset.open(data)
    if recipe is None:
        return None
    from pibroch.config import load_recipe
    from pibroch.train.data_source import open_dataset

    return open_dataset(load_recipe(recipe).data)


def _counts(
    profile: Path | None, dataset: EncodedDataset | None, batch_size: int | None, progress: Progress
) -> AccessProfile:
    """The profile that was given, or one of the dataset."""
    if profile is not None:
        return AccessProfile.load(profile)
    assert dataset is not None, "one of the two was given"
    return count_dataset(dataset, CountOptions(batch_size=batch_size or 1024), progress=progress)


def _tables(
    counts: AccessProfile, recipe: str | None, dim: int, others: Sequence[str], optimizer: str
) -> tuple[Sequence[Table], SparseOptimizer]:
    """The profile's tables and what trains them, by a recipe or by options."""
    if recipe is not None:
        from pibroch.config import load_recipe
        from pibroch.embedding.row_index import must_be_rows
        from pibroch.train.optimizers import build_sparse_optimizer
        from pibroch.train.session import build_tables

        config = load_recipe(recipe)
        sparse = build_sparse_optimizer(config.embedding.optimizer, config.train.average)
        tables = build_tables(config, counts.num_rows)
        must_be_rows(
            {table.name: table.rows.described() for table in tables},
            "a plan from a data set, which counts ids,",
            "plan with a recipe without [embedding.rows], or give a kind of placement",
        )
        return tables, sparse
    from pibroch.config.optimizer import SPARSE_OPTIMIZERS

    if optimizer not in SPARSE_OPTIMIZERS.all():
        names = ", ".join(SPARSE_OPTIMIZERS.all())
        raise ConfigError(f"--optimizer {optimizer}", f"one of {names}")
    dims = {name: dim for name in counts.num_rows} | _dims(others, counts)
    tables = [Table(name, rows, dims[name]) for name, rows in counts.num_rows.items()]
    return tables, SPARSE_OPTIMIZERS.find(optimizer).build(lr=1.0)


def _dims(texts: Sequence[str], counts: AccessProfile) -> dict[str, int]:
    dims = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in counts.tables or not number.isdigit() or not int(number):
            raise ConfigError(
                f"--table-dim {text}", f"TABLE=DIM with a table of {', '.join(counts.tables)}"
            )
        dims[name] = int(number)
    return dims


def _show(prediction: PlanPrediction, name: str) -> None:
    for sentence in sentences(prediction):
        say(sentence)
    _show_grid(SHARD_COLUMNS, shard_rows(prediction)[:64], f"{name}: a step")
    if prediction.steps:
        _show_grid(STEP_COLUMNS, step_rows(prediction), "what extra memory buys")
    if prediction.policies:
        _show_grid(POLICY_COLUMNS, policy_rows(prediction), "what each policy would give")
    for label, value in headlines(prediction):
        results.print(f"{label}: {value}", markup=False)
    reads = sum(sum(row) for row in prediction.read_bytes["transfers"])
    results.print(
        f"read a step, each distinct row of a rank once: {megabytes(reads)}", markup=False
    )


def _show_grid(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    grid = Grid(*columns, title=title or None, box=None, pad_edge=False)
    for column in grid.columns[1:]:
        column.justify = "right"
    for row in rows:
        grid.add_row(*row)
    results.print(grid)
