"""What rank 0 keeps beside rows.

As bytes and back, in two places of which the older one is written to.
"""

import numpy as np
import pytest
import torch

from pibroch.state.kept_rows import steps_in
from pibroch.state.manifest import Progress
from pibroch.state.monitor import Monitor
from pibroch.train.memory_cuts import CutState, _StateMemory


def test_a_state_comes_back_with_its_tensors_in_order_and_files_without_any():
    progress = Progress(step=7, loader={"epoch": 1}, monitor=Monitor(best_step=3, best_value=0.1))
    dense = {
        "weights": {"b": torch.arange(3.0), "a": torch.tensor([[1, 2]], dtype=torch.int64)},
        "optimizer": {},
        "average": {"x:y": torch.tensor(2.5, dtype=torch.bfloat16)},
    }
    again = CutState.decode(CutState(progress, 5, dense).encode())
    assert (again.progress, again.base_step) == (progress, 5)
    assert [(file, list(tensors)) for file, tensors in again.dense.items()] == [
        ("weights", ["b", "a"]),
        ("optimizer", []),
        ("average", ["x:y"]),
    ]
    for file, tensors in dense.items():
        assert all(torch.equal(again.dense[file][name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("last", [b"ccc", b"a longer one"])
def test_the_older_place_is_written_to(last):
    memory = np.zeros(_StateMemory.num_bytes(100), np.uint8)
    state = _StateMemory(memory)
    for step, content in enumerate([b"a", b"bb", last]):
        assert state.fits(content)
        state.write(step, content)
    assert steps_in(memory) == state.steps() == {1, 2}
    assert (_StateMemory(memory).read(1), _StateMemory(memory).read(2)) == (b"bb", last)
    assert not state.fits(bytes(len(memory)))
    state.forget()
    assert not state.steps()


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {}),
        (torch.optim.Adam, {"amsgrad": True}),
    ],
)
def test_there_is_room_for_what_the_optimizer_has_after_its_first_step(make, options):
    layer = torch.nn.Linear(1000, 1000)
    optimizer = make(layer.parameters(), lr=0.1, **options)

    def content():
        named = {
            f"{at}.{name}": each
            for at, state in optimizer.state.items()
            for name, each in state.items()
        }
        named = {
            str(number): tensor
            for number, tensor in enumerate(named.values())
            if tensor is not None
        }
        return CutState(
            Progress(step=0, loader={}), None, {"weights": layer.state_dict(), "optimizer": named}
        ).encode()

    memory = _StateMemory(np.zeros(_StateMemory.num_bytes(len(content())), np.uint8))
    layer(torch.ones(1000)).sum().backward()
    optimizer.step()
    assert memory.fits(content())
