"""What peers may name of torch, ``operator`` and the builtins: a short list.

On it are pure functions that read their arguments alone, and whose results have at most as many
elements as these broadcast against each other (``checks.py`` bounds that), and optimizers, which
work on parameters that are there. The rest of these modules also holds ways to files and code, and
functions to which a number says how large a result is to be: users allow what they need of it by
name, or call it in functions of their own.
"""

from __future__ import annotations

import builtins
import functools
import operator
import types
from collections.abc import Iterator, Mapping

import torch

# of one tensor, element by element
_ALONE = str.split("""
    abs ceil clone cos detach exp floor isfinite isnan log logical_not neg reciprocal relu round
    rsqrt sigmoid sign sin sqrt square tanh
""")
_PAIRS = str.split("""
    add clamp div eq ge gt le logical_and logical_or lt maximum minimum mul ne pow sub true_divide
""")
_REDUCING = str.split("""
    all amax amin any argmax argmin cumsum equal log_softmax logsumexp max mean min numel prod
    softmax std sum var
""")
_FORMS = str.split("flatten permute squeeze t transpose unsqueeze")
FUNCTIONS = (*_ALONE, *_PAIRS, *_REDUCING, *_FORMS)
_METHODS = (
    *FUNCTIONS,
    *(f"{name}_" for name in (*_ALONE, *_PAIRS) if hasattr(torch.Tensor, f"{name}_")),
    *str.split("copy_ dim fill_ item requires_grad_ size zero_"),
)
_OPERATORS = str.split("""
    abs add and_ eq ge gt inv invert is_ is_not le lt ne neg not_ or_ pos sub truediv truth xor
""")
_BUILTINS = str.split("abs bool len range repr")


@functools.cache
def known_callables() -> Mapping[str, object]:
    """From ``module:qualname`` to the callable, of all that is on the list."""
    return types.MappingProxyType(dict(_all()))


@functools.cache
def names_of_known() -> Mapping[int, str]:
    """From ``id`` of a listed callable to its first name.

    These callables live as long as the process, so their ids are not used again.
    """
    names: dict[int, str] = {}
    for name, function in known_callables().items():
        names.setdefault(id(function), name)
    return types.MappingProxyType(names)


def _all() -> Iterator[tuple[str, object]]:
    for module, prefix, names in (
        (builtins, "builtins:", _BUILTINS),
        (operator, "operator:", _OPERATORS),
        (torch, "torch:", FUNCTIONS),
        (torch.Tensor, "torch:Tensor.", _METHODS),
    ):
        for name in names:
            yield f"{prefix}{name}", getattr(module, name)
    for name, value in sorted(vars(torch.optim).items()):
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer):
            yield f"torch.optim:{name}", value
