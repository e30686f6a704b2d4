import ctypes
import runpy
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pibroch as pb
from pibroch.collectives import Ranks
from pibroch.data import EncodedDataset, Loader
from pibroch.errors import CheckpointError, DataError, RowIdError
from pibroch.score.checkpoint import evaluate_checkpoint
from pibroch.state.checkpoint import restore_weights
from pibroch.state.checkpoint_folder import CheckpointFolder, find_checkpoint
from pibroch.state.manifest import read_manifest
from pibroch.train.metrics import Predictions
from pibroch.train.session import build_session
from small_run import make_config, train_here

CASES = {
    "dlrm": ["train.steps=12"],
    "dcnv2": ["model.name=dcnv2", "train.steps=5"],
    "deepfm": ["model.name=deepfm", "train.steps=5"],
    "wide_deep": ["model.name=wide_deep", "train.steps=5"],
    "bf16": ["train.bf16=true", "train.steps=5"],
    "narrow rows": ["embedding.dtype=bfloat16", "train.steps=12"],
    "narrow rows, averages": ["embedding.dtype=bfloat16", "train.average=0.9", "train.steps=12"],
    "averages": ["train.average=0.9", "train.steps=12"],
    "averages, incremental": [
        "train.average=0.9",
        "train.steps=13",
        "train.full_checkpoint_every=9",
    ],
}


@pytest.fixture(scope="module")
def batches(data):
    return list(Loader(EncodedDataset.open(data).split("test"), 100))


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    return train_here(
        make_config(data, *CASES["averages"]), tmp_path_factory.mktemp("runs") / "run"
    )[0]


def by_session(path, data):
    """Logits as a training session computes them from the same checkpoint."""
    folder = find_checkpoint(path)
    manifest = read_manifest(folder)
    session = build_session(manifest.config, EncodedDataset.open(data))
    restore_weights(folder, manifest, session, Ranks.alone().open_channel())

    def logits(batches):
        with session.predicting() as predict:
            return [predict(batch).clone() for batch in batches]

    return logits


@pytest.mark.parametrize("case", CASES)
def test_a_predictor_gives_the_bits_of_the_trainer(data, batches, tmp_path, case):
    run, _ = train_here(make_config(data, *CASES[case]), tmp_path / "run")
    path = CheckpointFolder(run.checkpoints_path, 2).latest()
    expected = by_session(path, data)(batches)
    predictor = pb.Predictor.open(path)
    for batch, logits in zip(batches, expected, strict=True):
        assert torch.equal(predictor.logits(batch), logits)
        torch.testing.assert_close(
            predictor(batch), torch.sigmoid(logits.double()), rtol=1e-14, atol=0
        )
    scores = predictor.scores(batches[0])
    assert scores.dtype == torch.float64 and scores.shape == (100,) and not scores.is_inference()


def test_it_needs_neither_the_data_nor_the_run(data, batches, run, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(find_checkpoint(run.path), moved)
    copy = shutil.copytree(data, tmp_path / "data")
    config = make_config(copy, "train.steps=3")
    other, _ = train_here(config, tmp_path / "other")
    expected = pb.Predictor.open(run.path)(batches[0])
    shutil.rmtree(copy)
    assert pb.Predictor.open(other.path)(batches[0]).shape == (100,)
    predictor = pb.Predictor.open(str(moved))
    assert torch.equal(predictor(batches[0]), expected)
    assert predictor.features == predictor.schema.keys == batches[0].keys
    assert predictor.config == run.config() and predictor.step == read_manifest(moved).progress.step


def test_evaluation_goes_through_it(data, run):
    dataset = EncodedDataset.open(data)
    evaluation = evaluate_checkpoint(run.path, dataset, "test")
    predictor = pb.Predictor.open(run.path)
    predictions = Predictions()
    for batch in Loader(dataset.split("test"), predictor.config.train.evaluate_batch_size):
        predictions.add(predictor.logits(batch).numpy(), batch.labels.numpy())
    assert evaluation == predictions.result()


def test_four_threads_at_once_get_the_same_bits(batches, run):
    predictor = pb.Predictor.open(run.path)
    expected = [predictor(batch) for batch in batches]
    start = threading.Barrier(4)
    actual = {}

    def ask(number):
        start.wait(60)
        actual[number] = [predictor(batch) for _ in range(5) for batch in batches]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(actual) == [0, 1, 2, 3]
    assert all(
        torch.equal(a, b)
        for scores in actual.values()
        for a, b in zip(scores, expected * 5, strict=True)
    )


@pytest.mark.skipif(sys.platform != "linux", reason="asks the OpenMP that torch brings")
def test_a_new_thread_computes_on_the_programs_number_of_threads(batches, run):
    openmp = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
    number = 1 if openmp.omp_get_num_procs() > 1 else 2
    torch.set_num_threads(number)
    predictor = pb.Predictor.open(run.path)
    results = []
    predictor.dense.register_forward_pre_hook(
        lambda *_: results.append(openmp.omp_get_max_threads())
    )
    thread = threading.Thread(target=predictor, args=(batches[0],))
    thread.start()
    thread.join(60)
    assert results == [number]


def test_the_programs_state_stays_as_it_is(batches, run):
    torch.set_num_threads(2)  # the recipe asks for 1
    state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        scores = pb.Predictor.open(run.path)(batches[0])
        assert torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    assert torch.equal(scores, pb.Predictor.open(run.path)(batches[0]))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == 2
    assert torch.empty(1).device.type == "cpu"


def test_a_damaged_checkpoint_is_refused_by_name(run, tmp_path):
    folder = shutil.copytree(find_checkpoint(run.path), tmp_path / "damaged")
    for name in (
        "tables/C1.safetensors",
        "dense_average.safetensors",
        "random.safetensors",
        "manifest.json",
    ):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        with pytest.raises(CheckpointError, match=Path(name).name):
            pb.Predictor.open(folder)
        (folder / name).write_bytes(content)
    pb.Predictor.open(folder)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        pb.Predictor.open(tmp_path)


def test_bad_batches_are_refused(batches, run):
    predictor = pb.Predictor.open(run.path)
    batch = batches[0]
    with pytest.raises(DataError, match="got a dict to predict"):
        predictor({})
    with pytest.raises(DataError, match=r"dense features \[100, 12\]"):
        predictor(replace(batch, dense=batch.dense[:, 1:]))
    with pytest.raises(RowIdError, match="id -1 for feature 'C1' in sample 7"):
        values = batch.values.clone()
        values[7] = -1
        predictor(replace(batch, values=values))
    assert predictor(batch).shape == (100,)


def test_an_empty_batch_has_no_scores(batches, run):
    batch = batches[0]
    nothing = pb.JaggedBatch.from_one_hot(
        batch.dense[:0],
        batch.keys,
        torch.empty(len(batch.keys), 0, dtype=torch.int64),
        batch.labels[:0],
    )
    assert pb.Predictor.open(run.path)(nothing).shape == (0,)


def test_dense_features_in_another_order_are_refused(data, run, tmp_path):
    dataset = EncodedDataset.open(data)
    dataset.schema = dataset.schema.model_copy(update={"dense": dataset.schema.dense[::-1]})
    with pytest.raises(CheckpointError, match=r"got dense features I13, .* in the data; need I1, "):
        evaluate_checkpoint(run.path, dataset, "test")


def test_the_example_scores_by_a_run(run):
    example = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "predict.py"))
    scores = example["main"](str(run.path))
    assert scores.shape == (4,) and bool(((scores > 0) & (scores < 1)).all())
