"""A module that takes its time to load: calls come while only its first lines have run."""

import time

time.sleep(0.3)


def identity(value):
    return value
