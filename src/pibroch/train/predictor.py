"""Scores from a checkpoint alone: no data set, no process group, no optimizer. Evaluation stands on it, and what serves.

Nothing of a predictor changes after it was opened, so that any number of threads may ask it at once: averages are worked out
when it opens, and what would be switched for a call (gradients, autocast) belongs to the calling thread.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pibroch.config import RunConfig
from pibroch.data import JaggedBatch
from pibroch.embedding import SGD, Table, Zeros
from pibroch.embedding.checkpoint import load_averages, load_tables
from pibroch.embedding.storage import verify_file
from pibroch.errors import CheckpointError, DataError
from pibroch.exchange import Embeddings
from pibroch.models import build_model
from pibroch.train.checkpoint_folder import find_checkpoint
from pibroch.train.dense_state import AVERAGES, WEIGHTS
from pibroch.train.manifest import Manifest, read_manifest, schema_of

_one_at_a_time = threading.Lock()  # torch remembers the device of `with torch.device(...)` for the whole process


class Predictor:
    """A trained model that predicts, by the moving averages where the run kept them. Made by :meth:`open`.

    Calls from several threads at once are safe; each uses as many threads as torch does, or fewer while others compute.
    Torch's number of threads and its random numbers stay as they are.

    Attributes:
        config: of the run.
        schema: of the data that it was trained on.
        step: after which it was saved.

    Example: see ``examples/predict.py``.
    """

    def __init__(self, manifest: Manifest, embeddings: Embeddings, model: nn.Module) -> None:
        self.config: RunConfig = manifest.config
        self.schema = schema_of(manifest)
        self.step = manifest.progress.step
        self._embeddings = embeddings.eval()
        self._model = model.eval().requires_grad_(False)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Load a checkpoint, every byte of it verified, or the best one of a run directory.

        Takes the time to read the files twice and the memory of the weights (and, with averages, up to 256 MiB on the way).

        Args:
            path: a checkpoint folder or a run directory.

        Raises:
            CheckpointError: when it is missing, damaged, or not of this version's models.
        """
        folder = find_checkpoint(Path(path))
        manifest = read_manifest(folder)
        for name, digest in manifest.files.items():
            verify_file(folder / name, digest)
        return cls(manifest, _load_embeddings(folder, manifest), _load_model(folder, manifest))

    @property
    def features(self) -> tuple[str, ...]:
        """The categorical features that a batch holds, in the order of the model."""
        return self._embeddings.row_space.features

    def logits(self, batch: JaggedBatch) -> Tensor:
        """Logits of a batch, float32 ``[B]``; its labels are not looked at.

        Args:
            batch: with all :attr:`features`, in any order, and the schema's dense features in theirs. One that lacks some
                of the features counts as having empty bags there, with one logged warning.

        Raises:
            DataError: when the batch does not fit the model.
            RowIdError: for an id outside its table.
        """
        if not isinstance(batch, JaggedBatch):
            raise DataError(
                f"a {type(batch).__name__} to predict",
                "a pibroch.JaggedBatch",
                "make one, e.g. by JaggedBatch.from_one_hot",
            )
        torch.get_num_threads()  # in a new thread it takes over the program's number, for which oneDNN would not ask
        is_bf16 = self.config.train.bf16
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=is_bf16, cache_enabled=False):
            logits: Tensor = self._model(batch.dense, partial(self._embeddings, batch))
        return logits.to(torch.float32, copy=True)  # a copy from outside inference mode is a tensor like any other

    def scores(self, batch: JaggedBatch) -> Tensor:
        """Probabilities of a batch, float32 ``[B]``; as :meth:`logits` else."""
        return torch.sigmoid(self.logits(batch))

    def embed(self, batch: JaggedBatch) -> Tensor:
        """The embeddings of a batch, float32 ``[B, F, D]``, features in the order of the model; errors as of :meth:`logits`."""
        with torch.no_grad():
            found: Tensor = self._embeddings(batch)
        return found

    def __call__(self, batch: JaggedBatch) -> Tensor:
        """See :meth:`scores`."""
        return self.scores(batch)


def _load_embeddings(folder: Path, manifest: Manifest) -> Embeddings:
    """All tables in this process, weights or their averages alone, which are float32: no optimizer state."""
    decay, step = manifest.config.train.average, manifest.progress.step
    dtype = manifest.config.embedding.dtype if decay is None else "float32"
    tables = [
        Table(name, saved.num_rows, saved.dim, initializer=Zeros(), dtype=dtype)
        for name, saved in manifest.tables.items()
    ]
    embeddings = Embeddings(tables, SGD(lr=1.0), "local")
    if decay is None:
        load_tables(folder, manifest.tables, embeddings.pieces())
    else:
        load_averages(folder, manifest.tables, embeddings.pieces(), decay, step)
    return embeddings


def _load_model(folder: Path, manifest: Manifest) -> nn.Module:
    """The dense layers, or their averages; none is initialised, which would draw random numbers."""
    schema = schema_of(manifest)
    with _one_at_a_time, torch.device("meta"):
        model = build_model(manifest.config.model, len(schema.dense), len(manifest.tables), tuple(manifest.tables))
    if manifest.config.train.average is None:
        state = load_file(folder / WEIGHTS)
    else:
        averages = load_file(folder / AVERAGES)
        state = {name: averages[f"module.{name}"] for name in model.state_dict() if f"module.{name}" in averages}
    try:
        model.to_empty(device="cpu").load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(
            f"dense layers in {folder} that are not those of its configuration: {str(error).splitlines()[-1].strip()}",
            "a checkpoint of this version's models",
            "load it with the version of pibroch that wrote it",
        ) from error
    return model
