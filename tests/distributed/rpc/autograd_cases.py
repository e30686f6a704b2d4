"""What runs in the workers of test_autograd.py; worker0 drives."""

import gc
import threading
import time
import weakref

import pytest
import torch
from autograd_programs import check

from pibroch import rpc
from pibroch.rpc import autograd
from pibroch.rpc.calls.agent import current_agent

_messages: list = []
_kept: dict = {}
_lock = threading.Lock()


def live_counts():
    return autograd.live_counts()


def count_messages():
    """From now on this worker counts the gradients that it sends."""
    ours = current_agent().packer.recorder.coordinator
    if hasattr(ours, "is_counted"):
        return
    ours.is_counted = True
    send = ours._send_gradients

    def counting(part, received, gradients):
        _messages.append(received.message)
        send(part, received, gradients)

    ours._send_gradients = counting


def num_messages():
    assert len(set(_messages)) == len(_messages)
    return len(_messages)


def weight(name, worker, size=3):
    """A leaf that stays, the same on all workers."""
    with _lock:  # calls run side by side
        if (name, worker) not in _kept:
            generator = torch.Generator().manual_seed(worker)
            _kept[name, worker] = torch.randn(
                size, generator=generator, dtype=torch.float64
            ).requires_grad_()
        return _kept[name, worker]


def gradient_of(context, name, worker):
    return autograd.get_gradients(context).get(weight(name, worker))


def fetch(context, name, worker):
    return rpc.rpc_sync(f"worker{worker}", gradient_of, (context, name, worker))


def scaled(x, name, worker):
    return x * weight(name, worker)


def remote_scaled(x, name, worker):
    return rpc.rpc_sync(f"worker{worker}", scaled, (x, name, worker))


def close(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def local(build, *leaves):
    """Local gradients of what ``build()`` gives."""
    return torch.autograd.grad(build(), leaves, allow_unused=True)


def many_at_once(num_threads, num_workers):
    errors = []

    def work(offset):
        try:
            for seed in range(10):
                check(5000 + 5 * offset + seed, num_workers)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(each,)) for each in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)


def several_roots():
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with autograd.context() as context:
        first = remote_scaled(x, "w", 1)
        second = remote_scaled(x.sin(), "w", 2)
        autograd.backward(context, [first.sum(), (first * second).sum(), x.sum()])
        w1 = weight("w", 1)
        w2 = weight("w", 2)
        expected = local(
            lambda: (x * w1).sum() + (x * w1 * x.sin() * w2).sum() + x.sum(), x, w1, w2
        )
        ours = autograd.get_gradients(context)[x], fetch(context, "w", 1), fetch(context, "w", 2)
        close(ours, expected)


def no_remote_part():
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        autograd.backward(context, [(x * x).sum()])
        close(autograd.get_gradients(context), {x: 2 * x.detach()})
        leaf = torch.tensor(2.0, requires_grad=True)
        autograd.backward(context, [leaf])
        assert autograd.get_gradients(context)[leaf] == 1


def calls_itself():
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with autograd.context() as context:
        y = remote_scaled(remote_scaled(x, "w", 0), "w", 0)
        autograd.backward(context, [y.sum()])
        w = weight("w", 0)
        close(
            (autograd.get_gradients(context)[x], autograd.get_gradients(context)[w]),
            local(lambda: (x * w * w).sum(), x, w),
        )


def bounce(x, depth):
    if not depth:
        return x
    me = rpc.get_worker_info().id
    there = rpc.rpc_sync(f"worker{1 - me}", bounce, ((x * weight("b", me)).sin(), depth - 1))
    return there + x * weight("b", me)


def bounce_locally(x, depth, me):
    if not depth:
        return x
    return bounce_locally((x * weight("b", me)).sin(), depth - 1, 1 - me) + x * weight("b", me)


def ping_pong():
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with autograd.context() as context:
        autograd.backward(context, [bounce(x, 20).sum()])
        expected = local(lambda: bounce_locally(x, 20, 0).sum(), x, weight("b", 0), weight("b", 1))
        close(
            (autograd.get_gradients(context)[x], fetch(context, "b", 0), fetch(context, "b", 1)),
            expected,
        )


def residual_over_workers():
    """What is sent is also used here, before and after.

    It has its whole gradient before its function runs.
    """
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    seen = []
    with autograd.context() as context:
        y = x.sin()
        y.register_hook(seen.append)
        before = y * 2
        there = remote_scaled(y, "w", 1)
        after = y * there
        autograd.backward(context, [(before + after + there).sum()])
        w = weight("w", 1)
        y = x.sin()
        expected = local(lambda: (y * 2 + y * (y * w) + y * w).sum(), x, w, y)
        close((autograd.get_gradients(context)[x], fetch(context, "w", 1), *seen), expected)


def squares(value):
    return {"sum": sum((each * each).sum() for each in value["leaves"])}


def parameters_sent():
    """Leaves sent as they are, among them a ``Parameter``."""
    leaf = torch.ones(2, requires_grad=True)
    parameter = torch.nn.Parameter(torch.full((2,), 3.0))
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    with autograd.context() as context:
        answer = rpc.rpc_sync("worker1", squares, ({"leaves": [leaf, parameter, frozen]},))
        autograd.backward(context, [answer["sum"]])
        close(
            autograd.get_gradients(context),
            {leaf: torch.full((2,), 2.0), parameter: torch.full((2,), 6.0)},
        )


def both(x, y):
    return x * 2, y * 3


def same_tensor_twice():
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        y = x * x
        first, second = rpc.rpc_sync("worker1", both, (y, y))
        autograd.backward(context, [(first + second).sum()])
        close(autograd.get_gradients(context)[x], torch.full((3,), 10.0))
    with autograd.context() as context:
        first, second = rpc.rpc_sync("worker0", both, (x, x))
        autograd.backward(context, [(first * second).sum()])
        close(autograd.get_gradients(context)[x], torch.full((3,), 12.0))


def mixed(x, numbers, constant, flag):
    assert x.requires_grad and x.grad_fn is not None and not x.is_leaf
    assert not numbers.requires_grad and not constant.requires_grad
    return [x[numbers] * constant if flag else x, numbers, None, "text"]


def mixed_values():
    x = torch.ones(4, requires_grad=True)
    with autograd.context() as context:
        numbers = torch.tensor([0, 2])
        constant = torch.tensor([5.0, 7.0])
        answer = rpc.rpc_sync("worker1", mixed, (x, numbers, constant, True))
        assert not answer[1].requires_grad and answer[2:] == [None, "text"]
        autograd.backward(context, [answer[0].sum()])
        close(autograd.get_gradients(context)[x], torch.tensor([5.0, 0, 7, 0]))


def complex_numbers():
    x = torch.tensor([1 + 2j, 3 - 1j], requires_grad=True)
    with autograd.context() as context:
        y = rpc.rpc_sync("worker1", torch.mul, (x, x))
        autograd.backward(context, [y.abs().sum()])
        close((autograd.get_gradients(context)[x],), local(lambda: (x * x).abs().sum(), x))


def changed_in_place(x, y):
    x.relu_()
    y.mul_(2)
    return x + y, x


def in_place_work():
    """On tensors received, by receiver and sender; and on one that was sent."""
    for worker in ("worker1", "worker0"):
        x = torch.tensor([-1.0, 2.0], requires_grad=True)
        with autograd.context() as context:
            y = x * 1
            z = x * 3
            total, part = rpc.rpc_sync(worker, changed_in_place, (y.clone(), z.clone()))
            z.mul_(10)  # after it was sent: a new function here, the old one there
            part.add_(1)
            autograd.backward(context, [(total + part).sum() + z.sum()])
            close(autograd.get_gradients(context)[x], torch.tensor([6.0 + 30, 1 + 6 + 1 + 30.0]))


def views_and_strides():
    x = torch.arange(6.0, requires_grad=True)
    with autograd.context() as context:
        base = (x * x).reshape(2, 3)
        first, second = rpc.rpc_sync("worker1", both, (base.t(), base[:, 1]))
        autograd.backward(
            context, [(first.sum(0) * second).sum() + first.t()[0].sum().expand(3).sum()]
        )

        def build():
            base = (x * x).reshape(2, 3)
            first, second = both(base.t(), base[:, 1])
            return (first.sum(0) * second).sum() + first.t()[0].sum().expand(3).sum()

        close((autograd.get_gradients(context)[x],), local(build, x))


def second_pass_retained():
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with autograd.context() as context:
        y = remote_scaled(x.sin(), "w", 1).sum()
        autograd.backward(context, [y], retain_graph=True)
        once = autograd.get_gradients(context)[x]
        there = fetch(context, "w", 1)
        autograd.backward(context, [y])
        close(autograd.get_gradients(context)[x], 2 * once)
        close(fetch(context, "w", 1), 2 * there)


def second_pass_not_retained():
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with autograd.context() as context:
        y = remote_scaled(x, "w", 1).sum()
        autograd.backward(context, [y])
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            autograd.backward(context, [y])


def passes_one_after_another():
    """Graphs of one context are differentiated one by one.

    They were made before, and none is kept.
    """
    w0, w1, w2 = (weight("w", each) for each in range(3))
    x = torch.ones(3, dtype=torch.float64)
    calls = []
    with autograd.context() as context:
        losses = []
        for number in range(4):
            y = x * w0 * (number + 1)
            y.register_hook(lambda gradient, number=number: calls.append(number))
            there = remote_scaled(remote_scaled(y, "w", 1), "w", 2)
            losses.append((there * there).sum())
        for loss in losses:
            autograd.backward(context, [loss])
        expected = local(
            lambda: sum(((x * w0 * (number + 1) * w1 * w2) ** 2).sum() for number in range(4)),
            w0,
            w1,
            w2,
        )
        close(tuple(fetch(context, "w", each) for each in range(3)), expected)
    assert calls == [0, 1, 2, 3]


class Loud(torch.autograd.Function):
    """Counts its backward runs.

    It gets zeros for gradients that are absent, as functions do by default.
    """

    num_runs = 0

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        Loud.num_runs += 1
        return gradient * 2


def loud_pair(x):
    quiet = x * weight("w", 1)
    loud = Loud.apply(x * weight("u", 1))
    loud.register_hook(lambda gradient: gradient * 1)
    return quiet, loud


def loud_runs():
    return Loud.num_runs


def unused_branches_do_not_run():
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    runs = rpc.rpc_sync("worker1", loud_runs) + Loud.num_runs
    with autograd.context() as context:
        unused = remote_scaled(Loud.apply(x), "u", 1)
        quiet, _ = rpc.rpc_sync("worker1", loud_pair, (x,))
        later = rpc.rpc_sync("worker1", loud_pair, (quiet,))[0]
        autograd.backward(context, [later.sum()])
        assert fetch(context, "u", 1) is None and fetch(context, "w", 1) is not None
        assert rpc.rpc_sync("worker1", loud_runs) + Loud.num_runs == runs
        autograd.backward(context, [unused.sum()])
        assert fetch(context, "u", 1) is not None
    assert rpc.rpc_sync("worker1", loud_runs) + Loud.num_runs == runs + 1


class Marked(torch.autograd.Function):
    """Its node holds an object, which dies with the node."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark = Mark()
        _kept["mark"] = weakref.ref(ctx.mark)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Mark:
    pass


def marked(x):
    return Marked.apply(x * weight("w", rpc.get_worker_info().id))


def is_marked():
    return _kept["mark"]() is not None


def graphs_are_freed():
    """With the context, without a garbage collector."""
    gc.disable()
    rpc.rpc_sync("worker1", set_collector, (False,))
    try:
        with autograd.context() as context:
            x = marked(torch.ones(3, dtype=torch.float64))
            y = rpc.rpc_sync("worker1", marked, (x,))
            autograd.backward(context, [y.sum()])
            del y
            assert rpc.rpc_sync("worker1", is_marked) and is_marked()
        del x
        assert not is_marked()
        deadline = time.monotonic() + 60
        while rpc.rpc_sync("worker1", is_marked):
            assert time.monotonic() < deadline
    finally:
        gc.enable()
        rpc.rpc_sync("worker1", set_collector, (True,))


def set_collector(enabled):
    (gc.enable if enabled else gc.disable)()


class Nothing(torch.autograd.Function):
    """Has no gradient for its input."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return None


def to_nothing(x):
    return Nothing.apply(x)


def undefined_gradients():
    x = torch.ones(3, requires_grad=True)
    y = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        there = rpc.rpc_sync("worker1", to_nothing, (x * 1,))
        autograd.backward(context, [(there * y).sum()])
        assert set(autograd.get_gradients(context)) == {y}


_seen: list = []


def hooked(x):
    x.register_hook(lambda gradient: _seen.append(("received", gradient.clone())))
    w = weight("h", 1)
    handle = w.register_hook(
        lambda gradient: _seen.append(("leaf", gradient.clone())) or gradient * 10
    )
    y = x * w
    y.register_hook(lambda gradient: _seen.append(("result", gradient.clone())))
    y.grad_fn.register_hook(lambda inputs, outputs: _seen.append(("function", outputs[0].clone())))
    _kept["handle"] = handle
    return y, y * w


def seen():
    result = [*_seen]
    _seen.clear()
    _kept.pop("handle").remove()
    return result


def hooks_run_once():
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    here = []
    with autograd.context() as context:
        sent = x.exp()
        sent.register_hook(lambda gradient: here.append(gradient) or gradient * 2)
        x.register_hook(lambda gradient: here.append(gradient))
        first, second = rpc.rpc_sync("worker1", hooked, (sent,))
        first.register_hook(lambda gradient: gradient * 3)
        autograd.backward(context, [(first + first * second + sent).sum()])
        got = autograd.get_gradients(context)[x]
        there = fetch(context, "h", 1)
        result = dict(rpc.rpc_sync("worker1", seen))
        assert len(result) == 4 and len(here) == 2

    w = weight("h", 1)
    a = x.detach().exp()
    to_first = 3 * (1 + a * w * w).detach()
    to_second = (a * w).detach()
    to_y = to_first + to_second * w.detach()
    to_w = to_y * a + to_second * (a * w).detach()
    to_a = to_y * w.detach()
    close(
        (result["result"], result["function"], result["received"], result["leaf"]),
        (to_y, to_y, to_a, to_w),
    )
    close(
        (there, here[0], here[1], got),
        (10 * to_w, to_a + 1, 2 * (to_a + 1) * a, 2 * (to_a + 1) * a),
    )


def retained_gradients():
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        y = x * 2
        y.retain_grad()
        z = rpc.rpc_sync("worker1", torch.mul, (y, 5.0))
        z.retain_grad()
        autograd.backward(context, [(z * z).sum()])
        close((y.grad, z.grad), (torch.full((3,), 100.0), torch.full((3,), 20.0)))
        assert x.grad is None


def many_micro_batches():
    """All in flight, each through a chain of workers and back, one loss."""
    w = [weight("w", each) for each in range(3)]
    with autograd.context() as context:
        futures = []
        for number in range(20):
            x = torch.full((3,), number / 10, dtype=torch.float64) * w[0]
            futures.append(rpc.rpc_async("worker1", through, (x,)))
        loss = sum(future.wait().sum() for future in futures)
        autograd.backward(context, [loss])
        expected = local(
            lambda: sum(((number / 10) * w[0] * w[1] * w[2]).sin().sum() for number in range(20)),
            *w,
        )
        close(tuple(fetch(context, "w", each) for each in range(3)), expected)


def through(x):
    return remote_scaled(x * weight("w", 1), "w", 2).sin()


def rows(ids):
    table = _kept.setdefault("table", torch.nn.Embedding(10, 2, sparse=True))
    return table(ids)


def row_gradients(context):
    gradient = autograd.get_gradients(context)[_kept["table"].weight]
    assert gradient.is_sparse
    return gradient.to_dense()


def embedding_rows():
    """A sparse gradient of a leaf, summed over two passes."""
    with autograd.context() as context:
        for _ in range(2):
            actual = rpc.rpc_sync("worker1", rows, (torch.tensor([1, 1, 4]),))
            autograd.backward(context, [(actual * torch.tensor([[1.0], [2.0], [3.0]])).sum()])
        expected = torch.zeros(10, 2)
        expected[1] = 6
        expected[4] = 6
        close(rpc.rpc_sync("worker1", row_gradients, (context,)), expected)


def no_grad_is_respected():
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        with torch.no_grad():
            y = rpc.rpc_sync("worker1", torch.mul, (x, 2.0))
        assert not y.requires_grad
        z = rpc.rpc_sync("worker1", torch.mul, (x.detach(), 2.0))
        assert not z.requires_grad
        with pytest.raises(RuntimeError, match="does not require"):
            autograd.backward(context, [z.sum()])


def gradient_is_ours():
    """Changing one gradient changes no other, and not the sums of later passes."""
    x = torch.ones(3, requires_grad=True)
    y = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.rpc_sync("worker0", torch.add, (x, y)).sum() + (x + y).sum()
        autograd.backward(context, [loss])
        gradients = autograd.get_gradients(context)
        gradients[x].zero_()
        assert gradients[y].tolist() == [2, 2, 2]
        autograd.backward(context, [(x + y).sum()])
        assert autograd.get_gradients(context)[y].tolist() == [3, 3, 3]
        assert gradients[y].tolist() == [2, 2, 2]


def leaves_keep_their_own_gradients():
    x = torch.ones(3, requires_grad=True)
    x.grad = torch.full((3,), 9.0)
    with autograd.context() as context:
        autograd.backward(context, [rpc.rpc_sync("worker1", torch.mul, (x, 2.0)).sum()])
        assert x.grad.tolist() == [9, 9, 9] and autograd.get_gradients(context)[x].tolist() == [
            2,
            2,
            2,
        ]


def wrong_use():
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        assert autograd.current_context() == context
        with pytest.raises(RuntimeError, match="one at a time"), autograd.context():
            pass
        for roots in ([], [x.detach().sum()], [x * 1]):
            with pytest.raises(RuntimeError):
                autograd.backward(context, roots)
    assert autograd.current_context() is None
    for use in (
        lambda: autograd.get_gradients(context),
        lambda: autograd.backward(context, [x.sum()]),
    ):
        with pytest.raises(RuntimeError, match="not open on this worker"):
            use()


def local_backward_is_refused():
    x = torch.ones(3, requires_grad=True)
    with autograd.context():
        y = rpc.rpc_sync("worker1", torch.mul, (x, 2.0))
        with pytest.raises(RuntimeError, match="local backward"):
            y.sum().backward()


def here_and_next(worker):
    result = [autograd.current_context()]
    if worker:
        result += rpc.rpc_sync(f"worker{worker}", here_and_next, (worker - 1,))
    return result


def context_follows_the_calls():
    with autograd.context() as context:
        assert rpc.rpc_sync("worker2", here_and_next, (2,)) == [context] * 3
    assert rpc.rpc_sync("worker2", here_and_next, (2,)) == [None] * 3


def made(reference, worker):
    return reference.to_here() * weight("w", worker)


def chained_references():
    """Some values stay where they are made, others travel; the root is elsewhere."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with autograd.context() as context:
        first = rpc.remote("worker1", scaled, (x, "w", 1))
        second = rpc.remote("worker2", made, (first, 2))
        loss = rpc.remote("worker1", total, (first, second))
        loss.backward(context)
        w1 = weight("w", 1)
        w2 = weight("w", 2)
        expected = local(lambda: (x * w1 * (x * w1 * w2)).sum(), x, w1, w2)
        close(
            (autograd.get_gradients(context)[x], fetch(context, "w", 1), fetch(context, "w", 2)),
            expected,
        )


def total(first, second):
    return (first.to_here() * second.to_here()).sum()


def diamond(depth):
    """Each step's value goes to worker1 twice, and the sum is the next.

    Returns how often a step's function ran.
    """
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    runs = []
    with autograd.context() as context:
        y = x
        for _ in range(depth):
            y = y * 0.5
            y.grad_fn.register_hook(lambda inputs, outputs: runs.append(1))
            left, right = (
                rpc.rpc_async("worker1", torch.mul, (y, factor)) for factor in (1.0, 2.0)
            )
            y = left.wait() + right.wait()
        autograd.backward(context, [y.sum()])
        close(autograd.get_gradients(context)[x], torch.full((3,), 1.5**depth, dtype=torch.float64))
    return len(runs)
