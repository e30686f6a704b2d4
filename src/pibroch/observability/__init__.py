"""Progress, metrics sinks and reports."""
