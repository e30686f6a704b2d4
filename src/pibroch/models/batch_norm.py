"""Batch norm over the global batch.

Moments are those of all ranks' samples, however they are divided.

Shape legend: B samples of this rank, C columns, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from pibroch.errors import DataError

Gather = Callable[[Tensor], Tensor]
"""A vector ``[K]`` of this rank to those of all, ``[W, K]`` in rank order.

Blocks, and all ranks must call it.
"""


class BatchNorm(nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` for ``[B, C]``, with moments over all ranks.

    They are over all ranks once :attr:`gather` is set; until then over this process's samples.

    A global batch of fewer than two samples passes by the running statistics: one sample has no
    variance, and the last batch of an epoch may hold just one. A rank's own part may be empty. In
    training every rank must call it.

    Attributes:
        gather: set by :func:`pibroch.data_parallel`; ``None`` for one process.
        gradients_are_weighted: whether those that come in are of the mean over the global batch,
            not over a rank's own.
    """

    def __init__(self, num_features: int, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.gather: Gather | None = None
        self.gradients_are_weighted = False

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C]`` to the same.

        Raises:
            DataError: for another number of dimensions, over ranks.
        """
        if not self.training:
            return super().forward(x)
        if self.gather is None:
            return super().forward(x) if len(x) > 1 else self._by_running_statistics(x)
        if x.ndim != 2:
            raise DataError(
                f"{list(x.shape)} for a batch norm over ranks", "[B, C]", "flatten it before"
            )
        count, mean, squares = _combine(self.gather(_moments(x)))
        if count < 2:
            return self._by_running_statistics(x)
        self._update_running_statistics(mean, squares / (count - 1))
        inverse_std = (squares / count + self.eps).rsqrt()
        out: Tensor = _Normalise.apply(
            x,
            self.weight,
            self.bias,
            mean.to(x.device),
            inverse_std.to(x.device),
            count,
            self.gather,
            self.gradients_are_weighted,
        )
        return out

    def _by_running_statistics(self, x: Tensor) -> Tensor:
        return functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )

    def _update_running_statistics(self, mean: Tensor, variance: Tensor) -> None:
        if (
            self.running_mean is None
            or self.running_var is None
            or self.num_batches_tracked is None
        ):
            return
        self.num_batches_tracked.add_(1)
        factor = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            running.copy_((1 - factor) * running + factor * new.to(running))


def _moments(x: Tensor) -> Tensor:
    """Count, mean and squares about the mean of this rank's samples, float64 ``[1 + 2 C]``."""
    x = x.detach().float()
    mean = x.sum(0) / max(1, len(x))
    squares = (x - mean).square().sum(0)
    return torch.cat([mean.new_tensor([len(x)]), mean, squares]).double().cpu()


def _combine(moments: Tensor) -> tuple[int, Tensor, Tensor]:
    """Moments of all samples from those of the ranks ``[W, 1 + 2 C]`` (Chan et al. 1979).

    >>> _combine(torch.tensor([[1.0, 4.0, 0.0], [2.0, 1.0, 2.0]]))  # 4 here; 0 and 2 there
    (3, tensor([2.]), tensor([8.]))
    """
    counts = moments[:, :1]
    (means, squares) = moments[:, 1:].chunk(2, 1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total.clamp(min=1)
    return int(total), mean, (squares + counts * (means - mean) ** 2).sum(0)


class _Normalise(torch.autograd.Function):
    """Normalise by moments to which the samples of all ranks contributed.

    Moments are float64, gradients float32.

    A rank's loss is the mean over its own samples, and its gradients are later weighted with its
    share of the global batch (``n_r / N``), or weighted already. So with g the gradient of the
    output, ``x_hat`` the normalised input, sums over ranks: ``dx = weight / std * (g - (S + x_hat
    T) / n_r)`` where ``S = sum_r (n_r / N) sum g``, ``T = sum_r (n_r / N) sum g x_hat``; of
    weighted ones ``dx = weight / std * (g - (S + x_hat T) / N)`` where ``S = sum_r sum g``, ``T =
    sum_r sum g x_hat``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        inverse_std: Tensor,
        count: int,
        gather: Gather,
        is_weighted: bool,
    ) -> Tensor:
        normalised = (x.float() - mean.float()).mul_(inverse_std.float()).to(x.dtype)
        ctx.count = count
        ctx.gather = gather
        ctx.is_weighted = is_weighted
        ctx.save_for_backward(normalised, weight, inverse_std)
        if weight is None or bias is None:
            return normalised
        return torch.addcmul(bias, normalised, weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normalised, weight, inverse_std = ctx.saved_tensors
        wide_grad = grad.float()
        x_hat = normalised.float()
        product = wide_grad * x_hat
        grad_bias = wide_grad.sum(0)
        grad_weight = product.sum(0)
        share, of_samples = (
            (1.0, ctx.count) if ctx.is_weighted else (len(grad) / ctx.count, max(1, len(grad)))
        )
        sums = (
            ctx.gather(torch.cat([grad_bias, grad_weight]).double().cpu() * share)
            .sum(0)
            .to(grad.device)
        )
        by_sample, by_value = (sums / of_samples).float().chunk(2)
        scale = (inverse_std if weight is None else inverse_std * weight).float()
        grad_x = (
            torch.mul(x_hat, by_value, out=product)
            .add_(by_sample)
            .sub_(wide_grad)
            .mul_(-scale)
            .to(grad.dtype)
        )
        needs = ctx.needs_input_grad
        return (
            grad_x,
            grad_weight if needs[1] else None,
            grad_bias if needs[2] else None,
            None,
            None,
            None,
            None,
            None,
        )
