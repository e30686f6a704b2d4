"""Scores from trained models: what answers requests rather than learns."""

from pibroch.serve.bounded_lag import BoundedLagPipeline, Prediction

__all__ = ["BoundedLagPipeline", "Prediction"]
