"""What a host that holds a part of the rows answers to those that score, and to those that want scores of it."""

from __future__ import annotations

import asyncio

from pibroch.errors import DataError
from pibroch.kernels.arrays import Ints
from pibroch.serve.direct import Asked, Reply
from pibroch.serve.parts import Part, ids_of_bytes
from pibroch.serve.row_files import MappedRows
from pibroch.serve.settings import Refusal
from pibroch.serve.store import ModelStore

IDS_AT_ONCE = 4096
"""Ids whose rows the event loop copies itself."""
_HEADERS = ((b"content-type", b"application/octet-stream"),)


class RowService:
    """Rows of one part.

    Args:
        store: the model.
        part: which.
    """

    def __init__(self, store: ModelStore, part: Part) -> None:
        self._store, self._part = store, part

    async def rows(self, asked: Asked) -> Reply:
        """Answer a request of :mod:`pibroch.serve.parts`; ``version`` is the export's checksum, ``model`` the part."""
        if asked.model != self._part.in_paths:
            got = f"got a request for part {str(asked.model)[:40]} of the rows"
            raise Refusal(409, f"{got}; need {self._part.in_paths}, which is here: --rows-at names hosts in this order")
        sha256 = asked.version or ""
        found = self._store.rows_of(sha256)
        if found is None:
            here = f"need one that is here, such as that of version {self._store.current.version}"
            raise Refusal(409, f"got a request for rows of export {sha256[:12]}; {here}")
        try:
            row_ids = ids_of_bytes(asked.body, self._part.of(found.num_rows), found.row_bytes)
        except DataError as error:
            raise Refusal(400, str(error)) from error
        if len(row_ids) <= IDS_AT_ONCE:
            return _copied(found, row_ids)
        return await asyncio.to_thread(_copied, found, row_ids)

    async def refuse(self, _: Asked) -> Reply:
        """For what only a host that can have all rows answers."""
        part = f"{self._part.number}/{self._part.count}"
        raise Refusal(404, f"got a request for scores at a host of part {part} alone; need one with --rows-at")


def _copied(rows: MappedRows, row_ids: Ints) -> Reply:
    return Reply(rows.exported(row_ids).tobytes(), _HEADERS)
