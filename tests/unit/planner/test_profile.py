import numpy as np
import pytest

from pibroch.data.dataset import EncodedDataset
from pibroch.data.loader import Loader
from pibroch.data.synthetic import SyntheticOptions, synthesize
from pibroch.embedding import Table
from pibroch.errors import ConfigError, DataError
from pibroch.planner.count import CountOptions, count_dataset
from pibroch.planner.kernels.profile import naive
from pibroch.planner.profile import AccessProfile, ProfileCounter


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "set"
    synthesize(SyntheticOptions(3000, 0, 400, None, True), path)
    return EncodedDataset.open(path)


def test_counts_are_those_of_the_dataset_and_of_each_batch(dataset):
    profile = count_dataset(dataset, CountOptions(batch_size=256))
    train = dataset.split("train")
    assert profile.num_samples == len(train) and profile.num_batches == -(-len(train) // 256)
    assert profile.fingerprint == dataset.digest
    for feature, counts in profile.tables.items():
        assert counts.accesses.tolist() == dataset.access_counts(feature).tolist()
    feature = next(iter(train.bags))
    read = [batch.select((feature,)).values.numpy() for batch in Loader(train, 256)]
    assert (
        profile.tables[feature].batches.tolist()
        == naive.count(read, dataset.num_rows[feature])[1].tolist()
    )


def test_first_samples_alone_and_several_features_of_one_table(dataset):
    keys = dataset.schema.keys[:2]
    profile = count_dataset(dataset, CountOptions(batch_size=300, first=1000), {"both": keys})
    batches = [batch.select(keys).values.numpy() for batch in Loader(dataset.split("train"), 1000)][
        :1
    ]
    num_rows = max(dataset.num_rows[key] for key in keys)
    assert profile.num_samples == 1000 and profile.num_batches == 4
    assert profile.tables["both"].accesses.tolist() == naive.count(batches, num_rows)[0].tolist()


def test_a_shuffled_pass_counts_the_same_accesses(dataset):
    one, other = (
        count_dataset(dataset, CountOptions(shuffle=shuffle)) for shuffle in (False, True)
    )
    for feature in one.tables:
        assert one.tables[feature].accesses.tolist() == other.tables[feature].accesses.tolist()
    assert one.origin != other.origin


def small():
    counter = ProfileCounter({"a": 3, "b": 2})
    counter.add({"a": [np.array([0, 2, 2])], "b": [np.array([1])]}, 3)
    counter.add({"a": [np.array([0])]}, 1)
    return counter.profile(3, "abc", {"split": "train"})


def test_a_profile_outlives_its_process_in_one_file(tmp_path):
    profile = small()
    profile.save(tmp_path / "new" / "p.profile")
    loaded = AccessProfile.load(tmp_path / "new" / "p.profile")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["p.profile"]
    for name, counts in profile.tables.items():
        assert loaded.tables[name].accesses.tolist() == counts.accesses.tolist()
        assert loaded.tables[name].batches.tolist() == counts.batches.tolist()
        assert (
            loaded.tables[name].accesses.dtype == np.int64
            and loaded.tables[name].batches.dtype == np.int32
        )
    assert (loaded.num_samples, loaded.num_batches, loaded.batch_size, loaded.fingerprint) == (
        4,
        2,
        3,
        "abc",
    )
    assert loaded.origin == {"split": "train"} and loaded.num_accesses == 5


def test_files_that_are_no_profile_are_refused(tmp_path):
    path = tmp_path / "p.profile"
    small().save(path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:40], whole[:-8], b"something else altogether", whole + b"more"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="make the profile again"):
            AccessProfile.load(path)
    with pytest.raises(DataError, match=r"no .*none"):
        AccessProfile.load(tmp_path / "none")
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(3)}, path)
    with pytest.raises(DataError, match="another kind"):
        AccessProfile.load(path)


def test_a_profile_of_other_tables_or_data_is_refused():
    profile = small()
    tables = [Table("a", 3, 4), Table("b", 2, 4)]
    profile.check(tables, "abc")
    with pytest.raises(DataError, match=r"need one of data xyz"):
        profile.check(tables, "xyz")
    with pytest.raises(DataError, match="without table 'c'"):
        profile.check([*tables, Table("c", 2, 4)])
    with pytest.raises(DataError, match=r"'b' has 2 rows; need 9 rows"):
        profile.check([tables[0], Table("b", 9, 4)])
    with pytest.raises(DataError, match="no samples"):
        ProfileCounter({"a": 3}).profile(4, "").check([tables[0]])


def test_bad_options_and_ids():
    with pytest.raises(ConfigError, match="batch size 0"):
        CountOptions(batch_size=0)
    with pytest.raises(ConfigError, match="shuffled"):
        CountOptions(first=3, shuffle=True)
    with pytest.raises(DataError, match=r"id 3 for table 'a'; need 0 to 2"):
        ProfileCounter({"a": 3}).add({"a": [np.array([1, 3])]}, 1)
