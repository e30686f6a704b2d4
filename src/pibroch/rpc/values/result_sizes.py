"""How many elements the result of a function of torch will have, by its arguments.

Never fewer than it will have.

Arguments that make no sense count as nothing: torch will say what is wrong with them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from pibroch.rpc.values.call_arguments import HUGE, Args, Kwargs, argument, product
from pibroch.rpc.values.checks import MAX_DIMS, Size, spread
from pibroch.rpc.values.spatial_sizes import (
    adaptive,
    convolution,
    fold,
    interpolate,
    pad,
    transposed_convolution,
    unfold,
    unfold_view,
)


def _lenient(rule: Size) -> Size:
    @functools.wraps(rule)
    def size(args: Args, kwargs: Kwargs) -> Any:
        try:
            return int(rule(args, kwargs))
        except (TypeError, IndexError, AttributeError, ValueError, ZeroDivisionError, KeyError):
            return 0
        except OverflowError:  # infinitely many
            return HUGE

    return size


def by_sizes(args: Args, kwargs: Kwargs) -> Any:
    """The first list of sizes, or all integers."""
    lists = [each for each in (*args, *kwargs.values()) if isinstance(each, (list, tuple))]
    return (
        max(map(product, lists)) if lists else product(each for each in args if type(each) is int)
    )


def like(args: Args, kwargs: Kwargs) -> Any:
    """As many as the first argument has."""
    return int(argument(args, kwargs, 0, "input").numel())


def arange(args: Args, kwargs: Kwargs) -> Any:
    """``(start, end, step)``."""
    start, end = (
        (args[0], args[1]) if len(args) > 1 else (kwargs.get("start", 0), kwargs.get("end", 0))
    )
    if len(args) == 1:
        start, end = (
            (args[0], kwargs["end"]) if "end" in kwargs else (kwargs.get("start", 0), args[0])
        )
    return math.ceil((end - start) / argument(args, kwargs, 2, "step", 1))


def steps(args: Args, kwargs: Kwargs) -> Any:
    """``(start, end, steps)``."""
    return int(argument(args, kwargs, 2, "steps", 0))


def two_sizes(args: Args, kwargs: Kwargs) -> Any:
    """``(rows, columns)``."""
    return product([*args[:2], *(value for value in kwargs.values())])


def normal(args: Args, kwargs: Kwargs) -> Any:
    """``(mean, std, size)``."""
    return max(
        spread(args, kwargs), by_sizes(args, kwargs) if len(args) > 2 or "size" in kwargs else 0
    )


def expand(args: Args, kwargs: Kwargs) -> Any:
    """A tensor and sizes, -1 where they stay."""
    tensor = args[0]
    sizes = _sizes(args, kwargs)
    if len(sizes) > MAX_DIMS:
        return HUGE
    old = [1] * (len(sizes) - tensor.dim()) + [*tensor.shape]
    return math.prod(new if new >= 0 else size for new, size in zip(sizes, old, strict=True))


def repeat(args: Args, kwargs: Kwargs) -> Any:
    """A tensor, and how often."""
    sizes = _sizes(args, kwargs)
    return HUGE if len(sizes) > MAX_DIMS else args[0].numel() * math.prod(sizes)


def _sizes(args: Args, kwargs: Kwargs) -> list[int]:
    given = [*args[1:], *kwargs.values()]
    return [*given[0]] if given and isinstance(given[0], (list, tuple)) else given


def diag(args: Args, kwargs: Kwargs) -> Any:
    """A square for each vector."""
    tensor = args[0]
    offset = argument(args, kwargs, 1, "offset", kwargs.get("diagonal", 0))
    last = max(tensor.shape[-1] if tensor.dim() else 1, 1)
    return (
        (tensor.numel() // last + 1) * (last + abs(offset)) ** 2
        if tensor.dim() != 2
        else tensor.numel() + last**2
    )


def diagflat(args: Args, kwargs: Kwargs) -> Any:
    """A square."""
    return int((args[0].numel() + abs(argument(args, kwargs, 1, "offset", 0))) ** 2)


def diag_embed(args: Args, kwargs: Kwargs) -> Any:
    """A square for each vector of the last dimension."""
    tensor = args[0]
    offset = argument(args, kwargs, 1, "offset", 0)
    last = max(tensor.shape[-1], 1)
    return tensor.numel() // last * (last + abs(offset)) ** 2


def block_diag(args: Args, kwargs: Kwargs) -> Any:
    """Matrices along a diagonal."""
    shapes = [[1] * (2 - each.dim()) + [*each.shape] for each in args]
    return sum(shape[0] for shape in shapes) * sum(shape[1] for shape in shapes)


def second_number(args: Args, kwargs: Kwargs) -> Any:
    """As many as the number behind the tensor says, for each of its rows."""
    number = (
        args[1]
        if len(args) > 1
        else next(value for value in kwargs.values() if isinstance(value, int))
    )
    return int(number) * (args[0].shape[0] if args[0].dim() else 1)


def fourier(args: Args, kwargs: Kwargs) -> Any:
    """``(input, n or s, dim)``: a length for one dimension, or for several."""
    tensor = args[0]
    lengths = argument(args, kwargs, 1, "n", kwargs.get("s"))
    if lengths is None:
        return 2 * int(tensor.numel())
    dims = argument(args, kwargs, 2, "dim")
    lengths = [lengths] if isinstance(lengths, int) else lengths
    dims = [dims] if isinstance(dims, int) else dims or range(-len(lengths), 0)
    shape = [*tensor.shape]
    for dim, length in zip(dims, lengths, strict=True):
        shape[dim] = max(shape[dim] if length == -1 else length, 1)
    return math.prod(shape)


def matmul(args: Args, kwargs: Kwargs) -> Any:
    """``(…, a, b)``, the last two operands.

    Their rows and columns, their batches spread against each other.
    """
    operands = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)][-2:]
    first, second = ([*each.shape] for each in operands)
    rows = first[-2] if len(first) > 1 else 1
    columns = second[-1] if len(second) > 1 else 1
    return math.prod(_batches(first[:-2], second[:-2])) * rows * columns


def _batches(first: list[int], second: list[int]) -> list[int]:
    length = max(len(first), len(second))
    pairs = zip(
        [1] * (length - len(first)) + first, [1] * (length - len(second)) + second, strict=True
    )
    return [max(pair) for pair in pairs]


def distances(args: Args, kwargs: Kwargs) -> Any:
    """``(a, b)``: a number for each pair of rows."""
    first = [*args[0].shape]
    second = [*args[1].shape]
    return math.prod(_batches(first[:-2], second[:-2])) * first[-2] * second[-2]


def all_pairs(args: Args, kwargs: Kwargs) -> Any:
    """A number for each choice of one element of each operand."""
    operands = (
        args[0]
        if len(args) == 1 and isinstance(args[0], (list, tuple))
        else (*args, *kwargs.values())
    )
    sizes = [each.numel() for each in operands if isinstance(each, Tensor)]
    return math.prod(sizes) * len(sizes)


def inner(args: Args, kwargs: Kwargs) -> Any:
    """``(a, b)``, the last dimension summed over."""
    last = max(args[0].shape[-1] if args[0].dim() else 1, 1)
    return (args[0].numel() // last) * (args[1].numel() // last)


def tensordot(args: Args, kwargs: Kwargs) -> Any:
    """``(a, b, dims)``."""
    dims = argument(args, kwargs, 2, "dims", 2)
    first = range(args[0].dim() - dims, args[0].dim()) if isinstance(dims, int) else dims[0]
    summed = math.prod(args[0].shape[dim] for dim in first)
    return (args[0].numel() // max(summed, 1)) * (args[1].numel() // max(summed, 1))


def einsum(args: Args, kwargs: Kwargs) -> Any:
    """``(equation, operands…)``; more than two are taken to meet all at once."""
    equation = args[0].replace(" ", "")
    operands = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
    inputs, arrow, output = equation.partition("->")
    sizes: dict[str, int] = {}
    for labels, operand in zip(inputs.split(","), operands, strict=True):
        shape = [*operand.shape]
        if "..." in labels:
            before, _, after = labels.partition("...")
            dims = len(shape) - len(before) - len(after)
            sizes["."] = max(sizes.get(".", 1), math.prod(shape[len(before) : len(before) + dims]))
            shape = shape[: len(before)] + shape[len(before) + dims :]
            labels = before + after
        for label, size in zip(labels, shape, strict=True):
            sizes[label] = max(sizes.get(label, 1), size)
    if len(operands) > 2:
        return math.prod(sizes.values())
    if not arrow:
        output = "".join(label for label in sizes if inputs.count(label) == 1 or label == ".")
    return math.prod(sizes.get(label, 1) for label in set(output.replace("...", ".")))


def index_select(args: Args, kwargs: Kwargs) -> Any:
    """``(input, dim, index)``."""
    tensor = args[0]
    index = argument(args, kwargs, 2, "index")
    return tensor.numel() // max(tensor.shape[argument(args, kwargs, 1, "dim")], 1) * index.numel()


def embedding(args: Args, kwargs: Kwargs) -> Any:
    """``(ids, weight)``."""
    return int(args[0].numel() * argument(args, kwargs, 1, "weight").shape[-1])


def outer_sum(args: Args, kwargs: Kwargs) -> Any:
    """``(input, a, b)``, where a and b are vectors."""
    return max(args[0].numel(), args[1].numel() * args[2].numel())


_RULES: dict[Callable[[Args, Kwargs], int], str] = {
    by_sizes: (
        """ones zeros full rand randn randint randperm new_full new_ones new_zeros hann_window hamming_window
        bartlett_window blackman_window fftfreq rfftfreq"""
    ),
    like: "full_like ones_like rand_like randint_like randn_like zeros_like",
    arange: "arange",
    steps: "linspace logspace",
    two_sizes: "eye tril_indices triu_indices",
    normal: "normal",
    expand: "expand broadcast_to",
    repeat: "repeat tile",
    diag: "diag",
    diagflat: "diagflat",
    diag_embed: "diag_embed",
    block_diag: "block_diag",
    second_number: "histc multinomial vander",
    adaptive: (
        """adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
        adaptive_max_pool3d"""
    ),
    pad: "pad",
    interpolate: "interpolate upsample",
    fold: "fold",
    unfold: "unfold",
    convolution: "conv1d conv2d conv3d",
    transposed_convolution: "conv_transpose1d conv_transpose2d conv_transpose3d",
    fourier: "fft fft2 fftn hfft ifft ifft2 ifftn ihfft irfft irfft2 irfftn rfft rfft2 rfftn",
    matmul: "matmul mm bmm addmm baddbmm addbmm addmv",
    distances: "cdist",
    all_pairs: "outer ger kron cartesian_prod meshgrid",
    inner: "inner",
    tensordot: "tensordot",
    einsum: "einsum",
    index_select: "index_select",
    embedding: "embedding",
    outer_sum: "addr",
}
SIZES: dict[str, Size] = {
    name: _lenient(rule) for rule, names in _RULES.items() for name in names.split()
}
spread_size = _lenient(spread)
unfold_view_size = _lenient(unfold_view)


def size_of_index(value: Tensor, index: tuple[object, ...]) -> int:
    """Elements of ``value[index]``, at most, for indices without masks.

    The last dimensions are taken for those that stay.
    """
    spread_sizes: list[int] = []
    num_taken = 0
    for part in index:
        if isinstance(part, (Tensor, list)):
            spread_sizes = _batches(
                spread_sizes, [*part.shape] if isinstance(part, Tensor) else [len(part)]
            )
            num_taken += 1
    kept = sorted(value.shape)[num_taken:]  # the largest may be those that stay
    return math.prod(spread_sizes) * math.prod(kept)
