"""Forms of input, ways of a batch and readers of what was trained: registries to draw pairs of.

Every way trains on the same samples in the same order. What trains in one process has the bits of
``local``, what trains on two ranks those of ``ranks``; all others differ by rounding.
"""

import csv
import json
import os
import signal
from dataclasses import dataclass
from functools import cache
from itertools import count

import numpy as np
import polars as pl
import torch
import training_cases
from launched_team import Team, steps, wait_until

import pibroch as pb
from pibroch.config import to_toml
from pibroch.config.recipes import change_config, check_config
from pibroch.data import EncodedDataset, Loader
from pibroch.data.order import EpochOrder
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.score.checkpoint import evaluate_checkpoint, open_for
from pibroch.score.split import score_split
from pibroch.serve.aot import traced
from pibroch.serve.export import ExportOptions, SavedRows, export_checkpoint
from pibroch.serve.from_checkpoint import read_verified
from pibroch.serve.inputs import encoded_tensors
from pibroch.serve.retrieval import Items, Retriever
from pibroch.serve.whole_model import WholeModel
from pibroch.state.checkpoint_folder import find_checkpoint
from served import serving

NUM_SAMPLES = 500
NUM_TRAINED = 350
BATCH_SIZE = 48  # of 350: the last one is ragged
SEED = 5
COLUMNS = ("clicked", "seconds", "importance", "at", "age", "user", "item", "tags")
FIRST_TIME = 1_760_000_000_000


@dataclass(frozen=True)
class Input:
    """A form of input.

    Attributes:
        ids: ``fixed``, ``raw``, or ``mixed``: raw users of fixed items.
        lists, weights, times, labels: whether samples have several tags, a weight, a time, a second
            label.
        model: by name.
    """

    ids: str
    lists: bool
    weights: bool
    times: bool
    labels: bool
    model: str

    @property
    def schema(self):
        raw = {"fixed": (), "raw": ("user", "item", "tags"), "mixed": ("user", "tags")}[self.ids]
        names = ["user", *(["tags"] if self.lists else []), "item"]
        lines = ['labels = ["clicked", "seconds"]' if self.labels else 'label = "clicked"']
        lines += ['weight = "importance"'] * self.weights
        lines += ['time = "at"', 'time_unit = "ms"'] * self.times
        lines += ["[target.clicked]", "values = { no = 0, yes = 1 }"]
        lines += ["[target.seconds]", 'kind = "number"'] * self.labels
        lines += ["[dense.age]", 'transform = "identity"']
        for name in names:
            lines += [f"[categorical.{name}]"]
            lines += ['encoding = "raw"'] if name in raw else ["min_count = 1"]
            lines += ["multi_hot = true"] * (name == "tags")
        return Schema.from_toml("\n".join(lines))

    def settings(self):
        """Of a recipe."""
        found = ["model.name=dlrm", "model.bottom=[8]", "model.top=[16]"]
        if self.model == "two_tower":
            width = "vector_width=4, item_features=['item']"
            found = [f"model={{name='two_tower', dim=4, top=[8], {width}}}"]
        if self.labels:
            found += ["tasks.seconds.loss={name='mse'}"]
            if self.model == "dlrm":
                found[:3] = ["model={name='mmoe', dim=4, experts=2}"]
        if self.ids != "fixed":
            expiry = ", expire_after_seconds=100" if self.times else ", expire_after=3"
            rows = f"{{name='hashed', capacity=30, admit_after=2{expiry}}}"
            found += [f"embedding.tables.{name}.rows={rows}" for name in self._raw_tables()]
        return found

    def _raw_tables(self):
        return [feature.name for feature in self.schema.categorical if feature.is_raw]


@cache
def records():
    """Samples as texts, in order of time; some users and items are not in the first ones."""
    rng = np.random.default_rng(SEED)
    found = []
    for number in range(NUM_SAMPLES):
        user = int(rng.zipf(1.5)) % 40
        item = int(rng.zipf(1.5)) % 25
        tags = rng.integers(0, 9, rng.integers(0, 4))
        liking = user % 5 - item % 3 + rng.normal()
        row = ("yes" if liking > 0 else "no", f"{liking:.3f}", f"{rng.choice([0, 0.5, 1, 3]):g}")
        row += (str(FIRST_TIME + 997 * number), f"{rng.normal():.3f}")
        row += ("" if number % 29 == 0 else f"u{user}", f"i{item}")
        found.append(dict(zip(COLUMNS, (*row, "|".join(f"t{tag}" for tag in tags)), strict=True)))
    return found


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


class Place:
    """What the tests of a session share: processes that stand, data sets, runs, scores.

    Args:
        folder: for files.
        worlds: see :class:`world.Worlds`.
        servers, oracle, processors: teams, see :class:`role_team.RoleTeam`.
    """

    def __init__(self, folder, worlds, servers, oracle, processors):
        self.folder = folder
        self.worlds = worlds
        self.servers = servers
        self.oracle = oracle
        self.processors = processors
        self._numbers = count()
        self._data = {}
        self._runs = {}
        self._logits = {}

    def new_path(self, name, suffix=""):
        return self.folder / f"{name}-{next(self._numbers)}{suffix}"

    def data(self, form):
        """The data set of a form, and a stream of its training samples in the order of training."""
        schema = form.schema
        key = schema.to_toml()
        if key not in self._data:
            folder = self.new_path("data")
            folder.mkdir()
            source = TextSource(
                write_csv(folder / "log.csv", records()), schema.separator, schema.quotes
            )
            shares = f"time:{NUM_TRAINED / NUM_SAMPLES}/0.1/0.2"
            prepare([source], schema, folder / "set", PrepareOptions(SplitRule.parse(shares)))
            (folder / "stream").mkdir()
            order = EpochOrder(NUM_TRAINED, SEED, 0).take(0, NUM_TRAINED)
            write_csv(folder / "stream" / "log.csv", [records()[place] for place in order])
            self._data[key] = folder
        return self._data[key]

    def config(self, form, *settings):
        base = {
            "seed": SEED,
            "data": {"dir": str(self.data(form) / "set")},
            "model": {"dim": 4},
            "embedding": {"optimizer": {"name": "adagrad", "lr": 0.1}},
            "optimizer": {"name": "sgd", "lr": 0.05},
            "train": {
                "epochs": 1,
                "batch_size": BATCH_SIZE,
                "checkpoint_every": 4,
                "log_every": 1,
                "threads": 1,
            },
        }
        return change_config(check_config(base, "the test's"), [*form.settings(), *settings])

    def run(self, form, way):
        """The directory of a run, or the error that refuses it."""
        if (form, way) not in self._runs:
            folder = self.new_path("run")
            try:
                WAYS[way](self, form, folder)
                self._runs[form, way] = folder
            except (pb.PibrochError, AssertionError) as error:
                self._runs[form, way] = error
        return self._runs[form, way]

    def logits(self, form, way):
        """Of the test split, ``[N, T]``, by a predictor over the loader's batches."""
        if (form, way) not in self._logits:
            predictor = pb.Predictor.open(find_checkpoint(self.run(form, way)))
            batches = Loader(self.test_split(form), 37)
            found = torch.cat([predictor.logits(batch) for batch in batches])
            self._logits[form, way] = two_dims(found)
        return self._logits[form, way]

    def test_split(self, form):
        return EncodedDataset.open(self.data(form) / "set").split("test")


def two_dims(numbers):
    found = np.asarray(numbers, np.float64)
    return found.reshape(len(found), -1)


def by(size, *settings, team=None):
    """A way: so many ranks with these settings, which meet a team; all are processes that stand."""

    def run(place, form, folder):
        wanted = list(settings)
        if team is not None:
            name, of_recipe = team
            wanted.append(f"{of_recipe}.rendezvous='{getattr(place, name).rendezvous}'")
        config = place.config(form, *wanted).model_dump()
        refusals = place.worlds(size).run(training_cases.train_or_refuse, config, str(folder))
        if refusals[0] is not None:
            raise refusals[0]

    return run


def stream_settings(place, form):
    path = place.data(form) / "stream"
    return [f"data.stream={{path='{path}', partitions=1}}"]


def by_stream(place, form, folder):
    by(1, *stream_settings(place, form))(place, form, folder)


def by_replay(place, form, folder):
    """A stream whose process is killed behind a checkpoint, and goes on by its journal."""
    if isinstance(refused := place.run(form, "local"), Exception):
        raise refused
    recipe = folder.with_suffix(".toml")
    recipe.write_text(to_toml(place.config(form, *stream_settings(place, form)).model_dump()))
    with Team(recipe, "--run-dir", folder, "--follow") as team:
        wait_until(lambda: steps(folder) >= 6 or team.process.poll() is not None)
        assert team.process.poll() is None, team.end() or team.output
        for pid in [*team.pids().values(), team.process.pid]:
            os.kill(pid, signal.SIGKILL)
    with Team("--run-dir", folder, "--resume", "--until-idle", 0.1) as team:
        assert team.end() == 0, team.output


LOOKAHEAD = ["embedding.exchange=lookahead", "embedding.lookahead=3"]
WAYS = {
    "local": by(1, "embedding.exchange=local"),
    "ranks": by(2, "embedding.exchange=alltoall"),
    "processors": by(1, "data.processors=2", team=("processors", "data")),
    "processors of ranks": by(2, "data.processors=2", team=("processors", "data")),
    "lookahead": by(2, *LOOKAHEAD),
    "servers": by(2, *LOOKAHEAD, "embedding.servers=3", team=("servers", "embedding")),
    "oracle": by(2, *LOOKAHEAD, "embedding.oracle=central", team=("oracle", "embedding")),
    "stream": by_stream,
    "replay": by_replay,
    "accumulate": by(1, f"train.batch_size={BATCH_SIZE // 3}", "train.accumulate=3"),
    "assign": by(2, *LOOKAHEAD, "embedding.exchange.assign=rows"),
}
ALIKE = {
    "local": ("local", "processors", "stream", "replay"),
    "ranks": ("ranks", "processors of ranks", "lookahead", "servers", "oracle"),
}
"""Ways whose numbers have the bits of the first."""


def by_own_evaluation(place, form, way):
    """The run's figures of the test split are those of its best model's scores."""
    run = place.run(form, way)
    summary = json.loads((run / "summary.json").read_text())
    data = EncodedDataset.open(place.data(form) / "set")
    evaluated = evaluate_checkpoint(run, data, "test")
    for name in ("auc", "logloss"):
        assert abs(summary[name] - getattr(evaluated.metrics, name)) < 1e-6, name
    return None


def scores_in(path, form):
    frame = pl.read_parquet(path)
    suffixes = [f".{name}" for name in form.schema.label_columns] if form.labels else [""]
    return two_dims(frame.select([f"score{suffix}" for suffix in suffixes]).to_numpy())


def by_evaluate(place, form, way):
    out = place.new_path("evaluated", ".parquet")
    data = EncodedDataset.open(place.data(form) / "set")
    evaluate_checkpoint(place.run(form, way), data, "test", out)
    return scores_in(out, form)


def by_predict(place, form, way):
    out = place.new_path("predicted", ".parquet")
    data = EncodedDataset.open(place.data(form) / "set")
    predictor, checkpoint = open_for(place.run(form, way), data)
    score_split(predictor, checkpoint, data, "test", out)
    return scores_in(out, form)


def raw_rows(form):
    """The test split's samples, as a client sends them."""
    used = form.schema.used_columns(with_label=False)
    return [{name: row[name] for name in used} for row in records()[-NUM_SAMPLES // 5 :]]


def by_predictor(place, form, way):
    return pb.Predictor.open(place.run(form, way)).score_raw(raw_rows(form))


def by_export(place, form, way):
    out = place.new_path("export")
    export_checkpoint(find_checkpoint(place.run(form, way)), out, ExportOptions())
    return pb.Predictor.open(out).score_raw(raw_rows(form))


def by_http(place, form, way):
    with serving(place.run(form, way)) as server:
        answer = server.ask("POST", "/score", {"rows": raw_rows(form)})
    assert answer.status == 200, answer
    return answer.json["scores"]


def by_aot(place, form, way):
    """The program that is compiled, by Python: compiling it takes half a minute."""
    folder = find_checkpoint(place.run(form, way))
    model = WholeModel.of(SavedRows.of(folder, read_verified(folder)))
    program = traced(model).module()
    batch = next(iter(Loader(place.test_split(form), NUM_SAMPLES)))
    return program(*encoded_tensors(form.schema, batch).values())[0]


def by_retrieval(place, form, way):
    """The best items of each user have the logits of the pairs."""
    predictor = pb.Predictor.open(place.run(form, way))
    path = place.new_path("items", ".csv")
    items = sorted({row["item"] for row in records()[:NUM_TRAINED]})
    pl.DataFrame({"item": items}).write_csv(path)
    retriever = Retriever(predictor, Items.read(path))
    rows = raw_rows(form)[:20]
    users = {name: [row[name] for row in rows] for name in retriever.user_columns}
    best, logits = retriever(users, 5)
    pairs = [row | {"item": item} for row, some in zip(rows, best, strict=True) for item in some]
    right = predictor.logits(predictor.encode(pairs)).reshape(len(rows), -1).numpy()
    np.testing.assert_allclose(logits, right, rtol=1e-4, atol=1e-5)
    return None


READERS = {
    "own evaluation": by_own_evaluation,
    "evaluate": by_evaluate,
    "predict": by_predict,
    "predictor": by_predictor,
    "export": by_export,
    "http": by_http,
    "aot": by_aot,
    "retrieval": by_retrieval,
}
