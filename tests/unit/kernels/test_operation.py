"""A new kind of kernel is one file: this one, whose lookups give each row's number back."""

import time

import numpy as np
import pytest
import torch

import pibroch as pb
from pibroch.kernels import gather_pool
from pibroch.kernels.operation import Operation


def echo(records, rows, first_rows, offsets, scale, first_columns, dim, unit, out):
    """Each sample's columns hold the row of its feature's one id, not what lies there."""
    for feature, first in enumerate(first_columns):
        out[:, first : first + dim] = rows[offsets[feature * len(out) : -1][: len(out)], None]


@pytest.fixture
def echoing():
    gather_pool.gather_pool.register("echo", echo, device="cpu")
    yield
    gather_pool.gather_pool.choose("numba")


def looked_up():
    tables = [pb.Table("a", 10, 4), pb.Table("b", 5, 4)]
    embeddings = pb.Embeddings(tables, pb.SGD(lr=1.0), exchange="local")
    ids = torch.tensor([[1, 7, 1], [4, 0, 2]])
    batch = pb.JaggedBatch.from_one_hot(torch.zeros(3, 0), ["a", "b"], ids, torch.zeros(3))
    return embeddings, embeddings(batch)


def test_embeddings_look_up_through_a_kernel_of_one_file(echoing):
    embeddings, found_BFD = looked_up()
    assert found_BFD[:, 0].tolist() == [[row] * 4 for row in (1, 7, 1)]
    assert found_BFD[:, 1].tolist() == [[row] * 4 for row in (14, 10, 12)]
    found_BFD.sum().backward()
    assert np.isfinite(embeddings.shard.records).all()


@pytest.mark.parametrize("kind", ["naive", "numba"])
def test_each_kind_of_lookup_gives_the_same(kind):
    _, expected = looked_up()
    names = ("resolve_rows", "first_absent", "gather_pool", "gradient_sources", "pooling_scale")
    operations = [getattr(gather_pool, name) for name in names]
    try:
        for operation in operations:
            operation.choose(kind)
        assert torch.equal(looked_up()[1], expected)
    finally:
        for operation in operations:
            operation.choose("numba")


def test_the_device_of_the_first_argument_chooses():
    @Operation
    def size(array):
        return "cpu", len(array)

    size.register("elsewhere", lambda array: ("meta", len(array)), device="meta")
    size.register("spare", lambda array: ("spare", len(array)))
    assert size(np.zeros(2)) == size([0, 0]) == size(torch.zeros(2)) == ("cpu", 2)
    assert size(torch.zeros(2, device="meta")) == ("meta", 2)
    assert size.kinds == ("numba", "elsewhere", "spare")
    size.choose("spare")
    assert size(np.zeros(2)) == ("spare", 2)


def test_arrays_without_an_implementation_are_refused():
    with pytest.raises(TypeError, match="arrays on meta for gather_pool; need one of cpu"):
        gather_pool.gather_pool(torch.zeros(2, device="meta"))


def test_choosing_costs_less_than_a_microsecond():
    chosen = Operation(lambda array, *others: None)
    plain = chosen.__wrapped__
    array = np.zeros(1)

    def fastest(function):
        times = []
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(1000):
                function(array, 1, 2, 3, 4, 5, 6, 7)
            times.append((time.perf_counter() - start) / 1000)
        return min(times)

    assert fastest(chosen) - fastest(plain) < 1e-6
