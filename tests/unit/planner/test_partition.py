import numpy as np
import pytest

from pibroch.embedding import SGD, Adam, RowWiseAdagrad, Table
from pibroch.errors import ConfigError
from pibroch.planner.partition import DENSE_COUNTS, Partitioner, TableSize, sizes_of, total_bytes
from pibroch.planner.profile import AccessProfile, TableCounts


def profile_of(accesses, num_batches=50, batch_size=20):
    tables = {
        n: TableCounts(np.asarray(a, np.int64), np.minimum(a, num_batches).astype(np.int32))
        for n, a in accesses.items()
    }
    return AccessProfile(tables, num_batches * batch_size, num_batches, batch_size, "made up")


def random_case(seed=0):
    rng = np.random.default_rng(seed)
    accesses = {f"t{i}": (rng.pareto(0.9, 500 * (i + 1)) * 3).astype(np.int64) for i in range(4)}
    accesses["t1"][7] = DENSE_COUNTS + 5
    accesses["t2"][:3] = DENSE_COUNTS * 3
    sizes = [
        TableSize(n, len(a), 64 if i < 3 else 16, 80 if i < 3 else 16)
        for i, (n, a) in enumerate(accesses.items())
    ]
    return sizes, profile_of(accesses)


@pytest.mark.parametrize("threshold", [0.1, 0.01, 0.002, 0.0])
def test_each_row_is_in_one_partition_of_bounded_size(threshold):
    sizes, profile = random_case()
    partitioner = Partitioner(sizes, profile)
    parts = partitioner.cut(threshold)
    partition_of = partitioner.assign()
    assert list(partition_of) == [size.name for size in sizes]
    rows = np.zeros(len(parts), np.int64)
    accesses = np.zeros(len(parts), np.int64)
    for size in sizes:
        of = partition_of[size.name]
        assert of.dtype == np.uint16 and len(of) == size.num_rows
        np.add.at(rows, of, 1)
        np.add.at(accesses, of, profile.tables[size.name].accesses)
        assert set(parts.weight_bytes[of]) == {size.weight_bytes} and set(
            parts.record_bytes[of]
        ) == {size.record_bytes}
    assert rows.tolist() == parts.num_rows.tolist()
    np.testing.assert_allclose(accesses * (20 / profile.num_samples), parts.accesses)
    total = (accesses * parts.weight_bytes).sum()
    is_single = parts.num_rows == 1
    assert ((accesses * parts.weight_bytes <= threshold * total * (1 + 1e-9)) | is_single).all()
    assert ((parts.memory_bytes <= threshold * total_bytes(sizes)) | is_single).all()
    assert (parts.transfers <= parts.num_rows + 1e-9).all() and (
        parts.transfers <= parts.accesses + 1e-9
    ).all()
    if threshold == 0:
        assert len(parts) == sum(size.num_rows for size in sizes)


def test_hot_partitions_are_bound_by_accesses_and_cold_ones_by_memory():
    sizes, profile = random_case()
    parts = Partitioner(sizes, profile).cut(0.005)
    assert parts.accesses[parts.is_access_bound].sum() > 0.6 * parts.accesses.sum()
    assert parts.memory_bytes[parts.is_access_bound].sum() < 0.5 * parts.memory_bytes.sum()


def test_too_fine_a_threshold_is_none():
    sizes, profile = random_case()
    assert Partitioner(sizes, profile).cut(0.0, limit=100) is None
    parts = Partitioner(sizes, profile).cut(0.5, limit=100)
    assert parts is not None and len(parts) <= 100


def test_transfers_of_other_batch_sizes():
    accesses = np.array([0, 1, 100, 1000, 5000])
    profile = profile_of({"a": accesses}, num_batches=1000, batch_size=5)
    sizes = [TableSize("a", 5, 4, 4)]
    own = Partitioner(sizes, profile).cut(0.0)
    assert own.transfers.tolist() == [1.0, 1.0, 0.1, 0.001, 0.0]
    large = Partitioner(sizes, profile, batch_size=50).cut(0.0)
    assert large.accesses.tolist() == [50.0, 10.0, 1.0, 0.01, 0.0]
    np.testing.assert_allclose(large.transfers, [1, 1, 1 - 0.9**10, 1 - 0.999**10, 0])


def test_bytes_of_rows_and_records():
    table = Table("a", 10, 16)
    narrow = Table("b", 10, 16, dtype="bfloat16")
    assert TableSize.of(table).kind == (64, 64) and TableSize.of(narrow).kind == (32, 32)
    assert TableSize.of(table, RowWiseAdagrad(lr=1.0)).kind == (64, 68)
    assert TableSize.of(narrow, SGD(lr=1.0)).kind == (32, 32)
    sizes = sizes_of([table, narrow], {"a": Adam(lr=1.0), "": SGD(lr=1.0)})
    assert [size.kind for size in sizes] == [(64, 4 * Adam(lr=1.0).record_width(16)), (32, 32)]
    assert sizes_of([table], None)[0].kind == (64, 64)
    with pytest.raises(ConfigError, match="'b' without an optimizer"):
        sizes_of([table, narrow], {"a": SGD(lr=1.0)})
