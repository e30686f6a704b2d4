"""Upper bounds of the number of elements in the results of torch's functions, by their arguments.

A rule gets the positional and keyword arguments of a call; its docstring shows the parameters.
Where arguments make no sense the bound is 0: torch then raises an error that says what is wrong.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from pibroch.rpc.values.checks import MAX_DIMS, Size, integer, spread

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
_HUGE = 1 << 100


def argument(args: Args, kwargs: Kwargs, place: int, name: str, default: object = None) -> Any:
    """An argument that may be passed by position or by name."""
    return args[place] if place < len(args) else kwargs.get(name, default)


def product(sizes: Iterable[object]) -> int:
    """The product of sizes, without those below 1 and what is not an integer.

    It is huge for more dimensions than a tensor may have.
    """
    kept = [size for size in map(integer, sizes) if size is not None and size > 0]
    return math.prod(kept) if len(kept) <= MAX_DIMS else _HUGE


def _lenient(rule: Size) -> Size:
    @functools.wraps(rule)
    def size(args: Args, kwargs: Kwargs) -> Any:
        try:
            return int(rule(args, kwargs))
        except (TypeError, IndexError, AttributeError, ValueError, ZeroDivisionError, KeyError):
            return 0
        except OverflowError:  # of infinity
            return _HUGE

    return size


def by_sizes(args: Args, kwargs: Kwargs) -> Any:
    """The largest list of sizes, or all integers as sizes."""
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
    """A tensor and sizes, with -1 for sizes that stay."""
    tensor = args[0]
    sizes = _sizes(args, kwargs)
    if len(sizes) > MAX_DIMS:
        return _HUGE
    old = [1] * (len(sizes) - tensor.dim()) + [*tensor.shape]
    return math.prod(new if new >= 0 else size for new, size in zip(sizes, old, strict=True))


def repeat(args: Args, kwargs: Kwargs) -> Any:
    """A tensor, and how often it is repeated along each dimension."""
    sizes = _sizes(args, kwargs)
    return _HUGE if len(sizes) > MAX_DIMS else args[0].numel() * math.prod(sizes)


def _sizes(args: Args, kwargs: Kwargs) -> list[int]:
    sizes = [*args[1:], *kwargs.values()]
    return [*sizes[0]] if sizes and isinstance(sizes[0], (list, tuple)) else sizes


def diag(args: Args, kwargs: Kwargs) -> Any:
    """A square matrix for each vector, or the diagonal of a matrix."""
    tensor = args[0]
    offset = argument(args, kwargs, 1, "offset", kwargs.get("diagonal", 0))
    last = max(tensor.shape[-1] if tensor.dim() else 1, 1)
    return (
        (tensor.numel() // last + 1) * (last + abs(offset)) ** 2
        if tensor.dim() != 2
        else tensor.numel() + last**2
    )


def diagflat(args: Args, kwargs: Kwargs) -> Any:
    """A square matrix."""
    return int((args[0].numel() + abs(argument(args, kwargs, 1, "offset", 0))) ** 2)


def diag_embed(args: Args, kwargs: Kwargs) -> Any:
    """A square matrix for each vector of the last dimension."""
    tensor = args[0]
    offset = argument(args, kwargs, 1, "offset", 0)
    last = max(tensor.shape[-1], 1)
    return tensor.numel() // last * (last + abs(offset)) ** 2


def block_diag(args: Args, kwargs: Kwargs) -> Any:
    """Matrices along a diagonal."""
    shapes = [[1] * (2 - each.dim()) + [*each.shape] for each in args]
    return sum(shape[0] for shape in shapes) * sum(shape[1] for shape in shapes)


def second_number(args: Args, kwargs: Kwargs) -> Any:
    """A tensor and a number: as many elements for each of its rows."""
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
    """``(…, a, b)``: rows of a times columns of b, with batches broadcast against each other."""
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
    """One number for each combination of one element of each operand."""
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
    """``(equation, operands…)``; more than two count as if multiplied all at once."""
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


def adaptive(args: Args, kwargs: Kwargs) -> Any:
    """``(input, output_size)``: the last dimensions get these sizes."""
    tensor = args[0]
    sizes = argument(args, kwargs, 1, "output_size")
    spatial = max(tensor.dim() - 2, 1)
    sizes = [sizes] * spatial if isinstance(sizes, int) else sizes
    return (
        math.prod(tensor.shape[: -len(sizes)]) * math.prod(max(new or 0, 1) for new in sizes)
        + tensor.numel()
    )


def pad(args: Args, kwargs: Kwargs) -> Any:
    """``(input, pad)``: two numbers for each dimension, the last one first."""
    shape = [*args[0].shape]
    pads = argument(args, kwargs, 1, "pad")
    if len(pads) > 2 * len(shape):
        return 0
    for place in range(len(pads) // 2):
        shape[-1 - place] += max(pads[2 * place], 0) + max(pads[2 * place + 1], 0)
    return math.prod(shape)


def interpolate(args: Args, kwargs: Kwargs) -> Any:
    """``(input, size, scale_factor)``."""
    tensor = args[0]
    size = argument(args, kwargs, 1, "size")
    scale = argument(args, kwargs, 2, "scale_factor")
    num_dims = tensor.dim() - 2
    if size is not None:
        sizes = [size] * num_dims if isinstance(size, int) else size
        return math.prod(tensor.shape[:2]) * math.prod(sizes)
    scales = [scale] * num_dims if isinstance(scale, (int, float)) else scale
    return math.ceil(tensor.numel() * math.prod(scales))


def fold(args: Args, kwargs: Kwargs) -> Any:
    """``(input, output_size, …)``."""
    sizes = argument(args, kwargs, 1, "output_size")
    return int(args[0].numel()) * math.prod([sizes] * 2 if isinstance(sizes, int) else sizes)


def unfold(args: Args, kwargs: Kwargs) -> Any:
    """``(input, kernel_size, dilation, padding, stride)``: a column for each kernel position."""
    shape = args[0].shape
    kernel = _pair(argument(args, kwargs, 1, "kernel_size"))
    padding = _pair(argument(args, kwargs, 3, "padding", 0))
    spatial = math.prod(size + 2 * each for size, each in zip(shape[-2:], padding, strict=True))
    return math.prod(shape[:-2]) * math.prod(kernel) * spatial


def unfold_view(args: Args, kwargs: Kwargs) -> Any:
    """``(tensor, dimension, size, step)``: all windows."""
    tensor, dim, size, step = args
    length = tensor.shape[dim]
    return tensor.numel() // max(length, 1) * ((length - size) // step + 1) * size


def _pair(value: Any, count: int = 2) -> list[Any]:
    return (
        [value] * count if isinstance(value, int) else [*value] * (count if len(value) == 1 else 1)
    )


def convolution(args: Args, kwargs: Kwargs) -> Any:
    """``(input, weight, bias, stride, padding, dilation)``."""
    shape = args[0].shape
    weight = argument(args, kwargs, 1, "weight").shape
    count = len(weight) - 2
    stride = _pair(argument(args, kwargs, 3, "stride", 1), count)
    dilation = _pair(argument(args, kwargs, 5, "dilation", 1), count)
    padding = argument(args, kwargs, 4, "padding", 0)
    wide = [d * (k - 1) for d, k in zip(dilation, weight[2:], strict=True)]
    pads = [(each + 1) // 2 for each in wide] if isinstance(padding, str) else _pair(padding, count)
    padded = [size + 2 * each for size, each in zip(shape[-count:], pads, strict=True)]
    out = [(size - w - 1) // s + 1 for size, w, s in zip(padded, wide, stride, strict=True)]
    outer = math.prod(shape[:-count])
    return max(
        outer * math.prod(padded), outer * weight[0] * math.prod(max(each, 1) for each in out)
    )


def transposed_convolution(args: Args, kwargs: Kwargs) -> Any:
    """``(input, weight, bias, stride, padding, output_padding, groups, dilation)``."""
    shape = args[0].shape
    weight = argument(args, kwargs, 1, "weight").shape
    count = len(weight) - 2
    stride = _pair(argument(args, kwargs, 3, "stride", 1), count)
    more = _pair(argument(args, kwargs, 5, "output_padding", 0), count)
    dilation = _pair(argument(args, kwargs, 7, "dilation", 1), count)
    sizes = zip(shape[-count:], stride, dilation, weight[2:], more, strict=True)
    out = [(size - 1) * s + d * (k - 1) + m + 1 for size, s, d, k, m in sizes]
    groups = argument(args, kwargs, 6, "groups", 1)
    return (
        math.prod(shape[: -count - 1])
        * weight[1]
        * groups
        * math.prod(max(each, 1) for each in out)
    )


_RULES: dict[Callable[[Args, Kwargs], int], str] = {
    by_sizes: (
        "ones zeros full rand randn randint randperm new_full new_ones new_zeros"
        " hann_window hamming_window bartlett_window blackman_window fftfreq rfftfreq"
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
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"
        " adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"
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
    """An upper bound of the elements of ``value[index]``, for indices without masks."""
    broadcast_sizes: list[int] = []
    num_indexed = 0
    for part in index:
        if isinstance(part, (Tensor, list)):
            broadcast_sizes = _batches(
                broadcast_sizes, [*part.shape] if isinstance(part, Tensor) else [len(part)]
            )
            num_indexed += 1
    kept = sorted(value.shape)[num_indexed:]  # the largest dimensions may be those that are kept
    return math.prod(broadcast_sizes) * math.prod(kept)
