"""What a peer may call on an object through a reference."""

import collections
import os
import queue
import sys
import time

import numpy as np
import pytest
import torch

from pibroch.errors import NotAllowedError
from pibroch.rpc.rref import RRef
from pibroch.rpc.values.callables import Callables
from pibroch.rpc.values.methods import find_method

HERE = Callables((__name__,))


def double(x):
    return 2 * x


class Counter:
    def __init__(self):
        self.count = 0
        self.system = os.system
        self.opener = open
        self.double = double
        self.net = Net()
        self.add = torch.add

    def up(self, by=1):
        self.count += by
        return self.count

    @classmethod
    def name(cls):
        return cls.__name__

    @staticmethod
    def one():
        return 1

    def _hidden(self):
        return 2

    def __call__(self, x):
        return x


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)

    def forward(self, x):
        return self.layer(x)


class Text(str):
    pass


def find(value, name):
    return find_method(value, name, HERE)


def test_public_methods_of_own_classes():
    counter = Counter()
    assert find(counter, "up")(5) == 5 and counter.count == 5
    assert find(counter, "name")() == "Counter"
    assert find(counter, "one")() == 1
    assert find(counter, "__call__")(3) == 3


def test_callables_in_attributes_when_they_could_be_named_too():
    counter = Counter()
    assert find(counter, "double")(4) == 8
    assert find(counter, "add")(torch.ones(1), 1) == 2
    assert find(counter, "net")(torch.ones(1, 2)).shape == (1, 3)
    for name in ("system", "opener"):
        with pytest.raises(NotAllowedError):
            find(counter, name)


def test_modules_optimizers_tensors_and_data():
    net = Net()
    assert find(net, "forward")(torch.ones(1, 2)).shape == (1, 3)
    assert find(net, "__call__")(torch.ones(1, 2)).shape == (1, 3)
    assert find(net, "layer")(torch.ones(1, 2)).shape == (1, 3)
    assert len(list(find(net, "parameters")())) == 2
    find(torch.optim.SGD(net.parameters(), lr=0.1), "step")()
    assert find(torch.ones(3), "add")(1).sum() == 6
    assert find(torch.nn.Parameter(torch.ones(3)), "numel")() == 3
    assert find({"a": 1}, "get")("a") == 1
    assert find([1], "append")(2) is None
    assert find(collections.OrderedDict(a=1), "__len__")() == 1
    assert find(collections.deque([1]), "popleft")() == 1


def test_values_have_no_methods_for_peers():
    for value, name in [
        (np.ones(3), "sum"),
        (np.ones(3), "view"),
        ("a b", "split"),
        (3, "__pow__"),
        (range(3), "count"),
    ]:
        with pytest.raises(NotAllowedError):
            find(value, name)


class Table(dict):
    def double(self):
        return {key: 2 * value for key, value in self.items()}


class Loud(Text):
    def shout(self):
        return self.upper()


def test_classes_that_extend_others_open_their_own_methods_and_those_that_are_listed():
    assert find(Table(a=1), "double")() == {"a": 2} and find(Table(a=1), "get")("a") == 1
    assert find(Loud("a"), "shout")() == "A"
    for value, name in [(Table(), "items"), (Loud("a"), "upper"), (Loud("a"), "ljust")]:
        with pytest.raises(NotAllowedError):
            find(value, name)


@pytest.mark.parametrize(
    ("value", "name", "args"),
    [
        ([], "extend", [range(1 << 40)]),
        (collections.deque(), "extendleft", [range(1 << 40)]),
        ([1], "__setitem__", [slice(0, 1), range(1 << 40)]),
        (set(), "update", [range(1 << 40)]),
        (collections.Counter(), "update", [range(1 << 40)]),
        (torch.ones(1 << 20, 1), "add", [torch.ones(1, 1 << 20)]),
    ],
)
def test_what_would_become_large_is_refused_before(value, name, args):
    began = time.process_time()
    with pytest.raises(NotAllowedError):
        find(value, name)(*args)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    "name",
    [
        *("repeat", "expand", "view", "reshape", "unfold", "unbind", "split", "chunk", "tolist"),
        *("to", "new_empty", "new_zeros", "resize_", "set_", "numpy", "t_", "__getitem__"),
    ],
)
def test_methods_of_tensors_that_take_sizes_or_change_shapes_are_not_open(name):
    with pytest.raises(NotAllowedError):
        find(torch.ones(2), name)


def test_a_user_may_open_a_method_of_tensors():
    callables = Callables(("torch:Tensor.view",))
    assert find_method(torch.ones(4), "view", callables)(2, 2).shape == (2, 2)


def test_an_embedding_bag_checks_its_bags():
    bag = torch.nn.EmbeddingBag(5, 2)
    ids = torch.tensor([0, 1, 4])
    net = torch.nn.Sequential(bag)
    assert find(bag, "forward")(ids, torch.tensor([0, 2])).shape == (2, 2)
    assert find(net, "0")(ids, torch.tensor([0, 3])).shape == (2, 2)
    for wrong in (torch.tensor([0, 1 << 40]), torch.tensor([-1, 2]), torch.tensor([2, 0])):
        for method in (find(bag, "forward"), find(bag, "__call__"), find(net, "0")):
            with pytest.raises(IndexError):
                method(ids, wrong)
    with pytest.raises(IndexError):
        find(bag, "forward")(torch.tensor([5]), torch.tensor([0]))


def test_no_peer_loads_the_state_of_an_optimizer():
    """Kernels that do many parameters at once would trust its shapes."""
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(3))])
    assert find(optimizer, "state_dict")()["state"] == {}
    with pytest.raises(NotAllowedError):
        find(optimizer, "load_state_dict")


@pytest.mark.parametrize(
    "name",
    [
        "__hidden",
        "__class__",
        "__reduce__",
        "__reduce_ex__",
        "__init__",
        "__getattribute__",
        "__setattr__",
        "__dict__",
        "__subclasshook__",
    ],
)
def test_private_names_are_refused(name):
    with pytest.raises(NotAllowedError, match="one underscore"):
        find(Counter(), name)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (np.ones(3), "tofile"),
        (np.ones(3), "dump"),
        ("{0.__class__}", "format"),
        (Text("{0.__class__}"), "format"),
        ("{x}", "format_map"),
        (torch.ones(3), "share_memory_"),
        (torch.ones(3), "data_ptr"),
        (torch.ones(3), "storage"),
        (Net(), "share_memory"),
        (Net(), "compile"),
        (os, "system"),
        (sys, "exit"),
        (Counter, "up"),
        (dict, "fromkeys"),
        (queue.Queue(), "put"),
        (os.environ, "get"),
        (double, "__call__"),
        (open, "__call__"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_leads_to_files_attributes_or_other_modules_is_refused(value, name):
    with pytest.raises(NotAllowedError):
        find(value, name)


def test_a_script_module_is_refused(tmp_path):
    module = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(NotAllowedError):
        find(module, "save")


def test_what_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError):
        find(Counter(), "nothing")
    with pytest.raises(TypeError, match="not callable"):
        find(Counter(), "count")


def test_a_module_that_was_allowed_is_open():
    waiting = queue.Queue()
    find_method(waiting, "put", Callables(("queue",)))(1)
    assert waiting.get() == 1


def test_methods_with_one_underscore_are_a_users_own_to_give():
    assert find(Counter(), "_hidden")() == 2


@pytest.mark.parametrize(
    "value", [torch.nn.Linear(1, 1), torch.ones(1), {}, collections.OrderedDict()], ids=type
)
def test_private_methods_of_libraries_stay_private(value):
    with pytest.raises(NotAllowedError, match="one underscore"):
        find(value, "_apply")


@pytest.mark.parametrize("name", ["_wait_as_owner", "_refer"])
def test_private_methods_of_references_stay_private(name):
    with pytest.raises(NotAllowedError, match="one underscore"):
        find_method(RRef.__new__(RRef), name, Callables(("pibroch.rpc",)))


@pytest.mark.parametrize(
    "value", [torch.ones(1), torch.nn.Linear(1, 1), np.ones(1), 3, {}], ids=type
)
def test_what_libraries_do_not_have_is_an_attribute_error(value):
    with pytest.raises(AttributeError, match="no attribute 'non_exist'"):
        find(value, "non_exist")
