"""Items found by a graph, in far less time than by all products: the extra `retrieval`.

A hierarchical navigable small world (Malkov and Yashunin, TPAMI 2020), as Faiss builds it, over
products in place of distances (Morozov and Babenko, NeurIPS 2018).

Two things would make such a graph fall apart. Items with one vector, such as all that training has
not seen, are each other's nearest neighbours, and no edge is left that leads away: the graph has
each vector once. And where all vectors lean in one direction, each item's largest products are
with the few longest: the graph is made of the vectors less their mean, which changes all products
of a user by the same number, and no order.

Shape legend: B users, N items, M distinct vectors, E width of a vector, k items that are wanted.
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
        items: float32 ``[N, E]``; held twice, with some 290 bytes an item for the graph.

    Raises:
        MissingDependencyError: without Faiss.
    """

    def __init__(self, items: Tensor) -> None:
        self._faiss = need_faiss()
        self._exact = ExactIndex(items)
        self._items = items
        distinct, groups, self._counts = items.unique(
            dim=0, return_inverse=True, return_counts=True
        )
        self._places = groups.argsort(stable=True)  # of items, by the vector that they have
        self._starts = self._counts.cumsum(0) - self._counts
        self._graph = self._faiss.IndexHNSWFlat(
            items.shape[1], NEIGHBOURS, self._faiss.METRIC_INNER_PRODUCT
        )
        self._graph.hnsw.efConstruction = BUILD_CANDIDATES
        self._faiss.omp_set_num_threads(torch.get_num_threads())
        self._graph.add((distinct - distinct.mean(0)).contiguous().numpy())

    def search(self, users: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See :class:`pibroch.serve.retrieval.ItemIndex`."""
        settings = self._faiss.SearchParametersHNSW(efSearch=max(SEARCH_CANDIDATES, 4 * k))
        self._faiss.omp_set_num_threads(torch.get_num_threads())
        num_vectors = min(k, len(self._counts))
        found = self._graph.search(users.contiguous().numpy(), num_vectors, params=settings)[1]
        groups = torch.from_numpy(found)
        if bool((groups < 0).any()):  # the graph led to fewer
            return self._exact.search(users, k)
        firsts = self._places[self._starts[groups]]
        products = torch.einsum("be,bke->bk", users, self._items[firsts])
        products, order = products.sort(1, descending=True)
        return self._with_all_items(products, groups.gather(1, order), k)

    def _with_all_items(self, products: Tensor, groups: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The first k items, those of a vector one behind the other.

        Args:
            products: ``[B, min(k, M)]``, falling.
            groups: of the vectors, likewise.
            k: at most N.
        """
        counts = self._counts[groups]
        ends = counts.cumsum(1)
        wanted = torch.arange(k).expand(len(groups), k).contiguous()
        vectors = torch.searchsorted(ends, wanted, right=True)
        behind = ends.gather(1, vectors) - wanted  # items of the vector from this one on
        of_vector = groups.gather(1, vectors)
        places = self._places[self._starts[of_vector] + self._counts[of_vector] - behind]
        return products.gather(1, vectors), places


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
