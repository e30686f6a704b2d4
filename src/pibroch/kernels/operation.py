"""An operation and its implementations, of which the device of an argument chooses one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Operation(Generic[P, T]):
    """A function of arrays that has an implementation for each type of devices.

    Made by ``@Operation`` from the one that runs compiled on the CPU. Others enter a table, each
    under a name:

        >>> import numpy as np
        >>> @Operation
        ... def double(numbers):
        ...     return numbers * 2
        >>> double.register("slow", lambda numbers: numbers + numbers, device="cpu")
        >>> double(np.arange(3)), double.kinds
        (array([0, 2, 4]), ('numba', 'slow'))

    Args:
        function: the implementation for NumPy arrays; its first argument is an array.
    """

    def __init__(self, function: Callable[P, T]) -> None:
        functools.update_wrapper(self, function)
        self.__name__: str = function.__name__
        self._kinds = {"numba": function}
        self._of_device = {"cpu": function}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """What the implementation for the first argument's device returns."""
        device = getattr(args[0], "device", "cpu")
        return (self._of_device.get(device) or self._for(device))(*args, **kwargs)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the implementations."""
        return tuple(self._kinds)

    def register(self, kind: str, function: Callable[P, T], device: str | None = None) -> None:
        """Enter an implementation into the table.

        Args:
            kind: its name; what had it before is replaced.
            function: takes and returns what this operation does.
            device: the type of devices for whose arrays it runs from now on; none when absent.
        """
        self._kinds[kind] = function
        if device is not None:
            self.choose(kind, device)

    def choose(self, kind: str, device: str = "cpu") -> None:
        """Have an implementation of the table run for arrays on a type of devices.

        Args:
            kind: its name.
            device: as in ``torch.device.type``; NumPy arrays are on the ``"cpu"``.

        Raises:
            KeyError: when no implementation has that name.
        """
        self._of_device[device] = self._kinds[kind]

    def _for(self, device: object) -> Callable[P, T]:
        """The implementation for a device with a number, as ``cuda:0``."""
        kind = str(device).partition(":")[0]
        if kind not in self._of_device:
            raise TypeError(
                f"got arrays on {device} for {self.__name__}; need one of"
                f" {', '.join(self._of_device)}; move them, or register an implementation"
            )
        return self._of_device[kind]
