"""A loss that is finite where its gradient is not."""

from torch.nn import functional

from pibroch.config.loss import LossConfig
from pibroch.models import Loss


class EdgeConfig(LossConfig):
    """Nothing to choose."""


class Edge(Loss):
    """Its root has no slope at 0, where a logit is so large that its tanh is rounded to 1."""

    section = EdgeConfig
    labels = "binary"

    def __call__(self, logits, labels, weights=None):
        entropy = functional.binary_cross_entropy_with_logits(logits, labels)
        return entropy + (1 - logits.tanh().square()).sqrt().mean()
