"""Files that earlier releases wrote load as they did: rows, optimizer state and scores.

``tests/fixtures/formats`` holds them: a click log of 240 generated rows, two hashed or numbered
features, twelve steps on two ranks. ``checkpoint-2`` (incremental, with averages) is of format 2,
``checkpoint-3`` (incremental) of format 3; ``delta-1`` stands on ``export-1``. Scores were computed
by the release that wrote them.
"""

from hashlib import sha256
from pathlib import Path

import pytest

from pibroch.embedding import Adagrad, MemoryShard, Table, Zeros
from pibroch.serve.predictor import Predictor
from pibroch.state.files import verify_files
from pibroch.state.manifest import read_manifest
from pibroch.state.tables import load_tables

FORMATS = Path(__file__).parents[2] / "fixtures" / "formats"
ROWS = {"price": [0.5, 3.0, None], "city": ["Oslo", "", "Rome"], "user": ["3", "16", None]}
SCORES = {
    "checkpoint-2": [0.396724343, 0.395870775, 0.392593712],
    "checkpoint-3": [0.392898589, 0.392180622, 0.388616443],
    "exports/export-1": [0.392976046, 0.392300844, 0.388737321],
    "exports/delta-1": [0.392898589, 0.392180622, 0.388616443],
}
DIGESTS = {"checkpoint-2": "a4a0be17470d33c6", "checkpoint-3": "0e66bdd517e2d25d"}
"""Of the records of all rows, with optimizer state."""


@pytest.mark.parametrize("name", SCORES)
def test_an_older_format_scores_as_it_did(name):
    scores = Predictor.open(FORMATS / name).score_raw(ROWS).tolist()
    assert scores == pytest.approx(SCORES[name], abs=2e-7)


@pytest.mark.parametrize("name", DIGESTS)
def test_an_older_checkpoint_has_the_same_rows_and_optimizer_state(name):
    folder = FORMATS / name
    manifest = read_manifest(folder)
    verify_files(folder, manifest.files)
    assert any(part.is_delta for table in manifest.tables.values() for part in table.parts)
    tables = [
        Table(name, saved.num_rows, saved.dim, initializer=Zeros())
        for name, saved in manifest.tables.items()
    ]
    average = manifest.config.train.average
    shard = MemoryShard.whole(tables, Adagrad(lr=1.0, average=average), 0)
    load_tables(folder, manifest.tables, shard.views())
    assert sha256(shard.records.tobytes()).hexdigest()[:16] == DIGESTS[name]
