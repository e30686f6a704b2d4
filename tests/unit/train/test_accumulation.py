"""Steps in several passes through the dense layers."""

import pytest
import torch

from pibroch.data import EncodedDataset, Loader
from pibroch.errors import CheckpointError, ConfigError
from pibroch.state.checkpoint_folder import CheckpointFolder
from pibroch.train.session import build_session
from small_run import files_below, make_config, train_here

NO_NORM = "model.batch_norm=false"
IN_PASSES = (NO_NORM, "train.batch_size=30", "train.accumulate=4")


class Step:
    """A step of 100 samples, of 120 at most."""

    def __init__(self, data, *changes):
        session = build_session(make_config(data, NO_NORM, *changes), EncodedDataset.open(data))
        batch = next(iter(Loader(session.dataset.split("train"), 100, shuffle=True, seed=3)))
        calls = []
        session.model.register_forward_hook(lambda _, args, out: calls.append(len(args[0])))
        session.set_training(True)
        before = self.rows_of(session)
        loss = session.loss(batch, 1)
        assert torch.equal(self.rows_of(session), before), "rows are updated in backward"
        loss.backward()
        self.loss = loss.item()
        self.samples_of_calls = calls
        self.gradients = [p.grad for p in session.model.parameters()]
        self.rows = self.rows_of(session)
        self.updates = session.embeddings.step
        assert not torch.equal(self.rows, before)

    @staticmethod
    def rows_of(session):
        return torch.from_numpy(session.embeddings.shard.space.copy())


@pytest.mark.parametrize("loss", ["bce", "focal"])
@pytest.mark.parametrize("model", ["dlrm", "deepfm"])
def test_a_step_in_passes_is_a_step_of_one_batch(data, model, loss):
    sgd = "embedding.optimizer={name='sgd', lr=1.0}"
    changes = f"loss.name={loss}", f"model.name={model}", sgd
    whole = Step(data, *changes)
    passes = Step(data, *changes, *IN_PASSES)
    assert whole.samples_of_calls == [100]
    assert passes.samples_of_calls == [30, 30, 30, 10]
    assert passes.updates == 1
    assert passes.loss == pytest.approx(whole.loss, rel=1e-6)
    torch.testing.assert_close(passes.rows, whole.rows, rtol=1e-5, atol=1e-7)
    for gradient, expected in zip(passes.gradients, whole.gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-7)


def test_one_pass_has_the_bits_of_none(data):
    one = Step(data, "train.batch_size=100", "train.accumulate=2")
    whole = Step(data)
    assert one.loss == whole.loss
    assert torch.equal(one.rows, whole.rows)
    assert all(map(torch.equal, one.gradients, whole.gradients))


def test_a_run_counts_steps_of_all_samples(data, tmp_path):
    cosine = "schedule={name='cosine', warmup_steps=5}"
    runs = [
        train_here(make_config(data, cosine, *changes), tmp_path / name)
        for name, changes in {
            "passes": (NO_NORM, "train.batch_size=25", "train.accumulate=4"),
            "whole": (NO_NORM, "train.batch_size=100"),
        }.items()
    ]
    passes, whole = (run.metrics() for run, _ in runs)
    assert runs[0][1].summary.samples == runs[1][1].summary.samples == 4200
    for key in ("kind", "step"):
        assert [each[key] for each in passes] == [each[key] for each in whole]
    training = [[each for each in run if each["kind"] == "training"] for run in (passes, whole)]
    for got, expected in zip(*training, strict=True):
        assert got["learning_rate"] == expected["learning_rate"]
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-3)


def test_a_resumed_run_has_the_same_bits(data, tmp_path):
    common = (*IN_PASSES, "train.keep=9", "train.evaluate_every=7", "train.average=0.9")
    long = make_config(data, "train.epochs=none", "train.steps=20", *common)
    first, _ = train_here(long, tmp_path / "a")
    train_here(make_config(data, "train.epochs=none", "train.steps=14", *common), tmp_path / "b")
    second, result = train_here(long, tmp_path / "b")
    assert result.summary.steps == 20
    step = "step-00000020"
    assert files_below(first.checkpoints_path / step) == files_below(second.checkpoints_path / step)


def test_a_run_keeps_its_number_of_passes(data, tmp_path):
    changes = "train.epochs=none", "train.steps=3", *IN_PASSES
    run, _ = train_here(make_config(data, *changes), tmp_path / "run")
    assert CheckpointFolder(run.checkpoints_path, 2).latest() is not None
    with pytest.raises(CheckpointError, match=r"train.accumulate = 2.*step 3"):
        train_here(
            make_config(data, *changes, "train.accumulate=2", "train.steps=6"), tmp_path / "run"
        )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["model.batch_norm=true"], "batch norm"),
        (["loss.name=pairwise"], "compares the samples"),
    ],
)
def test_what_depends_on_other_samples_is_refused(data, changes, reason):
    config = make_config(data, *IN_PASSES, *changes)
    with pytest.raises(ConfigError, match=reason):
        build_session(config, EncodedDataset.open(data))
