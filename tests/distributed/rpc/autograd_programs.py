"""Random programs over several workers.

Run with one process by local autograd, and with several by ours.
"""

import random
import threading

import torch

from pibroch import rpc
from pibroch.rpc import autograd

SIZE = 3
NUM_PARAMS = 3
UNARY = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "flip": lambda x: x.flip(0),
    "transposed": lambda x: x.view(1, SIZE).t().sigmoid().reshape(SIZE),
    "cut": lambda x: torch.cat([x[1:], x[:1]]),
    "sum": lambda x: x.sum().expand(SIZE),  # its gradient is not contiguous
    "in place": lambda x: x.clone().mul_(2).add_(1),
}
BINARY = {
    "add": torch.add,
    "mul": torch.mul,
    "sub": torch.sub,
    "where": lambda x, y: torch.where(torch.arange(SIZE) < 1, x, y),
}
_params: dict = {}
_lock = threading.Lock()
_taking_part: set = set()


def params_of(seed, worker):
    """Leaves of a worker, the same wherever they are made."""
    with _lock:
        if (seed, worker) not in _params:
            generator = torch.Generator().manual_seed(1000 * seed + worker)
            made = [
                torch.randn(SIZE, generator=generator, dtype=torch.float64)
                for _ in range(NUM_PARAMS)
            ]
            _params[seed, worker] = [each.requires_grad_() for each in made]
        return _params[seed, worker]


def make_program(seed, num_workers):
    return _make(random.Random(seed), 0, num_workers, 0, depth=3, length=9)


def _make(chance, me, num_workers, num_inputs, depth, length):
    """Steps over registers, the first of which are the inputs; and the registers returned."""
    steps = []
    size = num_inputs
    for _ in range(length):
        kind = chance.choice(["param", "unary", "binary", "binary", "call", "call"])
        if kind == "param" or not size:
            steps.append(("param", chance.randrange(NUM_PARAMS)))
        elif kind == "unary":
            steps.append(("unary", chance.choice([*UNARY]), chance.randrange(size)))
        elif kind == "binary" or not depth:
            steps.append(
                ("binary", chance.choice([*BINARY]), chance.randrange(size), chance.randrange(size))
            )
        else:
            calls = [
                _make_call(chance, num_workers, size, depth)
                for _ in range(chance.choice([1, 1, 2]))
            ]
            steps.append(("calls", calls))
            size += sum(len(call[1][1]) for call in calls) - 1
        size += 1
    results = [chance.randrange(size) for _ in range(chance.randint(1, 3))]
    return steps, results


def _make_call(chance, num_workers, size, depth):
    target = chance.randrange(num_workers)
    inputs = [chance.randrange(size) for _ in range(chance.randint(1, 3))]
    return (
        target,
        _make(chance, target, num_workers, len(inputs), depth - 1, chance.randint(1, 4)),
        inputs,
    )


def run_program(program, me, seed, inputs, call_all):
    """The results; ``call_all([(target, program, inputs), …])`` runs parts of it elsewhere."""
    steps, results = program
    registers = list(inputs)
    for kind, *rest in steps:
        if kind == "param":
            registers.append(params_of(seed, me)[rest[0]])
        elif kind == "unary":
            registers.append(UNARY[rest[0]](registers[rest[1]]))
        elif kind == "binary":
            registers.append(BINARY[rest[0]](registers[rest[1]], registers[rest[2]]))
        else:
            calls = [
                (target, part, [registers[each] for each in given])
                for target, part, given in rest[0]
            ]
            for outcome in call_all(calls):
                registers += outcome
    return [registers[each] for each in results]


class Crossing(torch.autograd.Function):
    """A tensor in a message, locally: notes the messages that take part in a backward pass."""

    @staticmethod
    def forward(ctx, message, tensor):
        ctx.message = message
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        _taking_part.add(ctx.message)
        return None, gradient


def run_locally(program, me, seed, inputs, cross=list):
    def call_all(calls):
        return [
            list(cross(run_locally(part, target, seed, list(cross(given)), cross)))
            for target, part, given in calls
        ]

    return run_program(program, me, seed, inputs, call_all)


def _cross(tensors):
    message = object()
    return [
        Crossing.apply(message, tensor) if tensor.requires_grad else tensor for tensor in tensors
    ]


def expected(seed, num_workers):
    """Gradients of every worker's leaves by local autograd, and the number of messages."""
    program = make_program(seed, num_workers)
    leaves = [params_of(seed, worker) for worker in range(num_workers)]
    flat = [leaf for worker in leaves for leaf in worker]
    roots = [each.sum() for each in run_locally(program, 0, seed, []) if each.requires_grad]
    gradients = torch.autograd.grad(roots, flat, allow_unused=True) if roots else [None] * len(flat)
    _taking_part.clear()
    roots = [each.sum() for each in run_locally(program, 0, seed, [], _cross) if each.requires_grad]
    if roots:
        torch.autograd.grad(roots, flat, allow_unused=True)
    split = [gradients[start : start + NUM_PARAMS] for start in range(0, len(flat), NUM_PARAMS)]
    return split, len(_taking_part)


def run_remotely(program, me, seed, inputs, names):
    """Every call is one: to other workers and to this one."""

    def call_all(calls):
        futures = [
            rpc.rpc_async(names[target], run_remotely, (part, target, seed, given, names))
            for target, part, given in calls
        ]
        return [future.wait() for future in futures]

    return run_program(program, me, seed, inputs, call_all)


def gradients_of(context, seed, worker):
    gradients = autograd.get_gradients(context)
    return [gradients.get(leaf) for leaf in params_of(seed, worker)]


def check(seed, num_workers):
    """Compare, with this process as the program's worker 0.

    Returns the number of messages that should take part.
    """
    want, num_messages = expected(seed, num_workers)
    me = rpc.get_worker_info().id
    names = [f"worker{(me + each) % num_workers}" for each in range(num_workers)]
    with autograd.context() as context:
        results = run_remotely(make_program(seed, num_workers), 0, seed, [], names)
        roots = [each.sum() for each in results if each.requires_grad]
        if roots:
            autograd.backward(context, roots)
        for worker, name in enumerate(names):
            got = rpc.rpc_sync(name, gradients_of, (context, seed, worker))
            for ours, other in zip(got, want[worker], strict=True):
                assert (ours is None) == (other is None), (seed, worker, ours, other)
                if ours is not None:
                    torch.testing.assert_close(
                        ours, other, rtol=1e-9, atol=1e-9, msg=lambda text: f"{seed}: {text}"
                    )
    return num_messages
