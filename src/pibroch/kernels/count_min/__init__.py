"""How often each of very many keys was seen, about, in one byte or a few for each."""

from pibroch.kernels.count_min.numba import MOST, NUM_HASHES, add

__all__ = ["MOST", "NUM_HASHES", "add"]
