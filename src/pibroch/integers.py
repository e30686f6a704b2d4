"""Whole numbers that users give: Python's, NumPy's, torch's, whatever counts as an index."""

from __future__ import annotations

import operator
from typing import Any

from pibroch.errors import ConfigError


def whole_number(value: Any, what: str, least: int = 0, do: str = "") -> int:
    """``value`` as an ``int``.

    Args:
        value: what was given.
        what: what it is, for the message.
        least: the smallest that makes sense.
        do: what can be done about another one.

    Raises:
        ConfigError: for what is no integer (True and False are none), or a smaller one.

    >>> import numpy as np
    >>> whole_number(np.int64(5), "step")
    5
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError):  # the latter from a tensor of several
        number = None
    if number is None or number < least:
        raise ConfigError(f"{what} {value!r}", f"a whole number of at least {least}", do)
    return number
