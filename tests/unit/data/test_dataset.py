import json
import shutil

import numpy as np
import pytest

from pibroch.data.dataset import EncodedDataset
from pibroch.data.presets import criteo_schema
from pibroch.errors import DataError


@pytest.fixture
def dataset(prepare_criteo, criteo_file, tmp_path) -> EncodedDataset:
    prepare_criteo(criteo_file)
    return EncodedDataset.open(tmp_path / "dataset")


def test_arrays_are_read_only_maps(dataset):
    train = dataset.split("train")
    assert len(train) == 1400
    assert isinstance(train.ids, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        train.ids[0, 0] = 1
    assert all(train.ids.max(0) < list(dataset.num_rows.values()))
    assert dataset.truth is None
    assert dataset.best_possible_auc is None


def test_hot_rows_lie_together(dataset):
    for feature in ("C1", "C26"):
        counts = dataset.access_counts(feature)[2:]
        assert (np.diff(counts) <= 0).all()
        assert counts[-1] >= 2


def test_fingerprint_changes_with_what_a_checkpoint_depends_on(
    dataset, prepare_criteo, criteo_file, criteo_lines, tmp_path
):
    def other(name: str, **settings) -> str:
        prepare_criteo(settings.pop("path", criteo_file), tmp_path / name, **settings)
        return EncodedDataset.open(tmp_path / name).fingerprint

    assert other("same") == dataset.fingerprint
    shuffled = tmp_path / "reversed.tsv"
    shuffled.write_text("\n".join(reversed(criteo_lines)))
    changed = [
        other("min", schema=criteo_schema(min_count=3)),
        other("bins", schema=criteo_schema(bins=False)),
        other("hash", schema=criteo_schema().with_changes(hash_buckets={"C3": 10})),
        other("vocabulary", path=shuffled),
    ]
    assert len({dataset.fingerprint, *changed}) == 5


@pytest.mark.parametrize("name", ["train/ids.i32", "test/labels.u8", "tables/C4.codes.u64"])
def test_truncated_and_missing_files_are_named(dataset, name):
    path = dataset.path / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=rf"{name}, .* bytes long.*need .* bytes.*do: prepare"):
        EncodedDataset.open(dataset.path)
    path.unlink()
    with pytest.raises(DataError, match=f"no .*{name}"):
        EncodedDataset.open(dataset.path)


def test_verify_finds_a_changed_byte(dataset):
    dataset.verify()
    path = dataset.path / "validation/dense.f32"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"validation/dense\.f32, whose contents have changed"):
        EncodedDataset.open(dataset.path).verify()


def test_other_folders_and_manifests_are_refused(dataset, tmp_path):
    with pytest.raises(DataError, match=r"no dataset\.json"):
        EncodedDataset.open(tmp_path)
    with pytest.raises(DataError, match=r"no dataset\.json"):
        EncodedDataset.open(tmp_path / "nowhere")
    manifest = dataset.path / "dataset.json"
    whole = manifest.read_text()
    for content, message in (
        (whole[:500], "no JSON"),
        ("{}", "of another kind"),
        (json.dumps(json.loads(whole) | {"version": 99}), "format version 99"),
        (json.dumps({k: v for k, v in json.loads(whole).items() if k != "samples"}), "damaged"),
        (json.dumps(json.loads(whole) | {"schema": {}}), "damaged"),
    ):
        manifest.write_text(content)
        with pytest.raises(DataError, match=message):
            EncodedDataset.open(dataset.path)
    shutil.rmtree(dataset.path)


def test_unknown_names_are_refused(dataset):
    with pytest.raises(DataError, match="train, validation, test"):
        dataset.split("holdout")
    with pytest.raises(DataError, match="table `C99`"):
        dataset.access_counts("C99")
