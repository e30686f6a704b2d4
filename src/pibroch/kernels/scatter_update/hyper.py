"""What an optimizer's kernel needs to know in one step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Hyper(NamedTuple):
    """Numbers of one step, float32 in the compiled kernels.

    What an optimizer does not use stays at its default.

    Attributes:
        lr: learning rate of this step.
        weight_decay: L2, added to the gradient of touched rows.
        max_norm: the row's gradient is clipped to this norm, 0 for never.
        max_element: each element of the row's gradient is clipped to plus or minus this, before the
            norm, 0 for never.
        shrink: the weights are multiplied by it before anything else: decoupled weight decay; 1 for
            none.
        eps: added to the root of the second moment.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        correction1: ``1 - beta1 ** step``.
        correction2: ``1 - beta2 ** step``.
    """

    lr: float
    weight_decay: float = 0.0
    max_norm: float = 0.0
    eps: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    correction1: float = 1.0
    correction2: float = 1.0
    max_element: float = 0.0
    shrink: float = 1.0

    def as_float32(self) -> Hyper:
        """The same numbers as NumPy float32, so that kernels compute in one precision."""
        return Hyper(*(np.float32(number) for number in self))  # type: ignore[arg-type]
