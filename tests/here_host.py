"""A host that has a part of an export's rows, without a process of its own."""

from concurrent.futures import Future

import numpy as np

from pibroch.serve.parts import check_ids
from pibroch.serve.predictor import Predictor
from pibroch.serve.split_rows import RowSplit


class HereHost:
    """A host of this very process: what travels, without a wire."""

    worker = None

    def __init__(self, folder, part):
        self.address = f"part {part.number}"
        self.part = part
        self.requests = []
        self.predictor = Predictor.open(folder, split=RowSplit(part))

    def give(self, sha256, ids):
        """The rows, as a host gives them."""
        rows = self.predictor.exported_rows(sha256)
        assert rows is not None
        check_ids(ids, self.part.of(rows.num_rows), rows.row_bytes)
        self.requests.append(len(ids))
        return rows.exported(ids)

    def read(self, sha256, ids):
        answer = Future()
        answer.set_result(self.give(sha256, ids).reshape(-1).view(np.uint8))
        return answer
