"""New exports and deltas beside a server under load.

PIBROCH_SOAK_RELOADS=10 is the whole measurement: 60 s, 20 deltas.
"""

import os
import shutil
import time
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest

import pibroch as pb
from pibroch.serve.delta import export_delta
from pibroch.serve.export import ExportOptions, export_checkpoint
from pibroch.serve.store import ModelStore
from served import Load, serving, until
from small_run import make_config, train_here

RELOADS = int(os.environ.get("PIBROCH_SOAK_RELOADS", "2"))
SECONDS = 60 if RELOADS > 2 else 0
DELTAS_PER_RELOAD = 2


@pytest.fixture(scope="module")
def line(clicks, tmp_path_factory):
    """Exports, each with two deltas on it, of one run.

    Folders in their order, and the scores of each by version.
    """
    folder = tmp_path_factory.mktemp("line")
    rows = clicks.rows[:24]
    expected = {}
    count = RELOADS * (1 + DELTAS_PER_RELOAD)
    steps = [
        "train.checkpoint_every=3",
        f"train.steps={3 * count}",
        f"train.keep={count}",
        "train.evaluate_every=300",
    ]
    config = make_config(
        clicks.data, *steps, f"train.full_checkpoint_every={1 + DELTAS_PER_RELOAD}"
    )
    run, _ = train_here(config, folder / "run")
    parts = []
    for number in range(1, count + 1):
        checkpoint = run.path / "checkpoints" / f"step-{3 * number:08d}"
        out = folder / "all" / str(number)
        if number % (1 + DELTAS_PER_RELOAD) == 1:
            export_checkpoint(checkpoint, out, ExportOptions("int8"))
        else:
            export_delta(checkpoint, out.with_name(str(number - 1)), out)
        predictor = pb.Predictor.open(out)
        expected[predictor.version] = predictor.score_raw(rows).numpy()
        parts.append((out, predictor.version))
    assert all(np.abs(a - b).max() > 1e-5 for a, b in combinations(expected.values(), 2))
    return SimpleNamespace(parts=parts, rows=rows, expected=expected)


def test_each_answer_is_of_one_version(line, tmp_path):
    """No request is lost, no answer is of two versions, and each new one is soon seen."""
    models = tmp_path / "ctr"
    fresh = []
    shutil.copytree(line.parts[0][0], models / "1")
    with serving(models, "--reload-every", 0.05) as server, Load(server, line) as load:
        load.until_seen(line.parts[0][1])
        begun = time.monotonic()
        for number, (folder, version) in enumerate(line.parts[1:], 2):
            coming = shutil.copytree(folder, tmp_path / "coming")
            coming.rename(models / str(number))
            published = time.monotonic()
            load.until_seen(version)
            fresh.append(time.monotonic() - published)
            due = begun + SECONDS * (number - 1) / len(line.parts)
            until(lambda due=due: time.monotonic() >= due)
        assert server.metric("pibroch_model_loads") == len(line.parts)
        assert server.metric("pibroch_model_load_failures") == 0
    assert not load.failures and set(load.seen) == set(line.expected)
    print(
        f"{len(load.seen)} answers of {len(line.parts)} versions, none lost; seconds from a"
        f" version's being there to the first answer of it: median {np.median(fresh):.3f}, most"
        f" {max(fresh):.3f}"
    )


def test_a_delta_whose_base_is_elsewhere_does_not_take_over(line, tmp_path):
    models = tmp_path / "ctr"
    shutil.copytree(line.parts[0][0], models / "1")
    with serving(models, "--reload-every", 0.05) as server:
        shutil.copytree(line.parts[2][0], tmp_path / "coming").rename(models / "3")
        until(lambda: server.metric("pibroch_model_load_failures") == 1)
        answer = server.ask("POST", "/score", {"rows": line.rows})
        assert answer.status == 200 and answer.json["model_version"] == line.parts[0][1]
        shutil.copytree(line.parts[1][0], tmp_path / "coming").rename(models / "2")
        os.utime(models / "3" / "delta.json")  # as if it were published again
        until(lambda: server.metric("pibroch_model_loads") == 2)
        answer = server.ask("POST", "/score", {"rows": line.rows})
        assert (
            np.abs(np.array(answer.json["scores"]) - line.expected[line.parts[2][1]]).max() < 1e-6
        )
        assert answer.json["model_version"] == line.parts[2][1] and "not beside it" in server.end()


def test_what_stands_on_the_same_export_scores_few_rows_before_it_answers(
    line, tmp_path, monkeypatch
):
    scored = []
    score_raw = pb.Predictor.score_raw

    def noted(predictor, columns):
        scored.append(max(map(len, columns.values())))
        return score_raw(predictor, columns)

    monkeypatch.setattr(pb.Predictor, "score_raw", noted)
    most = []
    store = None
    for folder, version in line.parts[:4]:
        shutil.copytree(folder, tmp_path / folder.name)
        if store is None:
            store = ModelStore(tmp_path)
        else:
            assert store.refresh()
        assert store.current.version == version
        most.append(max(scored))
        scored.clear()
    assert most == [1024, 64, 64, 1024]
