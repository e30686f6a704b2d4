"""Which rank takes which sample."""
