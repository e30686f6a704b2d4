"""What the optimizers mean, one row at a time, in plain NumPy with float64 inside.

A record is ``[weights (D), state...]``. Formulas are those of ``torch.optim`` (SGD, Adagrad, Adam)
with L2 ``weight_decay`` added to the gradient; the row-wise kinds keep one second moment a row, the
mean of the squared gradient over the row (Gupta et al. 2014 for Adagrad). Only touched rows decay
and move.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.scatter_update.hyper import Hyper
from pibroch.kernels.scatter_update.numba import Grouped

Row = NDArray[np.float64]


def combine(
    gradients: NDArray[np.float32],
    source: NDArray[np.int32],
    scale: NDArray[np.float32],
    positions: NDArray[np.int32],
    rows_per_gradient: int = 1,
) -> Row:
    """Gradient of one row: the sum over its positions of ``scale`` times their gradients."""
    total = np.zeros(rows_per_gradient * gradients.shape[1])
    for position in positions:
        gradient = gradients[source[position] : source[position] + rows_per_gradient].ravel()
        total += (float(scale[position]) if len(scale) else 1.0) * gradient
    return total


def sum_gradients(
    grouped: Grouped, gradients: NDArray[np.float32], share: float
) -> NDArray[np.float64]:
    """The gradient of each distinct row ``[U, D]``, times ``share``."""
    rows = [grouped.order[start:stop] for start, stop in pairwise(grouped.segments)]
    sums = [
        combine(gradients, grouped.source, grouped.scale, row, grouped.rows_per_gradient)
        for row in rows
    ]
    return share * np.array(sums).reshape(len(rows), -1)


def prepare(weights: Row, gradient: Row, hyper: Hyper) -> Row:
    """Clip the row's gradient by element, then to ``max_norm`` (0: never).

    Shrink the weights in place, add L2 decay.
    """
    if hyper.max_element > 0:
        gradient = np.clip(gradient, -hyper.max_element, hyper.max_element)
    weights *= hyper.shrink
    norm = float(np.sqrt((gradient**2).sum()))
    clip = hyper.max_norm / norm if hyper.max_norm > 0 and norm > hyper.max_norm else 1.0
    return clip * gradient + hyper.weight_decay * weights


def sgd(record: Row, gradient: Row, hyper: Hyper) -> None:
    """``w -= lr * g``."""
    record[: len(gradient)] -= hyper.lr * prepare(record[: len(gradient)], gradient, hyper)


def adagrad(record: Row, gradient: Row, hyper: Hyper) -> None:
    """``s += g²; w -= lr * g / (sqrt(s) + eps)``."""
    weights, squares = np.split(record, 2)
    g = prepare(weights, gradient, hyper)
    squares += g**2
    weights -= hyper.lr * g / (np.sqrt(squares) + hyper.eps)


def row_wise_adagrad(record: Row, gradient: Row, hyper: Hyper) -> None:
    """As Adagrad with one ``s += mean(g²)`` a row."""
    weights = record[:-1]
    squares = record[-1:]
    g = prepare(weights, gradient, hyper)
    squares += (g**2).mean()
    weights -= hyper.lr * g / (np.sqrt(squares) + hyper.eps)


def adam(record: Row, gradient: Row, hyper: Hyper) -> None:
    """``m, v`` moving averages of ``g, g²``.

    ``w -= lr * (m / c1) / (sqrt(v / c2) + eps)`` with ``c = 1 - beta^step``.
    """
    weights, first, second = np.split(record, 3)
    g = prepare(weights, gradient, hyper)
    first += (1 - hyper.beta1) * (g - first)
    second += (1 - hyper.beta2) * (g**2 - second)
    weights -= (
        hyper.lr * (first / hyper.correction1) / (np.sqrt(second / hyper.correction2) + hyper.eps)
    )


def row_wise_adam(record: Row, gradient: Row, hyper: Hyper) -> None:
    """As Adam with one ``v`` a row, of ``mean(g²)``."""
    dim = len(gradient)
    weights = record[:dim]
    first = record[dim : 2 * dim]
    second = record[2 * dim :]
    g = prepare(weights, gradient, hyper)
    first += (1 - hyper.beta1) * (g - first)
    second += (1 - hyper.beta2) * ((g**2).mean() - second)
    weights -= (
        hyper.lr * (first / hyper.correction1) / (np.sqrt(second / hyper.correction2) + hyper.eps)
    )
