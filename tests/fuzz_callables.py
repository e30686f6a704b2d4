"""Calls every name that peers may name with odd arguments, in a forked process.

It must not crash, hang or hold the lock.

By hand, for an hour: ``python tests/fuzz_callables.py --seconds 3600 --seed 1``.
"""

import argparse
import gc
import mmap
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from dataclasses import dataclass, field

import numpy as np
import torch

from pibroch.errors import NotAllowedError
from pibroch.rpc.values.callables import Callables
from pibroch.rpc.values.codec import Codec
from pibroch.rpc.values.known_callables import known_callables

MEMORY_BYTES = 8 << 30  # what is larger cannot be allocated
STALL_S = 0.5
SLOW_S = 2.0
HANG_S = 60.0
REPORT_BYTES = 3000
MAX_KEPT = 40
KEPT_ELEMENTS = 1 << 16

INTS = [
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    -1,
    -2,
    -3,
    64,
    1000,
    1 << 16,
    1 << 31,
    1 << 40,
    1 << 62,
    (1 << 63) - 1,
    -(1 << 63),
]
SMALL = [0, 1, 1, 2, 2, 3, -1, -2]
TEXTS = str.split("""
    mean sum none max cpu cuda meta constant reflect replicate circular nearest linear bilinear
    bicubic area fro nuc ij,jk->ik ii->i i,j->ij ...i->... left right tanh forward backward ortho
    floor trunc relu leaky_relu fan_in fan_out L U reduced complete gelsd torch.FloatTensor quint8
    utf-8 %s 1e400 -0x1
""")
KEYWORDS = str.split("""
    dim dim0 dim1 keepdim dtype size device bias weight stride padding dilation groups kernel_size
    output_size mode value p training affine alpha beta other start end step n s norm reduction
    ignore_index offsets sorted descending stable unbiased correction decimals accumulate sections
    indices src index input requires_grad out num_layers hidden_size batch_first bidirectional eps
    min max side right largest k repeats return_inverse return_counts
""")
DTYPES = [
    *(
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
    ),
    *(
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.complex128,
        torch.uint16,
        torch.uint64,
        torch.float8_e5m2,
    ),
]
SHAPES = [
    *(
        (),
        (0,),
        (1,),
        (2,),
        (3,),
        (5,),
        (16,),
        (0, 3),
        (2, 0),
        (1, 1),
        (2, 3),
        (3, 3),
        (4, 4),
        (3, 2),
        (2, 2, 2),
    ),
    *(
        (1, 2, 3),
        (2, 3, 4),
        (1, 1, 4, 4),
        (2, 3, 4, 4),
        (1, 2, 2, 2, 2),
        (2, 0, 3, 3),
        (1,) * 12,
        (1000,),
        (128, 9),
    ),
]


def crash(*_, **__):
    """What must not happen, so that it can be seen that it would be."""
    os.abort()


def hold(*_, **__):
    """Likewise: code in C that keeps other threads out."""
    return sum(range(60_000_000))


@dataclass
class State:
    """What the fuzzer draws from: chance, and results of calls before."""

    chance: random.Random
    kept: list = field(default_factory=list)
    good: dict = field(default_factory=dict)  # by name, arguments with which a call returned
    shape: tuple = ()

    def tensor(self):
        chance = self.chance
        if self.kept and chance.random() < 0.25:
            return chance.choice(self.kept)
        shape = self.shape if chance.random() < 0.7 else chance.choice(SHAPES)
        dtype = chance.choice(DTYPES) if chance.random() < 0.2 else torch.float32
        if chance.random() < 0.25:
            values = chance.choice([SMALL, SMALL, INTS])
            flat = [chance.choice(values) for _ in range(int(np.prod(shape)))]
            return torch.tensor(flat, dtype=torch.int64).view(shape)
        tensor = torch.randn(shape)
        if chance.random() < 0.1:
            tensor = tensor * float(chance.choice(["inf", "nan", "1e38", "-inf"]))
        tensor = tensor.to(dtype)
        return self.odd(tensor)

    def odd(self, tensor):
        """The same in a form that is less common."""
        if tensor.layout is not torch.strided:
            return tensor.coalesce()
        kind = self.chance.randrange(12)
        if kind == 0 and tensor.dim() > 1:
            return tensor.transpose(0, -1)
        if kind == 1:
            return tensor[None].expand(3, *tensor.shape)
        if kind == 2 and tensor.is_floating_point():
            return tensor.requires_grad_()
        if kind == 3 and tensor.dtype in (torch.float32, torch.int64):
            return tensor.to_sparse() if tensor.dim() else tensor
        if kind == 4 and tensor.is_complex():
            return tensor.conj()
        if kind == 5 and tensor.dim():
            return tensor[::2]
        return tensor

    def number(self):
        chance = self.chance
        if chance.random() < 0.5:
            return chance.choice(SMALL)
        return chance.choice(
            [*INTS, 0.5, -1.5, float("nan"), float("inf"), 1e308, True, 1j, 1 << 70]
        )

    def value(self, depth=0):
        chance = self.chance
        kind = chance.randrange(14)
        if kind < 4:
            return self.tensor()
        if kind < 7:
            return self.number()
        if kind == 7:
            return chance.choice(TEXTS)
        if kind == 8 and depth < 2:
            return [self.value(depth + 1) for _ in range(chance.randrange(5))]
        if kind == 9:
            return tuple(
                chance.choice(INTS if chance.random() < 0.3 else SMALL)
                for _ in range(chance.randrange(5))
            )
        if kind == 10:
            return [self.tensor() for _ in range(chance.randrange(4))]
        if kind == 11:
            return chance.choice(DTYPES)
        return chance.choice(
            [
                *(
                    None,
                    ...,
                    b"bytes",
                    bytearray(b"x"),
                    slice(0, 2),
                    slice(None, None, -1),
                    range(3),
                    range(1 << 62),
                ),
                *(
                    {"a": 1},
                    {1, 2},
                    torch.Size([2, 3]),
                    torch.device("cpu"),
                    np.ones(3),
                    np.arange(4).reshape(2, 2),
                ),
                *(
                    np.float32(1),
                    np.int64(1 << 40),
                    len,
                    torch.add,
                    torch.nn.functional.relu,
                    torch.nn.Linear,
                    dict,
                ),
            ]
        )

    def arguments(self, name):
        """New ones, or those of a call that returned with one or two changed."""
        chance = self.chance
        good = self.good.get(name)
        if not good or chance.random() < 0.25:
            return self.new_arguments(name.startswith("torch:Tensor."))
        args, kwargs = chance.choice(good)
        args = [*args]
        kwargs = {**kwargs}
        for _ in range(chance.choice([1, 1, 2])):
            kind = chance.random()
            if kind < 0.15:
                args.append(self.value())
            elif kind < 0.25:
                kwargs[chance.choice(KEYWORDS)] = (
                    self.value() if chance.random() < 0.5 else chance.choice(SMALL)
                )
            elif args:
                place = chance.randrange(len(args))
                args[place] = self.other(args[place])
        return args, kwargs

    def other(self, value):
        """Something in place of a good argument, most often of its kind."""
        chance = self.chance
        if chance.random() < 0.25:
            return self.value()
        if isinstance(value, torch.Tensor):
            if chance.random() < 0.5 or value.numel() > KEPT_ELEMENTS:
                return self.tensor()
            if value.layout is torch.strided and value.numel() and chance.random() < 0.5:
                changed = value.detach().contiguous().clone(memory_format=torch.contiguous_format)
                changed.view(-1)[chance.randrange(value.numel())] = chance.choice(
                    [0, 1, -1, 5, 100]
                )
                return changed
            return self.odd(value.detach())
        if isinstance(value, (int, float)):
            return self.number()
        if isinstance(value, (list, tuple)) and value:
            items = [*value]
            items[chance.randrange(len(items))] = self.other(chance.choice(items))
            return type(value)(items) if type(value) in (list, tuple) else items
        return self.value()

    def new_arguments(self, of_tensor):
        chance = self.chance
        self.shape = chance.choice(SHAPES)
        likely = (
            chance.random() < 0.6
        )  # like what it is made for: a tensor, then tensors and small numbers
        count = chance.choice([0, 0, 0, 1, 1, 1, 2, 2, 3, 4])
        if likely:
            args = [
                self.tensor() if chance.random() < 0.45 else chance.choice(SMALL)
                for _ in range(count)
            ]
        else:
            args = [self.value() for _ in range(count)]
        if of_tensor or (likely and chance.random() < 0.7):
            args.insert(0, self.tensor())
        kwargs = {}
        while chance.random() < 0.2:
            kwargs[chance.choice(KEYWORDS)] = (
                self.value() if chance.random() < 0.5 else chance.choice(SMALL)
            )
        return args, kwargs

    def worked(self, name, args, kwargs):
        """Remember arguments with which a call returned."""
        if sum(each.numel() for each in args if isinstance(each, torch.Tensor)) > KEPT_ELEMENTS:
            return
        good = self.good.setdefault(name, [])
        good.append((args, kwargs))
        if len(good) > 6:
            good.pop(self.chance.randrange(6))

    def keep(self, result):
        for each in result if isinstance(result, (list, tuple)) else [result]:
            if (
                isinstance(each, torch.Tensor)
                and each.numel() <= KEPT_ELEMENTS
                and each.dim() <= 16
            ):
                self.kept.append(each)
                if len(self.kept) > MAX_KEPT:
                    self.kept.pop(self.chance.randrange(MAX_KEPT))


def describe(value):
    if isinstance(value, torch.Tensor):
        layout = value.stride() if value.layout is torch.strided else value.layout
        return f"T({value.dtype},{tuple(value.shape)},{layout})"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(describe, value[:8]))}]"
    return repr(value)[:60]


def touch(result, codec):
    """Read all of it, as an answer does."""
    raw, tensors, _ = codec.encode(result)
    for tensor in tensors:
        if tensor.numel() <= 1 << 20:
            tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
    return raw


def fuzz(seconds, seed, names, report):
    """Call names in turn; writes each call into ``report`` before it is made."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    state = State(random.Random(seed))
    callables = Callables(("fuzz_callables",))
    codec = Codec(Callables(()))
    torch.manual_seed(seed)
    stalls = []
    slow = []
    current = [""]
    threading.Thread(target=_watch, args=(stalls, current), daemon=True).start()
    num_calls = num_done = 0
    end = time.monotonic() + seconds
    order = [*names]
    while time.monotonic() < end:
        state.chance.shuffle(order)
        for name in order:
            try:
                args, kwargs = state.arguments(name)
            except (RuntimeError, TypeError):  # what was made of kept tensors does not go together
                continue
            line = (
                f"{name}({', '.join(map(describe, args))},"
                f" { ({k: describe(v) for k, v in kwargs.items()}) })"
            )
            current[0] = line
            report[:] = f"{num_calls} {line}".encode()[:REPORT_BYTES].ljust(REPORT_BYTES)
            num_calls += 1
            began = time.monotonic()
            try:
                result = callables.to_call(name)(*args, **kwargs)
                num_done += 1
                state.worked(name, args, kwargs)
                touch(result, codec)
                state.keep(result)
            except MemoryError:
                gc.collect()
            except Exception as error:
                if isinstance(error, NotAllowedError) and "private" in str(error):
                    raise
            if time.monotonic() - began > SLOW_S:
                slow.append(f"slow, {time.monotonic() - began:.1f} s: {line}")
            if time.monotonic() > end:
                break
    return num_calls, num_done, stalls, slow


def _watch(stalls, current):
    """Note where the interpreter's lock was held for long.

    This thread did not run, and the process computed.
    """
    before = time.process_time()
    while True:
        time.sleep(0.02)
        now = time.process_time()
        if now - before > STALL_S:
            stalls.append(f"{now - before:.1f} s: {current[0]}")
        before = now


def _child(pipe, path, seconds, seed, names):
    with open(path, "wb+") as file:
        file.write(bytes(REPORT_BYTES))
        file.flush()
        with mmap.mmap(file.fileno(), REPORT_BYTES) as report:
            pipe.send(fuzz(seconds, seed, names, report))


def run(seconds, seed, folder, names=None, context=None):
    """Fuzz in another process.

    Returns calls, calls that returned, stalls, slow calls, and how it ended ("" when as it should).
    """
    context = context or multiprocessing.get_context("forkserver")
    path = f"{folder}/fuzz-{seed}.txt"
    pipe, child_pipe = context.Pipe(duplex=False)
    names = names or sorted(known_callables())
    process = context.Process(target=_child, args=(child_pipe, path, seconds, seed, names))
    process.start()
    child_pipe.close()
    deadline = time.monotonic() + seconds + HANG_S
    try:
        while not pipe.poll(0.1):
            if time.monotonic() > deadline:
                os.kill(process.pid, signal.SIGKILL)
                return 0, 0, [], [], f"hangs in {_last(path)}"
        calls = pipe.recv()
    except EOFError:
        process.join()
        return 0, 0, [], [], f"ended with {process.exitcode} in {_last(path)}"
    process.join(HANG_S)
    return *calls, "" if process.exitcode == 0 else f"ended with {process.exitcode}"


def _last(path):
    with open(path, "rb") as report:
        return report.read().decode(errors="replace").strip(" \0")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slice", type=float, default=20, help="seconds of one process")
    parser.add_argument("--names", nargs="*")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    seed = given.seed
    failures = 0
    calls = 0
    while time.monotonic() < end:
        num_calls, num_done, stalls, slow, ending = run(given.slice, seed, "/tmp", given.names)
        calls += num_calls
        print(
            f"seed {seed}: {num_calls:,} calls, {num_done:,} returned",
            *stalls,
            *slow,
            ending,
            sep="\n  ",
            flush=True,
        )
        failures += bool(ending or stalls)
        seed += 1
    print(f"{calls:,} calls of {len(known_callables())} names, {failures} failures")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
