"""Answers of a host with a part of the rows, to hosts that score."""

from __future__ import annotations

from pibroch.errors import DataError
from pibroch.kernels.arrays import Ints
from pibroch.serve.direct import DirectRequest, Reply
from pibroch.serve.parts import Part, ids_of_bytes
from pibroch.serve.row_files import MappedRows
from pibroch.serve.settings import Refusal
from pibroch.serve.store import ModelStore


class RowService:
    """Rows of one part.

    Args:
        store: the model.
        part: which.
    """

    def __init__(self, store: ModelStore, part: Part) -> None:
        self._store = store
        self._part = part

    def check(self, path: str) -> None:
        """Raise Refusal for the path of another part."""
        if path != self._part.path:
            got = f"got a request for rows at {path[:80]}"
            raise Refusal(
                409,
                f"{got}; need {self._part.path}, which is here: --rows-at names hosts in this"
                " order",
            )

    def rows_and_ids(self, sha256: str, body: bytes) -> tuple[MappedRows, Ints]:
        """The rows of an export, and the ids among them that a request wants.

        See :mod:`pibroch.serve.parts`. Raises Refusal.
        """
        export = self._store.rows_of(sha256)
        if export is None:
            here = f"need one that is here, such as that of version {self._store.current.version}"
            raise Refusal(409, f"got a request for rows of export {sha256[:12]}; {here}")
        try:
            return export, ids_of_bytes(body, self._part.of(export.num_rows), export.row_bytes)
        except DataError as error:
            raise Refusal(400, str(error)) from error

    async def refuse(self, _: DirectRequest) -> Reply:
        """For what only a host that can have all rows answers."""
        part = f"{self._part.number}/{self._part.count}"
        raise Refusal(
            404, f"got a request for scores at a host of part {part} alone; need one with --rows-at"
        )
