"""How many elements results of convolutions, pooling, padding and windows have, as in ``result_sizes.py``."""

from __future__ import annotations

import math
from typing import Any

from pibroch.rpc.values.call_arguments import Args, Kwargs, argument


def adaptive(args: Args, kwargs: Kwargs) -> Any:
    """``(input, output_size)``: the last dimensions become these."""
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
    """``(input, kernel_size, dilation, padding, stride)``: a column for each place of the kernel."""
    shape = args[0].shape
    kernel = _pair(argument(args, kwargs, 1, "kernel_size"))
    padding = _pair(argument(args, kwargs, 3, "padding", 0))
    spatial = math.prod(size + 2 * each for size, each in zip(shape[-2:], padding, strict=True))
    return math.prod(shape[:-2]) * math.prod(kernel) * spatial


def unfold_view(args: Args, kwargs: Kwargs) -> Any:
    """``(tensor, dimension, size, step)``: windows."""
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
