"""Data of topic ``next_item``, and its training runs, each in a process of its own."""

from __future__ import annotations

import csv
import json
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.environments import recbole_python
from benchmarks.next_item_case import DATASET, TOP, NextItemCase
from benchmarks.small_runs import peer, pibroch
from pibroch.config.recipes import check_config
from pibroch.config.toml import to_toml
from pibroch.data import EncodedDataset

SCHEMA = """
label = "click"
group = "user"
[categorical.item]
encoding = "integer"
num_buckets = {num_items}
"""
HISTORY = """
[categorical.history]
multi_hot = true
delimiter = "|"
max_length = {max_length}
shares = "item"
"""
USER = """
[categorical.user]
min_count = 1
"""
FIND_SAMPLE = "import recbole, os; print(os.path.dirname(recbole.__file__))"
TIMEOUT_S = 3600.0

ITEMS = "items.csv"
"""All items, beside the data; RecBole ranks those as well that training never saw."""

Events = dict[str, list[str]]
"""Items of each user, in the order of their times."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run gave.

    Attributes:
        hr: the share of users whose last item is one of the first ten of all items.
        ndcg: with a gain of ``1 / log2(place + 1)`` for each.
        seconds: in each epoch, or their mean; reading included, without evaluation.
        validation: the NDCG of the validation items after each epoch.
        versions: that matter for speed.
    """

    hr: float
    ndcg: float
    seconds: Sequence[float]
    validation: Sequence[float]
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def epochs(self) -> int:
        """That were trained."""
        return len(self.validation)

    def until_best(self) -> Trained:
        """The same without the epochs after that whose model is tested."""
        epochs = 1 + self.validation.index(max(self.validation))
        return replace(self, seconds=self.seconds[:epochs], validation=self.validation[:epochs])

    def epochs_until(self, ndcg: float) -> int | None:
        """Epochs until the validation items have this NDCG, where they ever do."""
        reached = (number for number, each in enumerate(self.validation, 1) if each >= ndcg)
        return next(reached, None)


def movielens() -> Events:
    """ml-100k, which comes with RecBole.

    Raises:
        MissingDependencyError: when there is no Python with RecBole.
    """
    command = [str(recbole_python()), "-W", "ignore", "-c", FIND_SAMPLE]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    sample = Path(found.stdout.strip(), "dataset_example", "ml-100k", "ml-100k.inter")
    events = defaultdict(list)
    with sample.open(newline="") as file:
        for number, line in enumerate(csv.DictReader(file, delimiter="\t")):
            moment = float(line["timestamp:float"]), number
            events[line["user_id:token"]].append((moment, line["item_id:token"]))
    return {user: [item for _, item in sorted(each)] for user, each in events.items()}


def write_events(events: Events, folder: Path) -> None:
    """As RecBole reads them; it leaves the last two of each user out of training itself."""
    path = folder / DATASET / f"{DATASET}.inter"
    path.parent.mkdir(parents=True)
    lines = ["user_id:token\titem_id:token\ttimestamp:float"]
    for user, items in events.items():
        lines += [f"{user}\t{item}\t{place}" for place, item in enumerate(items)]
    path.write_text("\n".join(lines) + "\n")


def prepare_samples(events: Events, case: NextItemCase, folder: Path) -> EncodedDataset:
    """The same for pibroch; the last item of a user is tested, the one before it validates.

    Items are numbers in the order of their names, and a file has all of them, those of validation
    and test alone as well, for which RecBole has rows, too. A sample of ``two_tower`` is a user and
    an item; one of ``sasrec`` an item and the ``max_length`` items before it. Of these a sample
    begins wherever half of the one after it is new: the model learns from all its positions.
    """
    names = sorted({item for items in events.values() for item in items})
    number_of = {name: str(number) for number, name in enumerate(names)}
    length = case.max_length if case.model == "sasrec" else 0
    step = max(1, length // 2)
    samples: dict[str, list[tuple[str, list[str]]]] = {"train": [], "validation": [], "test": []}
    for user, named in events.items():
        items = [number_of[name] for name in named]
        samples["test"].append((user, items[-1 - length :]))
        samples["validation"].append((user, items[-2 - length : -1]))
        for end in range(len(items) - 2, int(length > 0), -step):
            samples["train"].append((user, items[max(0, end - 1 - length) : end]))
    folder.mkdir(parents=True)
    (folder / ITEMS).write_text("\n".join(["item", *number_of.values()]) + "\n")
    files = {}
    for split, of_split in samples.items():
        files[split] = folder / f"{split}.csv"
        lines = [f"1,{user},{item},{'|'.join(before)}" for user, (*before, item) in of_split]
        files[split].write_text("\n".join(["click,user,item,history", *lines]) + "\n")
    schema = folder / "schema.toml"
    features = SCHEMA.format(num_items=len(names))
    schema.write_text(features + (HISTORY.format(max_length=length) if length else USER))
    words = [files["train"], "--validation", files["validation"], "--test", files["test"]]
    pibroch("data", "prepare", "csv", *words, "--schema", schema, "--out", folder / "data")
    return EncodedDataset.open(folder / "data")


def recipe(case: NextItemCase, dataset: EncodedDataset) -> dict[str, Any]:
    """The case as a recipe; a sample of ``sasrec`` teaches a pair for each item it has."""
    optimizer = {"name": "adam", "lr": case.lr}
    model: dict[str, Any] = {
        "histories": {"history": "item"},
        "all_positions": True,
        "max_length": case.max_length,
        "blocks": case.blocks,
        "attention_heads": case.heads,
    }
    if case.model == "two_tower":
        model = {
            "item_features": ["item"],
            "top": [case.dim],
            "vector_width": case.dim,
            "normalize": True,
            "temperature": 0.1,
        }
    return {
        "seed": case.seed,
        "data": {"dir": str(dataset.path)},
        "model": model | {"name": case.model, "dim": case.dim, "dropout": case.dropout},
        "loss": {"name": "in_batch_softmax"},
        "embedding": {"optimizer": optimizer},
        "optimizer": optimizer,
        "train": {
            "epochs": case.epochs,
            "items": str(dataset.path.parent / ITEMS),
            "early_stop_patience": case.patience,
            "batch_size": case.pairs // (case.max_length if case.model == "sasrec" else 1),
            # what RecBole does for models without histories, and not for those with them
            "leave_out_seen": case.model == "two_tower",
            "monitor": f"all_ndcg@{TOP}",
            "top_k": [TOP],
        },
    }


def train_pibroch(case: NextItemCase, dataset: EncodedDataset, run: Path) -> Trained:
    """As a user does; the folder ``run`` has the run afterwards.

    Raises:
        BenchmarkError: when it fails.
    """
    path = run.with_suffix(".toml")
    config = check_config(recipe(case, dataset), "the benchmark")
    path.write_text(to_toml(config.model_dump(mode="json")))
    pibroch("train", path, "--run-dir", run, timeout_s=TIMEOUT_S)
    seconds = json.loads((run / "summary.json").read_text())["seconds"]
    found = json.loads((run / "evaluation.json").read_text())["tasks"]["click"]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    validation = [
        each["tasks"]["click"][f"all_ndcg@{TOP}"]
        for each in records
        if each["kind"] == "evaluation" and each["split"] == "validation"
    ]
    by_epoch = [seconds / len(validation)] * len(validation)
    return Trained(found[f"all_hr@{TOP}"], found[f"all_ndcg@{TOP}"], by_epoch, validation)


def train_recbole(case: NextItemCase, folder: Path) -> Trained:
    """The same in RecBole.

    Args:
        case: what to train.
        folder: of :func:`write_events`.

    Raises:
        BenchmarkError: when it fails.
        MissingDependencyError: when there is no Python with RecBole.
    """
    words = case.to_json(), folder
    python = recbole_python()
    return Trained(**peer("RecBole", python, "next_item_recbole", *words, timeout_s=TIMEOUT_S))
