import inspect
from datetime import timedelta

import pytest
import torch
from torch.distributed import rpc as torch_rpc

from pibroch.rpc.options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions

CUDA = [torch.device(f"cuda:{index}") for index in range(4)]


def test_torchs_fields_have_torchs_defaults():
    ours = RpcBackendOptions()
    theirs = torch_rpc.TensorPipeRpcBackendOptions()
    names = [
        name for name in inspect.signature(type(theirs)).parameters if not name.startswith("_")
    ]
    assert names == ["num_worker_threads", "rpc_timeout", "init_method", "device_maps", "devices"]
    assert {name: getattr(ours, name) for name in names} == {
        name: getattr(theirs, name) for name in names
    }


def test_torchs_name_and_torchs_backend_stand_for_ours():
    assert TensorPipeRpcBackendOptions is RpcBackendOptions
    assert BackendType.TENSORPIPE is BackendType.PIBROCH
    assert len(BackendType) == 1


def test_nothing_is_trusted_that_was_not_asked_for():
    options = RpcBackendOptions()
    assert options.allow_pickle is False
    assert tuple(options.allowed_modules) == ()
    assert options.bind is None and options.secret is None


def test_two_options_share_nothing():
    first = RpcBackendOptions()
    second = RpcBackendOptions()
    first.set_device_map("w", {"cuda:0": "cuda:1"})
    first.limits.waiting_strangers = 1
    assert second.device_maps == {}
    assert second.limits.waiting_strangers != 1


@pytest.mark.parametrize(
    "options_class", [RpcBackendOptions, torch_rpc.TensorPipeRpcBackendOptions]
)
class TestDeviceMaps:
    """What torch does, and we too."""

    def test_maps_grow_by_worker(self, options_class):
        options = options_class(device_maps={"a": {"cuda:0": "cuda:1"}})
        options.set_device_map("a", {"cuda:1": "cuda:0"})
        options.set_device_map("b", {"cuda:0": torch.device("cuda:0")})
        assert options.device_maps == {
            "a": {CUDA[0]: CUDA[1], CUDA[1]: CUDA[0]},
            "b": {CUDA[0]: CUDA[0]},
        }

    def test_the_same_again_is_no_conflict(self, options_class):
        options = options_class()
        options.set_device_map("a", {"cuda:0": "cuda:1"})
        options.set_device_map("a", {"cuda:0": "cuda:1"})
        assert options.device_maps == {"a": {CUDA[0]: CUDA[1]}}

    def test_a_device_with_two_targets_is_refused(self, options_class):
        options = options_class(device_maps={"a": {"cuda:0": "cuda:1"}})
        with pytest.raises(ValueError, match="1-to-1"):
            options.set_device_map("a", {"cuda:0": "cuda:2"})

    def test_two_devices_with_one_target_are_refused(self, options_class):
        with pytest.raises(ValueError, match="1-to-1"):
            options_class(device_maps={"a": {"cuda:0": "cuda:2", "cuda:1": "cuda:2"}})
        with pytest.raises(ValueError, match="1-to-1"):
            options_class().set_device_map("a", {"cuda:0": "cuda:2", "cuda:1": "cuda:2"})

    def test_devices_become_torchs_type(self, options_class):
        assert options_class(devices=["cuda:0", torch.device("cuda:3")]).devices == [
            CUDA[0],
            CUDA[3],
        ]
        options = options_class()
        options.set_devices(["cuda:1"])
        assert options.devices == [CUDA[1]]

    def test_a_device_that_is_none_is_refused(self, options_class):
        with pytest.raises(RuntimeError):
            options_class().set_device_map("a", {"no such device": "cuda:0"})

    def test_senseless_numbers_are_refused(self, options_class):
        with pytest.raises(RuntimeError):
            options_class(rpc_timeout=-1)
        with pytest.raises(RuntimeError):
            options_class(num_worker_threads=0)


def test_no_maps_and_no_devices_may_be_said_as_none():
    options = RpcBackendOptions(device_maps=None, devices=None)
    assert options.device_maps == {} and options.devices == []
    options.set_device_map("ben", {"cuda:0": "cuda:1"})
    assert list(options.device_maps) == ["ben"]


@pytest.mark.parametrize("name", ["rpc_timeout", "num_worker_threads", "lost_after_s"])
def test_an_option_of_a_wrong_type_is_a_type_error(name):
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        RpcBackendOptions(**{name: timedelta(seconds=1)})
