"""Items found by a graph, in far less time than by all products: the extra `retrieval`.

A hierarchical navigable small world (Malkov and Yashunin, TPAMI 2020), as Faiss builds it, over
products in place of distances (Morozov and Babenko, NeurIPS 2018).

Shape legend: B users, N items, E width of a vector, k items that are wanted.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from pibroch.errors import MissingDependencyError
from pibroch.serve.retrieval import ExactIndex

NEIGHBOURS = 32
"""Of an item in the graph, twice as many on its lowest level; 4 bytes each."""
BUILD_CANDIDATES = 100
"""That are compared to choose them."""
SEARCH_CANDIDATES = 256
"""That a search keeps, or 4 k where that is more."""


class GraphIndex:
    """Finds most of the best items, by some thousands of products for a user, whatever N is.

    Some of the k best may be missing, and others stand in their place; products are exact. Made on
    torch's number of threads; with more than one the graph, and what it misses, differs from time
    to time. Any number of threads may search.

    Args:
        items: float32 ``[N, E]``; held twice, with some 270 bytes an item for the graph.

    Raises:
        MissingDependencyError: without Faiss.
    """

    def __init__(self, items: Tensor) -> None:
        self._faiss = need_faiss()
        self._exact = ExactIndex(items)
        self._items = items
        self._graph = self._faiss.IndexHNSWFlat(
            items.shape[1], NEIGHBOURS, self._faiss.METRIC_INNER_PRODUCT
        )
        self._graph.hnsw.efConstruction = BUILD_CANDIDATES
        self._faiss.omp_set_num_threads(torch.get_num_threads())
        self._graph.add(items.contiguous().numpy())

    def search(self, users: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See :class:`pibroch.serve.retrieval.ItemIndex`."""
        settings = self._faiss.SearchParametersHNSW(efSearch=max(SEARCH_CANDIDATES, 4 * k))
        self._faiss.omp_set_num_threads(torch.get_num_threads())
        found = self._graph.search(users.contiguous().numpy(), k, params=settings)[1]
        places = torch.from_numpy(found)
        if bool((places < 0).any()):  # the graph led to fewer than k
            return self._exact.search(users, k)
        products = torch.einsum("be,bke->bk", users, self._items[places])
        scores, order = products.sort(1, descending=True)
        return scores, places.gather(1, order)


def need_faiss() -> Any:
    """The package.

    Raises:
        MissingDependencyError: where it is not installed.
    """
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise MissingDependencyError(
            "an index by a graph without faiss",
            "the extra `retrieval`",
            "pip install 'pibroch[retrieval]', or leave --items-index out for exact search",
        ) from error
