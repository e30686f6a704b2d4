"""Checkpoints over splits of data: metrics, files of scores, feature groups."""
