"""From trained models to answers: predictors, exports, a server for them, and inference of many ranks."""

from pibroch.serve.bounded_lag import BoundedLagPipeline, Prediction

__all__ = ["BoundedLagPipeline", "Prediction"]
