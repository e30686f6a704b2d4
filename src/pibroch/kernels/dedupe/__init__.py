"""Group equal row ids, so that each row is updated once."""

from pibroch.kernels.dedupe.numba import dedupe, sample_major_sequence

__all__ = ["dedupe", "sample_major_sequence"]
