"""What arrives is what was sent: tensors of all kinds, containers, and whose memory it is.

Each ``case_`` runs in worker 0.
"""

import collections
import dataclasses
import enum
from typing import NamedTuple

import numpy as np
import pytest
import torch

from pibroch import rpc
from pibroch.errors import NotAllowedError

pytestmark = pytest.mark.timeout(120)

HERE = "worker0"
PEER = "worker1"
DTYPES = [
    *(
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
    ),
    *(
        torch.uint64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    ),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
BIG = 300_000  # elements: more than what travels beside a message


class Point(NamedTuple):
    x: int
    y: torch.Tensor


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    name: str
    nested: "Batch | None" = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: int
    more: tuple = ()


def identity(value):
    return value


def there_and_back(value, to=PEER):
    return rpc.rpc_sync(to, identity, (value,))


def same(sent, received):
    """Equal in type, values and what torch knows of a tensor, all the way down."""
    if type(sent) is not type(received):
        return False
    if isinstance(sent, torch.Tensor):
        alike = (sent.dtype, sent.shape, sent.layout, sent.device) == (
            received.dtype,
            received.shape,
            received.layout,
            received.device,
        )
        if not alike or sent.layout != torch.strided:
            return alike and same(sent.to_dense(), received.to_dense())
        return bits(sent) == bits(received)
    if isinstance(sent, np.ndarray):
        return (
            sent.dtype == received.dtype
            and sent.shape == received.shape
            and bool((sent == received).all())
        )
    if dataclasses.is_dataclass(sent):
        return all(
            same(getattr(sent, f.name), getattr(received, f.name)) for f in dataclasses.fields(sent)
        )
    if isinstance(sent, dict):
        return list(sent) == list(received) and all(same(sent[key], received[key]) for key in sent)
    if isinstance(sent, (list, tuple)):
        return len(sent) == len(received) and all(map(same, sent, received))
    return bool(sent == received) or (sent != sent and received != received)


def bits(tensor):
    return (
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .contiguous()
        .view(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def assert_comes_back(*values):
    for value in values:
        for to in (PEER, HERE):
            received = there_and_back(value, to)
            assert same(value, received), f"sent {value!r} to {to}, back came {received!r}"


def case_dtypes():
    for dtype in DTYPES:
        bytes_ = (
            torch.arange(96, dtype=torch.uint8) % 2
            if dtype == torch.bool
            else torch.arange(96, dtype=torch.uint8)
        )
        assert_comes_back(bytes_.view(dtype), bytes_.view(dtype)[:1], torch.empty(0, dtype=dtype))


def test_tensors_of_all_dtypes(workers):
    workers(2).run(0, case_dtypes)


def case_shapes():
    for size in (12, BIG):
        x = torch.arange(size, dtype=torch.float32)
        assert_comes_back(
            x.view(3, -1).t(), x[::2], x[5:], x.view(2, 2, -1).permute(2, 0, 1), x.flip(0)
        )
        assert_comes_back(x[:1].expand(4), x.view(3, -1)[:, 1:], x.view(-1, 4).unfold(0, 2, 1))
    assert_comes_back(
        torch.tensor(3.5),
        torch.tensor(True),
        torch.empty(0),
        torch.empty(3, 0, 2),
        torch.empty(0, 0),
    )
    complex_ = torch.randn(6, dtype=torch.complex64)
    # views that torch has not computed yet
    assert_comes_back(complex_.conj(), complex_.imag, complex_.conj().imag)
    assert there_and_back(torch.ones(2, 3).t()).shape == (3, 2)


def test_views_scalars_and_empty_tensors(workers):
    workers(2).run(0, case_shapes)


def case_special_tensors():
    assert_comes_back(
        torch.eye(3).to_sparse(),
        torch.sparse_coo_tensor(torch.empty(1, 0).long(), torch.empty(0), (4,)),
    )
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([1.0, 2.0]), (3,))
    received = there_and_back(twice)
    assert not received.is_coalesced() and torch.equal(
        received.to_dense(), torch.tensor([0.0, 3.0, 0.0])
    )
    with pytest.raises(NotAllowedError, match="sparse_csr"):
        there_and_back(torch.eye(3).to_sparse_csr())
    parameter = there_and_back(torch.nn.Parameter(torch.ones(2)))
    assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
    frozen = there_and_back(torch.nn.Parameter(torch.ones(2), requires_grad=False))
    assert not frozen.requires_grad


def test_sparse_tensors_and_parameters(workers):
    workers(2).run(0, case_special_tensors)


def grad_state(tensor):
    return tensor.requires_grad, tensor.is_leaf


def case_requires_grad():
    """Without a context no gradient flows, but the flag arrives, as in torch."""
    leaf = torch.ones(2, requires_grad=True)
    assert rpc.rpc_sync(PEER, grad_state, (leaf,)) == (True, True)
    assert rpc.rpc_sync(PEER, grad_state, (leaf * 2,)) == (True, True)
    assert rpc.rpc_sync(PEER, grad_state, (torch.ones(2),)) == (False, True)
    received = there_and_back(leaf * 2)
    assert received.requires_grad and received.grad_fn is None
    assert leaf.grad is None


def test_requires_grad_outside_of_a_context(workers):
    workers(2).run(0, case_requires_grad)


def case_plain():
    assert_comes_back(
        None,
        True,
        0,
        -1,
        2**40,
        2**64,
        -(2**100),
        1.5,
        float("inf"),
        float("nan"),
        1j,
        "",
        "ä\0",
        b"\0",
    )
    assert_comes_back(
        [], (), {}, set(), {1, 2}, frozenset({"a"}), range(3), slice(1, None), bytearray(b"ab"), ...
    )
    assert_comes_back({1: 2, "a": None, (1, "b"): [3], None: 0, 1.5: ()}, [[[[(((),),)]]]])
    assert_comes_back(
        torch.float16,
        torch.device("cpu"),
        torch.Size([1, 2]),
        torch.ones(2).shape,
        Colour.RED,
        Colour.BLUE,
    )
    assert there_and_back(len) is len
    assert there_and_back(identity) is identity
    assert there_and_back(Batch) is Batch
    # containers of collections arrive as what they extend
    ordered = there_and_back(collections.OrderedDict(b=1, a=2))
    assert type(ordered) is dict and list(ordered) == ["b", "a"]
    deep = []
    for _ in range(50):
        deep = [deep, {"k": deep}] if len(str(deep)) < 500 else [deep]
    assert_comes_back(deep)


def test_plain_values(workers):
    workers(2).run(0, case_plain)


def case_containers():
    tensor = torch.arange(4.0)
    assert_comes_back(
        [tensor, (tensor, {"a": [tensor, None]})],
        {1: tensor, "b": {"c": (tensor,)}},
        Point(1, tensor),
        Batch(tensor, "a", Batch(tensor + 1, "b")),
        Frozen(3, (1, (2, tensor))),
        [Point(index, torch.full((3,), float(index))) for index in range(100)],
        dict(torch.nn.Linear(2, 3).state_dict()),
    )


def test_containers_dataclasses_and_named_tuples(workers):
    workers(2).run(0, case_containers)


def case_arrays():
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert_comes_back(
        array,
        array.T,
        array[:, ::2],
        np.array(2.5),
        np.empty((0, 3)),
        np.ones(BIG),
        np.array([True, False]),
    )
    assert_comes_back(np.float32(1.5), np.int64(3), np.bool_(True))
    fixed = np.arange(3)
    fixed.setflags(write=False)
    assert_comes_back(fixed)
    with pytest.raises(NotAllowedError):
        there_and_back(np.array([object()]))
    with pytest.raises(NotAllowedError):
        there_and_back(np.array(["text"]))


def test_numpy_arrays(workers):
    workers(2).run(0, case_arrays)


# whose memory


def add_in_place(tensor):
    tensor += 1
    return tensor


def fill_array(array):
    array[:] = 7
    return array


kept: dict = {}


def keep(key, tensor):
    kept[key] = tensor
    return tensor


def kept_sum(key):
    return kept[key].double().sum().item()


def forget():
    kept.clear()


def case_mutation():
    for size in (4, BIG):
        own = torch.ones(size)
        received = rpc.rpc_sync(PEER, add_in_place, (own,))
        assert own.sum() == size, "the callee changed its own"
        assert received.sum() == 2 * size
        again = rpc.rpc_sync(PEER, add_in_place, (received,))
        received += 10
        assert (again == 3).all() and (received == 12).all(), "each result is the caller's alone"
        assert (rpc.rpc_sync(PEER, fill_array, (np.ones(size),)) == 7).all()


def test_changes_in_place_stay_where_they_are(workers):
    workers(2).run(0, case_mutation)


def case_kept():
    for size in (4, BIG):
        own = torch.ones(size)
        received = rpc.rpc_sync(PEER, keep, (size, own))
        own += 5
        received += 5
        for _ in range(20):  # reuses what is free
            there_and_back(torch.zeros(size))
        assert rpc.rpc_sync(PEER, kept_sum, (size,)) == size
        assert (received == 6).all()
    rpc.rpc_sync(PEER, forget)


def test_what_the_callee_keeps_is_its_own(workers):
    workers(2).run(0, case_kept)


def filled(number):
    return torch.full((BIG,), number)


def case_results_kept():
    results = [rpc.rpc_sync(PEER, filled, (float(index),)) for index in range(20)]
    views = [result[10:20] for result in results]
    del results
    for index in range(20):
        there_and_back(torch.zeros(BIG))
        assert (views[index] == index).all(), "a view keeps its memory"


def test_results_and_views_of_them_stay(workers):
    workers(2).run(0, case_results_kept)


def case_shared_storage():
    base = torch.arange(float(BIG))
    first, second = there_and_back((base[:10], base[5:15]))
    assert same(first, base[:10]) and same(second, base[5:15])
    big = there_and_back([base, base[::3], base.view(2, -1)])
    assert same(big, [base, base[::3], base.view(2, -1)])


def test_tensors_that_share_memory(workers):
    workers(2).run(0, case_shared_storage)
