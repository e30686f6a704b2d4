"""What users choose of bounded lag, and the environment's defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass

from pibroch.errors import ConfigError
from pibroch.integers import whole_number

SLOT_BYTES = 1 << 16
AUTO = "auto"
BOUND_VARIABLE = "PIBROCH_BLS_BOUND"
TRANSPORT_VARIABLE = "PIBROCH_BLS_TRANSPORT"


@dataclass(slots=True)
class BoundedLagOptions:
    """Options of the backend ``bls``.

    They are given as ``init_process_group(..., pg_options=)`` and ``new_group(..., pg_options=)``.

    Attributes:
        bound: k, requests that may be outstanding before a rank blocks; ``PIBROCH_BLS_BOUND`` when
            absent, else 1.
        transport: ``auto``, shared memory within a host and streams between hosts, ``stream``
            everywhere, or ``mpi``, one-sided, with the extra of that name under ``mpiexec``;
            ``PIBROCH_BLS_TRANSPORT`` when absent, else ``auto``.
        slot_bytes: what fits a slot; larger messages travel in segments that are made when they are
            needed.
    """

    bound: int | None = None
    transport: str | None = None
    slot_bytes: int = SLOT_BYTES

    def resolved_bound(self) -> int:
        """The bound that is in force where nothing is measured: 1 when none is given.

        Raises:
            ConfigError: for what is no number, or a negative one.
        """
        given = self.given_bound()
        return 1 if given is None else given

    def given_bound(self) -> int | None:
        """The bound of the options or the environment; ``None`` when there is none, or ``auto``.

        Raises:
            ConfigError: for what is no number, or a negative one.
        """
        about_zero = "0 is an ordinary all-to-all"
        if self.bound is not None:
            return whole_number(self.bound, "bound", do=about_zero)
        text = os.environ.get(BOUND_VARIABLE, AUTO)
        if text == AUTO:
            return None
        if not text.lstrip("-").isdecimal():
            raise ConfigError(f"{BOUND_VARIABLE}={text}", "a number, or auto", about_zero)
        return whole_number(int(text), BOUND_VARIABLE, do=about_zero)

    def resolved_transport(self) -> str:
        """The name of the transport that is in force."""
        return self.transport or os.environ.get(TRANSPORT_VARIABLE) or AUTO
