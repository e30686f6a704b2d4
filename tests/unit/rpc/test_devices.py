import pytest
import torch

from pibroch.errors import NotAllowedError, ProtocolError
from pibroch.rpc.values.devices import stage, unstage


def test_tensors_of_the_cpu_stay_what_they_are():
    tensors = [torch.ones(2), torch.zeros(0)]
    before = list(tensors)
    assert stage(tensors, {}, "peer") == []
    assert all(one is other for one, other in zip(tensors, before, strict=True))


def test_a_device_without_a_map_is_refused_with_advice():
    with pytest.raises(NotAllowedError, match=r"meta.*peer.*set_device_map"):
        stage([torch.ones(2), torch.ones(2, device="meta")], {}, "peer")


def test_a_device_that_is_not_there():
    with pytest.raises(ProtocolError, match="cuda:77"):
        unstage(torch.ones(2), 77)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_there_and_back_through_page_locked_memory():
    device = torch.device("cuda", 0)
    sent = torch.randn(1000, device=device)
    staged = [sent]
    assert stage(staged, {"peer": {device: device}}, "peer") == [0]
    assert staged[0].device.type == "cpu"
    assert torch.equal(unstage(staged[0], 0), sent)
