"""A server in a process of its own, asked over loopback; ``tritonclient`` speaks the protocol."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import tritonclient.http as triton

import pibroch as pb
from pibroch.data import EncodedDataset
from pibroch.data.loader import batch_of
from pibroch.data.sources import TextSource
from pibroch.score.checkpoint import evaluate_checkpoint
from pibroch.serve.export import ExportOptions, export_checkpoint
from raw_clicks import COLUMNS, write_csv
from served import ask, serving
from small_run import run_command, train_here

SAMPLE = Path(__file__).parents[4] / "shared/data/criteo_kaggle_137k.tsv.gz"


def evaluated(run, data, out, split="test"):
    evaluate_checkpoint(run, EncodedDataset.open(data), split, out)
    return pl.read_parquet(out)["score"].to_numpy()


@pytest.fixture(scope="module")
def ctr(clicks, tmp_path_factory):
    """A server of the clicks' export, and what evaluation says of the test split.

    ``.server``, ``.scores``, ``.rows``.
    """
    folder = tmp_path_factory.mktemp("served")
    export_checkpoint(clicks.run, folder / "ctr")
    scores = evaluated(clicks.run, clicks.data, folder / "scores.parquet")
    with serving(folder / "ctr") as server:
        url = "{}:{}".format(*server.address)
        yield SimpleNamespace(
            server=server,
            url=url,
            scores=scores,
            rows=clicks.rows[-len(scores) :],
            data=clicks.data,
            folder=folder,
        )


def encoded_inputs(data, first=0, after=None, split="test"):
    """The protocol's tensors of a data set's samples, made by hand from what lies in its files."""
    samples = EncodedDataset.open(data).split(split)
    after = len(samples) if after is None else after
    inputs = {
        "dense": (samples.dense[first:after], "FP32"),
        "ids": (samples.ids[first:after].astype(np.int64), "INT64"),
    }
    for name, bags in samples.bags.items():
        offsets = bags.offsets[first : after + 1]
        inputs[f"{name}.values"] = (bags.values[offsets[0] : offsets[-1]].astype(np.int64), "INT64")
        inputs[f"{name}.lengths"] = (np.diff(offsets), "INT64")
    return inputs


def raw_inputs(rows, columns):
    return {
        name: (np.array([row[name].encode() for row in rows], object), "BYTES") for name in columns
    }


def infer(url, model, inputs, binary, outputs=("score",), version=""):
    tensors = []
    for name, (array, kind) in inputs.items():
        tensors.append(triton.InferInput(name, list(array.shape), kind))
        tensors[-1].set_data_from_numpy(np.ascontiguousarray(array), binary_data=binary)
    wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in outputs]
    with triton.InferenceServerClient(url) as client:
        response = client.infer(
            model, tensors, outputs=wanted, model_version=version, request_id="7"
        )
        assert response.get_response()["id"] == "7"
        return response


@pytest.mark.parametrize("binary", [False, True], ids=["json", "binary"])
@pytest.mark.parametrize("kind", ["encoded", "raw"])
def test_infer_scores_as_evaluation_does(ctr, binary, kind):
    columns = COLUMNS[1:]
    inputs = encoded_inputs(ctr.data) if kind == "encoded" else raw_inputs(ctr.rows, columns)
    response = infer(ctr.url, "ctr", inputs, binary, ("logit", "score"))
    assert np.abs(response.as_numpy("score") - ctr.scores).max() < 1e-6
    assert (
        np.abs(1 / (1 + np.exp(-response.as_numpy("logit").astype(float))) - ctr.scores).max()
        < 1e-6
    )
    version = response.get_response()["model_version"]
    again = infer(ctr.url, "ctr", inputs, binary, version=version)
    assert np.array_equal(again.as_numpy("score"), response.as_numpy("score"))


def test_raw_rows_in_every_form(ctr):
    path = write_csv(ctr.folder / "rows.csv", ctr.rows)
    header = ",".join(COLUMNS[1:])
    unlabelled = "\n".join(
        [header, *(",".join(row[name] for name in COLUMNS[1:]) for row in ctr.rows)]
    )
    bodies = [
        ({"rows": ctr.rows}, None),
        (ctr.rows, None),
        ({"columns": {name: [row[name] or None for row in ctr.rows] for name in COLUMNS}}, None),
        (path.read_bytes(), {"content-type": "text/csv; charset=utf-8"}),
        (unlabelled.encode(), {"content-type": "text/csv"}),
    ]
    for body, headers in bodies:
        response = ctr.server.ask("POST", "/score", body, headers)
        assert response.status == 200, response.body
        assert np.abs(np.array(response.json["scores"]) - ctr.scores).max() < 1e-6
        assert response.json["model_name"] == "ctr" and response.json["model_version"].endswith(
            "-float32"
        )
    lines = ctr.server.ask("POST", "/score", {"rows": ctr.rows}, {"accept": "text/csv"})
    assert np.abs(np.array(lines.body.decode().split(), float) - ctr.scores).max() < 1e-6


def test_embeddings_of_raw_rows_and_of_ids(ctr):
    rows = ctr.rows[:40]
    predictor = pb.Predictor.open(ctr.folder / "ctr")
    expected = predictor.embed(predictor.encode(rows)).numpy()
    response = ctr.server.ask("POST", "/embed", {"rows": rows})
    assert response.status == 200 and response.json["model_version"] == predictor.version
    assert tuple(response.json["features"]) == predictor.features
    assert np.array_equal(np.array(response.json["embeddings"], np.float32), expected)
    response = ctr.server.ask(
        "POST", "/embed", {"rows": rows}, {"accept": "application/octet-stream"}
    )
    length = int(response.headers["inference-header-content-length"])
    (output,) = json.loads(response.body[:length])["outputs"]
    assert np.array_equal(
        np.frombuffer(response.body[length:], "<f4").reshape(output["shape"]), expected
    )

    first = EncodedDataset.open(ctr.data).samples["test"] - len(ctr.rows)
    encoded = encoded_inputs(ctr.data, first, first + 40)
    ids = {name: tensor for name, tensor in encoded.items() if name != "dense"}
    requested = [
        (ids, ("embedding",)),
        (encoded, ("embedding", "score")),
        (raw_inputs(rows, COLUMNS[1:]), ("embedding",)),
    ]
    for inputs, outputs in requested:
        for binary in (False, True):
            response = infer(ctr.url, "ctr", inputs, binary, outputs)
            assert np.array_equal(response.as_numpy("embedding"), expected)
            assert (
                "score" not in outputs
                or np.abs(response.as_numpy("score") - ctr.scores[:40]).max() < 1e-6
            )
    assert ctr.server.metric('pibroch_requests_total{endpoint="embed",status="200"}') == 2


def test_embeddings_are_refused_as_scores_are(ctr):
    row = ctr.rows[0]
    wrong = ctr.server.ask("POST", "/embed", {"rows": [row, {**row, "age": "old"}]})
    assert wrong.status == 400 and "age" in wrong.reason
    assert ctr.server.ask("GET", "/embed").status == 405
    ids = {
        name: tensor for name, tensor in encoded_inputs(ctr.data, 0, 3).items() if name != "dense"
    }
    with pytest.raises(triton.InferenceServerException, match="dense"):  # which scores need
        infer(ctr.url, "ctr", ids, True)
    ids["ids"][0][1, 0] = 10**6
    with pytest.raises(triton.InferenceServerException, match="1000000"):
        infer(ctr.url, "ctr", ids, True, ("embedding",))
    with serving(ctr.folder / "ctr", "--max-body-mb", 0.01) as small:
        many = ctr.server.ask("POST", "/embed", {"rows": ctr.rows[:20]})
        assert many.status == 200
        few = small.ask("POST", "/embed", {"rows": ctr.rows[:20]})
        assert few.status == 200
        bags = {name: np.zeros(200, np.int64) for name in ("tags.lengths",)} | {
            "tags.values": np.zeros(0, np.int64)
        }
        inputs = {
            "ids": (np.zeros((200, 4), np.int64), "INT64"),
            **{name: (bag, "INT64") for name, bag in bags.items()},
        }
        with pytest.raises(triton.InferenceServerException, match="bytes; need at most"):
            infer("{}:{}".format(*small.address), "ctr", inputs, True, ("embedding",))


def test_metadata_and_health(ctr):
    with triton.InferenceServerClient(ctr.url) as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("ctr")
        assert not client.is_model_ready("other") and not client.is_model_ready("ctr", "1")
        assert client.get_server_metadata()["name"] == "pibroch"
        metadata = client.get_model_metadata("ctr")
    assert [(each["name"], each["shape"]) for each in metadata["inputs"]] == [
        ("dense", [-1, 2]),
        ("ids", [-1, 4]),
        ("tags.values", [-1]),
        ("tags.lengths", [-1]),
    ]
    assert metadata["outputs"][2] == {"name": "embedding", "datatype": "FP32", "shape": [-1, 5, 4]}
    assert [each["name"] for each in metadata["raw_inputs"]] == list(COLUMNS[1:])
    page = ctr.server.ask("GET", "/openapi.json").json
    assert {"/score", "/v2/models/{model}/infer", "/metrics"} <= set(page["paths"])
    assert ctr.server.ask("GET", "/docs").status == 200


def test_requests_at_once_get_their_own_answers(ctr):
    before = ctr.server.metric('pibroch_requests_total{endpoint="score",status="200"}')
    answers = {}

    def client(number):
        connection = ctr.server.connect()
        for place in range(number, len(ctr.rows), 8):
            answer = ask(connection, "POST", "/score", {"rows": ctr.rows[place : place + 1]})
            answers[place] = answer.json["scores"][0]
        connection.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert (
        np.abs(np.array([answers[place] for place in range(len(ctr.rows))]) - ctr.scores).max()
        < 1e-6
    )
    after = ctr.server.metric('pibroch_requests_total{endpoint="score",status="200"}')
    assert after - before == len(ctr.rows)
    assert ctr.server.metric('pibroch_request_seconds_count{endpoint="score"}') >= len(ctr.rows)
    assert ctr.server.metric("pibroch_requests_open") == 1


@pytest.mark.skipif(not SAMPLE.exists(), reason="needs ../shared/data/criteo_kaggle_137k.tsv.gz")
def test_ten_thousand_rows_of_the_criteo_sample(tmp_path):
    from pibroch.config import load_recipe

    data = tmp_path / "criteo"
    count = 10_000
    assert run_command("data", "prepare", "criteo", SAMPLE, "--out", data).returncode == 0
    recipe = Path(__file__).parents[3] / "recipes/criteo_kaggle_sample.toml"
    config = load_recipe(
        str(recipe), [f"data.dir={str(data)!r}", "train.steps=40", "train.evaluate_every=40"]
    )
    run, _ = train_here(config, tmp_path / "run")
    expected = evaluated(run.path, data, tmp_path / "scores.parquet")[-count:]
    text = b"".join(
        piece.text
        for piece in TextSource(SAMPLE, "\t", False, tuple("abc")).pieces(_start(), 32 << 20)
    )
    lines = text.splitlines()[-count:]
    export_checkpoint(run.path, tmp_path / "sample")
    num_samples = EncodedDataset.open(data).samples["test"]
    with serving(tmp_path / "sample", "--max-rows", count) as server:
        response = server.ask("POST", "/score", b"\n".join(lines), {"content-type": "text/csv"})
        assert np.abs(np.array(response.json["scores"]) - expected).max() < 1e-6
        names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
        rows = [dict(zip(names, line.decode().split("\t"), strict=True)) for line in lines]
        response = server.ask("POST", "/score", {"rows": rows})
        assert np.abs(np.array(response.json["scores"]) - expected).max() < 1e-6
        url = "{}:{}".format(*server.address)
        inputs = encoded_inputs(data, num_samples - count)
        for binary in (False, True):
            scores = infer(url, "sample", inputs, binary).as_numpy("score")
            assert np.abs(scores - expected).max() < 1e-6
    losses = {}
    for dtype in ("float16", "int8"):
        export_checkpoint(run.path, tmp_path / dtype, ExportOptions(dtype))
        losses[dtype] = _auc(run.path, data) - _auc(tmp_path / dtype, data)
    assert max(losses.values()) <= 2e-4


def _start():
    from pibroch.data.sources import Place

    return Place()


def _auc(path, data):
    from pibroch.train.metrics import Predictions

    predictor = pb.Predictor.open(path)
    samples = EncodedDataset.open(data).split("test")
    predictions = Predictions()
    batch = batch_of(samples, np.arange(len(samples)))
    predictions.add(predictor.logits(batch).numpy(), batch.labels.numpy())
    return predictions.result().metrics.auc


def test_a_run_is_served_as_it_is_and_the_newest_by_default(clicks, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(clicks.run)
    with serving(None, cwd=tmp_path) as server:
        answer = server.ask("POST", "/score", {"rows": clicks.rows[:3]})
        assert answer.status == 200 and answer.json["model_name"] == "mine"
        expected = pb.Predictor.open(clicks.run).score_raw(clicks.rows[:3]).numpy()
        assert np.abs(np.array(answer.json["scores"]) - expected).max() < 1e-6
        assert "open" in server.end()
    ran = run_command("serve", cwd=tmp_path / "runs")
    assert ran.returncode == 2 and "pibroch train" in ran.stderr


def test_without_dictionaries_encoded_samples_are_scored(clicks, tmp_path):
    moved = clicks.data.rename(tmp_path / "moved")
    try:
        with serving(clicks.run) as server:
            refused = server.ask("POST", "/score", {"rows": clicks.rows[:1]})
            assert refused.status == 400 and "pibroch export" in refused.reason
            url = "{}:{}".format(*server.address)
            assert infer(url, "run", encoded_inputs(moved, 0, 5), True).as_numpy("score").shape == (
                5,
            )
            body = {
                "inputs": [
                    {"name": name, "shape": [1], "datatype": "BYTES", "data": ["1"]}
                    for name in COLUMNS[1:]
                ]
            }
            assert server.ask("POST", "/v2/models/run/infer", json.dumps(body)).status == 400
        with serving(clicks.run, "--data", moved) as server:
            assert server.ask("POST", "/score", {"rows": clicks.rows[:1]}).status == 200
    finally:
        moved.rename(clicks.data)
