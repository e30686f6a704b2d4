"""What code that comes from torch expects of calls, references and gradients.

Run by test_migrating.py in workers.
"""

import functools
import logging
import threading
import time

import pytest
import torch
from torch import nn

from pibroch import rpc
from pibroch.errors import ConfigError, NotAllowedError, RpcTimeoutError
from pibroch.rpc import autograd
from pibroch.rpc.optim import DistributedOptimizer

HERE = "worker0"
PEER = "worker1"
THIRD = "worker2"
TIMEOUT_S = 60.0
_events: dict = {}


def _add(x, y):
    """Its name begins with an underscore, as half of all helpers do."""
    return x + y


class Counter:
    def __init__(self, count=0):
        self.count = count

    def _up(self, by):
        self.count += by
        return self.count


def underscores():
    assert rpc.rpc_sync(PEER, _add, (1, 2)) == 3
    counter = rpc.remote(PEER, Counter, (1,))
    assert counter.rpc_sync()._up(2) == 3
    with pytest.raises(NotAllowedError):
        rpc.rpc_sync(PEER, torch._assert, (True, ""))


# sparse tensors in the graph


def sparse(values, requires_grad=True, places=((0, 1, 1), (2, 0, 2))):
    made = torch.sparse_coo_tensor(
        places, values, (2, 3), dtype=torch.float64, check_invariants=True
    )
    return made.requires_grad_(requires_grad)


def twice(x, to):
    """There and on to another worker, and back."""
    return rpc.rpc_sync(to, torch.add, (x, x)) if to else x + x


def sparse_leaves():
    for to in (None, THIRD, HERE):
        ours = sparse([3.0, 4, 5])
        other = sparse([3.0, 4, 5])
        with autograd.context() as context:
            loss = torch.sparse.sum(rpc.rpc_sync(PEER, twice, (ours, to)) * 3.0)
            autograd.backward(context, [loss])
            gradient = autograd.get_gradients(context)[ours]
        torch.sparse.sum((other + other) * 3.0).backward()
        assert gradient.is_sparse and torch.equal(gradient.to_dense(), other.grad.to_dense())
        assert ours.grad is None


def dense(x):
    return x.to_dense()


def sparse_that_is_not_coalesced():
    """A place that occurs twice gets its gradient once."""
    leaf = sparse([1.0, 2, 3], places=((0, 0, 1), (1, 1, 2)))
    with autograd.context() as context:
        autograd.backward(context, [rpc.rpc_sync(PEER, dense, (leaf,)).sum()])
        gradient = autograd.get_gradients(context)[leaf]
    assert gradient.to_dense().tolist() == [[0, 1, 0], [0, 0, 1]]


def requires_gradient(x):
    return x.requires_grad, x.is_leaf, x.layout == torch.sparse_coo


def sparse_outside_of_a_context():
    assert rpc.rpc_sync(PEER, requires_gradient, (sparse([1.0, 2, 3]),)) == (True, True, True)
    assert rpc.rpc_sync(PEER, requires_gradient, (sparse([1.0, 2, 3], requires_grad=False),)) == (
        False,
        True,
        True,
    )


class SameForBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, first, second):
        return first + second

    @staticmethod
    def backward(ctx, gradient):
        shared = torch.sparse_coo_tensor(
            [[1, 2]], [[1.0, 1, 1], [2, 2, 2]], (4, 3), check_invariants=True
        )
        return shared, shared


def sparse_gradients_have_memory_of_their_own():
    first = torch.zeros(4, 3, requires_grad=True)
    second = torch.zeros(4, 3, requires_grad=True)
    with autograd.context() as context:
        autograd.backward(context, [SameForBoth.apply(first, second).sum()])
        gradients = autograd.get_gradients(context)
        gradients[first]._values().zero_()
        assert gradients[second].to_dense().sum() == 9
        assert gradients[first]._indices().data_ptr() != gradients[second]._indices().data_ptr()


def hooks_where_gradients_accumulate():
    leaf = torch.ones(2, requires_grad=True)
    calls = []
    y = leaf * 2
    accumulate = y.grad_fn.next_functions[0][0]
    accumulate.register_prehook(lambda gradients: calls.append(("before", gradients[0].tolist())))
    accumulate.register_hook(lambda inputs, outputs: calls.append("after"))
    with autograd.context() as context:
        autograd.backward(context, [rpc.rpc_sync(PEER, _add, (y, 1)).sum()])
        assert autograd.get_gradients(context)[leaf].tolist() == [2, 2]
    assert calls == [("before", [2, 2]), "after"] and leaf.grad is None


# errors


def fail_in_backward(x):
    x.register_hook(_fail)
    return x * 2


def _fail(gradient):
    raise ValueError("a hook that fails")


def backward_raises_runtime_errors():
    x = torch.ones(2, requires_grad=True)
    for worker in (HERE, PEER):
        with autograd.context() as context:
            loss = rpc.rpc_sync(worker, fail_in_backward, (x,)).sum()
            with pytest.raises(RuntimeError, match="a hook that fails") as caught:
                autograd.backward(context, [loss])
            assert isinstance(caught.value, ValueError), "and what it was"
    with autograd.context() as context:
        for wrong in ((context, None), (None, None), (context, [1]), (context, x.sum())):
            with pytest.raises(TypeError, match="incompatible function arguments"):
                autograd.backward(*wrong)
        with pytest.raises(RuntimeError, match="No tensors provided"):
            autograd.backward(context, [])


def linear():
    return nn.Linear(1, 1)


def absent_methods():
    for made in (
        rpc.remote(PEER, torch.neg, (torch.ones(2),)),
        rpc.remote(PEER, Counter),
        rpc.remote(PEER, linear),
    ):
        with pytest.raises(AttributeError, match="no attribute 'non_exist'"):
            made.rpc_sync().non_exist()
        with pytest.raises(AttributeError, match="no attribute 'non_exist'"):
            made.rpc_async().non_exist().wait()


def raise_key():
    raise KeyError("of the callee")


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(self.format(record))


_records = Records()


def keep_records():
    logging.getLogger("pibroch.rpc").addHandler(_records)


def take_records():
    logging.getLogger("pibroch.rpc").removeHandler(_records)
    texts = _records.texts
    _records.texts = []
    return texts


def callee_logs():
    rpc.rpc_sync(PEER, keep_records)
    with pytest.raises(KeyError):
        rpc.rpc_sync(PEER, raise_key)
    with pytest.raises(KeyError):
        rpc.remote(PEER, raise_key).to_here()
    texts = rpc.rpc_sync(PEER, take_records)
    assert len(texts) == 2 and all(
        "of the callee" in text and "migrating_cases:raise_key" in text for text in texts
    )


# futures and times


def wait_at(name):
    assert _events.setdefault(name, threading.Event()).wait(TIMEOUT_S)
    return name


def set_event(name):
    _events.setdefault(name, threading.Event()).set()


def first_error_ends_the_wait():
    for name, wait in {
        "all": torch.futures.wait_all,
        "each": lambda futures: torch.futures.collect_all(futures).wait(),
    }.items():
        stuck = rpc.rpc_async(PEER, wait_at, (name,), timeout=TIMEOUT_S)
        with pytest.raises(KeyError, match="of the callee"):
            wait([stuck, rpc.rpc_async(PEER, raise_key), rpc.rpc_async(PEER, _add, (1, 1))])
        assert not stuck.done()
        rpc.rpc_sync(PEER, set_event, (name,))
        assert stuck.wait() == name
    failed = rpc.rpc_async(PEER, raise_key)
    with pytest.raises(KeyError):
        failed.wait()
    own = torch.futures.Future()
    with pytest.raises(KeyError):
        # futures of torch beside ours, and an error that was there before
        torch.futures.wait_all([own, failed])
    assert torch.futures.wait_all([]) == []
    own.set_result(5)
    assert torch.futures.wait_all([own, rpc.rpc_async(PEER, _add, (1, 1))]) == [5, 2]


def remote_to_oneself_has_a_timeout():
    for worker in (HERE, PEER):
        slow = rpc.remote(worker, wait_at, ("self" + worker,), timeout=0.2)
        began = time.monotonic()
        while time.monotonic() < began + 0.25:
            # until the timeout is over, also where the owner is another one
            time.sleep(0.01)
        with pytest.raises(RpcTimeoutError, match="RRef creation"):
            slow.to_here()
        rpc.rpc_sync(worker, set_event, ("self" + worker,))
        assert rpc.remote(worker, _add, (1, 1), timeout=TIMEOUT_S).to_here() == 2
    quick = rpc.remote(HERE, _add, (1, 2), timeout=0.2)
    assert quick.to_here() == 3
    time.sleep(0.25)
    assert quick.local_value() == 3, "it was made in time"


def default_timeout():
    assert rpc.is_available() and rpc.get_rpc_timeout() == 60.0


# tensors


def strides(x):
    return x.stride(), x


def layouts():
    for scale in (1, 64):  # in the message, in shared memory
        image = (
            torch.arange(2.0 * 3 * 4 * scale * 5)
            .reshape(2, 3, 4 * scale, 5)
            .to(memory_format=torch.channels_last)
        )
        rows = torch.arange(30.0 * scale).reshape(6 * scale, 5)
        for x in (image, rows.t(), rows[:, 1:3], rows[::2], image.transpose(1, 3)):
            there, back = rpc.rpc_sync(PEER, strides, (x,))
            assert there == x.stride() == back.stride() and torch.equal(back, x)
        assert back.add_(1).requires_grad_().sum().item() == (x + 1).sum().item(), (
            "it may be worked on in place"
        )
        assert rpc.rpc_sync(PEER, strides, (rows[0].expand(4, 5),))[0] == (5, 1)
    with autograd.context() as context:
        leaf = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
        result = rpc.rpc_sync(PEER, _add, (leaf, leaf))
        assert result.is_contiguous(memory_format=torch.channels_last)
        autograd.backward(context, [result.sum()])
        assert autograd.get_gradients(context)[leaf].sum() == 2 * leaf.numel()


# modules


class Scale(nn.Module):
    def __init__(self, by, bias=0.0):
        super().__init__()
        self.by = nn.Parameter(torch.tensor(by))
        self.bias = bias

    def forward(self, x, times=1):
        return x * self.by * times + self.bias


def no_module():
    return 3


def use_module(module, x):
    return module(x), module.on, module.get_module_rref().owner_name()


def remote_modules():
    module = rpc.RemoteModule(f"{PEER}/cpu", Scale, (2.0,), {"bias": 1.0})
    x = torch.ones(3, requires_grad=True)
    assert (
        module(x.detach()).tolist() == [3] * 3
        and module.forward_async(x.detach(), times=2).wait().tolist() == [5] * 3
    )
    with autograd.context() as context:
        parameters = module.remote_parameters()
        autograd.backward(context, [module(x).sum()])
        assert autograd.get_gradients(context)[x].tolist() == [2] * 3
        DistributedOptimizer(torch.optim.SGD, parameters, lr=1.0).step(context)
    assert parameters[0].to_here().item() == -1
    same = rpc.RemoteModule.init_from_module_rref("rank:1", module.get_module_rref())
    for each in (module, same):
        value, on, owner = rpc.rpc_sync(THIRD, use_module, (each, torch.ones(1)))
        assert value.item() == 0 and on in (PEER, 1) and owner == PEER
    assert module.eval() is module and not is_training(module) and is_training(module.train())
    for refused in (
        module.parameters,
        module.state_dict,
        module.cuda,
        functools.partial(module.to, "cpu"),
    ):
        with pytest.raises(ValueError, match="not supported for RemoteModule"):
            refused()
    with pytest.raises(RuntimeError, match="Cannot pickle RemoteModule"):
        module.__getstate__()
    with pytest.raises(ValueError, match="Expect `module_cls"):
        rpc.RemoteModule(PEER, no_module).forward()
    with pytest.raises(ConfigError, match="remote device"):
        rpc.RemoteModule("rank:x/cpu", Scale, (1.0,))


def is_training(module):
    return rpc.rpc_sync(PEER, training_of, (module.get_module_rref(),))


def training_of(module_rref):
    return module_rref.local_value().training


# events


def events():
    counter = rpc.remote(PEER, Counter, (1,))

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        rpc.rpc_sync(PEER, torch.add, (torch.ones(1), 1))
        assert rpc.rpc_async(PEER, _add, (1, 2)).wait() == 3
        with pytest.raises(KeyError):
            rpc.rpc_async(PEER, raise_key).wait()
        counter.rpc_sync()._up(1)
        counter.rpc_async()._up(1).wait()
        made = rpc.remote(HERE, _add, (1, 2))
        made.to_here()
        assert rpc.remote(PEER, _add, (1, 3)).to_here() == 4
        rpc.rpc_sync(PEER, _add, (1, 3))  # answered behind the reference's
    names = {event.name for event in profile.events() if event.name.startswith("rpc_")}
    to_peer = "(worker0 -> worker1)"
    assert names >= {
        f"rpc_sync#aten::add{to_peer}",
        f"rpc_async#_add{to_peer}",
        f"rpc_async#raise_key{to_peer}",
        f"rpc_sync#_up{to_peer}",
        f"rpc_async#_up{to_peer}",
        f"rpc_remote#_add{to_peer}",
        "rpc_remote#_add(worker0 -> worker0)",
    }
