"""A host's part of the rows, given to the hosts that score.

See :mod:`pibroch.serve.parts`.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

from numpy.typing import NDArray

from pibroch.errors import CheckpointError, PibrochError
from pibroch.kernels.arrays import Ints
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.rows import RowWorker
from pibroch.serve.parts import Part, by_ids, check_ids
from pibroch.serve.prometheus import ServerMetrics
from pibroch.serve.row_hosts import RowAccess
from pibroch.serve.store import ModelStore

logger = logging.getLogger(__name__)


def listen(
    store: ModelStore, part: Part, metrics: ServerMetrics, host: str, access: RowAccess
) -> RowWorker:
    """Give rows of a part, which is here, at an address from now on.

    Raises:
        ConfigError: when it cannot be had.
    """
    me = WorkerInfo(part.worker, part.number)
    give = by_ids(partial(rows_of, store, part, metrics))
    worker = RowWorker(me, access.secret, {}, give, (host, access.port), access.tls)
    logger.info("rows of part %s at %s:%d", part, host, worker.port)
    return worker


def rows_of(
    store: ModelStore, part: Part, metrics: ServerMetrics, sha256: str, row_ids: Ints
) -> NDArray[Any]:
    """Rows of an export, by ids among those of all tables; counted among the answers.

    Raises:
        CheckpointError: for an export that is not here.
        DataError: for ids that are too many, or of another part.
    """
    started = time.monotonic()
    status = 500
    try:
        export = store.rows_of(sha256)
        if export is None:
            status = 409
            raise CheckpointError(
                f"a request for rows of export {sha256[:12]}",
                f"one that is here, such as that of version {store.current.version}",
            )
        status = 400
        check_ids(row_ids, part.of(export.num_rows), export.row_bytes)
        status = 500
        rows = export.exported(row_ids)
        status = 200
        return rows
    except PibrochError:
        raise
    except Exception:
        logger.exception("a request for rows failed")
        raise
    finally:
        metrics.request("rows", status, time.monotonic() - started)
