"""One connection's shared memory, when the connection goes while others use it."""

import threading
import time

import pytest
import torch

from pibroch.rpc.transport.sharing import Sharing
from pibroch.rpc.values.tensors import describe


class NoTimers:
    """A loop that does nothing later."""

    def call_soon(self, function):
        pass

    def call_at(self, when, function):
        pass


@pytest.mark.parametrize("_", range(20))
def test_a_tensor_is_not_put_into_memory_that_is_gone(_):
    sent = []
    dropped = []
    failures = []
    sharing = Sharing(
        NoTimers(), lambda buffers, segments: sent.append(segments), dropped.append, 1 << 30
    )
    tensor = torch.arange(50_000.0)
    results = []

    def put():
        try:
            while (place := sharing.put(tensor, describe(tensor), tensor.nbytes)) is not None:
                results.append(place)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=put) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.01)
    sharing.close()
    for thread in threads:
        thread.join(30)
    assert not failures and results and all(place.segment for place in results)
    assert sharing.put(tensor, describe(tensor), tensor.nbytes) is None
    made = [segment for segments in sent for segment in segments]
    assert len(dropped) == 1 and len(dropped[0]) == len(made), "all that were made are let go"
    for segment in made:
        segment.close_fd()
