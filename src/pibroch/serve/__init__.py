"""From a checkpoint to answers.

Predictors, exports, a server, and inference over ranks with bounded lag.

Names are loaded on first use: a predictor needs nothing of the machinery between ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pibroch.serve.bounded_lag import BoundedLagPipeline, Prediction

__all__ = ["BoundedLagPipeline", "Prediction"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pibroch.serve' has no attribute {name!r}")
    from pibroch.serve import bounded_lag

    return getattr(bounded_lag, name)
