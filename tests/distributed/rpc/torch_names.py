"""``pibroch.rpc`` under the names that torch's own RPC suites use.

These are the names of ``torch.distributed.rpc`` and its neighbours.

The suites (``torch.testing._internal.distributed``) are in every torch wheel. They are executed
from there as they are, as modules of a package ``wheel`` of their own: they stand for a user's
program, and of torch's modules peers may name little. Private helpers of
``torch.distributed.rpc.api`` that the suites call (``_all_gather``, ``_barrier``, ``_wait_all``,
...) stay torch's, on top of our calls; for private names that lead into torch's C++ there are views
of what we have.
"""

import gc
import importlib.util
import sys
import threading
import time
import types
import unittest
from pathlib import Path

WHEEL = "wheel"
FILES = (
    "dist_utils",
    "distributed.nn.api.remote_module_test",
    "distributed.rpc.rpc_agent_test_fixture",
    "distributed.rpc.dist_autograd_test",
    "distributed.rpc.dist_optimizer_test",
    "distributed.rpc.examples.parameter_server_test",
    "distributed.rpc.examples.reinforcement_learning_rpc_test",
    "distributed.rpc.faulty_agent_rpc_test",
    "distributed.rpc.rpc_test",
)
RPC_NAMES = (
    *("RRef", "WorkerInfo", "get_rpc_timeout", "get_worker_info"),
    *("is_available", "remote", "rpc_async", "rpc_sync", "shutdown"),
)
# other workers run them
REMOTE_HELPERS = (
    "_gather_to_leader",
    "_broadcast_to_followers",
    "_rref_typeof_on_owner",
)
AUTOGRAD_NAMES = ("backward", "context", "get_gradients")


def install():
    """Put our names into torch's modules; once in a process, before anything of theirs runs."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        # a base class, nothing else
        sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)
    import torch.distributed.autograd as torch_autograd
    import torch.distributed.nn
    import torch.distributed.nn.api.remote_module as torch_remote_module
    import torch.distributed.optim
    import torch.distributed.rpc as torch_rpc
    from torch.distributed.rpc import api, backend_registry

    from pibroch import rpc
    from pibroch.rpc import autograd
    from pibroch.rpc.calls.agent import is_initialized
    from pibroch.rpc.optim import DistributedOptimizer

    for name in RPC_NAMES:
        for module in (torch_rpc, api) if hasattr(rpc, name) else ():
            setattr(module, name, getattr(rpc, name))
    Options = make_options()
    torch_rpc.init_rpc = joining(api, Options)
    for module in (torch_rpc, api):
        module.PyRRef = rpc.RRef
        module._get_current_rpc_agent = agent
        module._is_current_rpc_agent_set = is_initialized
    torch_rpc._set_rpc_timeout = set_rpc_timeout
    torch_rpc._rref_context_get_debug_info = reference_counts
    torch_rpc._get_debug_info = lambda: (
        reference_counts() | agent().get_debug_info() | autograd_counts()
    )
    torch_rpc.functions.async_execution = rpc.functions.async_execution
    torch_rpc.RpcBackendOptions = rpc.RpcBackendOptions
    torch_rpc.TensorPipeRpcBackendOptions = Options
    torch_rpc.BackendType = backend_registry.BackendType = rpc.BackendType
    backend_registry.construct_rpc_backend_options = lambda backend, **options: Options(**options)
    torch_rpc.TensorPipeAgent = AgentView
    api.rpc_async = collecting(api)
    torch_rpc.rpc_async = api.rpc_async
    for name in AUTOGRAD_NAMES:
        setattr(torch_autograd, name, getattr(autograd, name))
    torch_autograd._get_debug_info = autograd_counts
    torch_autograd._retrieve_context = retrieve_context
    torch_autograd._current_context = current_context
    torch_autograd._new_context = new_context
    torch_autograd._release_context = lambda context_id: agent()._agent.packer.recorder.release(
        context_id
    )
    rpc.RRef._get_type = type_of(api)
    rpc.RRef._get_future = rpc.RRef._get_profiling_future = creation_of
    for module in (torch_rpc, api):
        module._delete_all_user_and_unforked_owner_rrefs = gc.collect
    torch.distributed.optim.DistributedOptimizer = DistributedOptimizer
    torch.distributed.nn.RemoteModule = torch_remote_module.RemoteModule = rpc.RemoteModule
    for name in (
        "_gather_to_leader",
        "_broadcast_to_followers",
        "_rref_typeof_on_owner",
    ):
        # run on other workers: under a name of ours
        helper = getattr(api, name)
        helper.__module__ = __name__
        globals()[name] = helper


def load():
    """The suites' modules, by the last part of their names."""
    import torch

    package = types.ModuleType(WHEEL)
    package.__path__ = []
    sys.modules[WHEEL] = package
    root = Path(torch.__path__[0]) / "testing/_internal"
    loaded = {}
    for file in FILES:
        name = file.rpartition(".")[2]
        path = root / f"{file.replace('.', '/')}.py"
        spec = importlib.util.spec_from_file_location(f"{WHEEL}.{name}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = sys.modules[f"torch.testing._internal.{file}"] = module
        parent, _, last = f"torch.testing._internal.{file}".rpartition(".")
        spec.loader.exec_module(module)
        setattr(importlib.import_module(parent), last, module)
        loaded[name] = module
    return loaded


def make_options():
    """A subclass of our options that drops what names a transport of torch's."""
    from pibroch import rpc

    class Options(rpc.RpcBackendOptions):
        def __init__(self, *, _transports=None, _channels=None, **options):
            super().__init__(**({"allow_pickle": True, "allowed_modules": ALLOWED} | options))

    return Options


# what the suites name of torch beyond the few functions that anybody may
FUNCTIONS = (
    *("torch:Tensor", "torch:bmm", "torch:matmul", "torch:nonzero", "torch:ones", "torch:rand"),
    *("torch:split", "torch:stack", "torch:tensor", "torch:zeros", "torch:Tensor.view"),
    *("torch.linalg:multi_dot", "builtins:min"),
)
ALLOWED = (WHEEL, __name__, "torch.nn", *FUNCTIONS)


def joining(api, options_class):
    """``init_rpc``, after which ``_all_gather`` knows all workers."""
    from pibroch import rpc

    def init_rpc(name, backend=None, rank=-1, world_size=None, rpc_backend_options=None):
        options = options_class() if rpc_backend_options is None else rpc_backend_options
        rpc.init_rpc(name, backend, rank, world_size, options)
        api._ALL_WORKER_NAMES = {info.name for info in agent().get_worker_infos()}

    return init_rpc


def agent():
    """Torch's view of our agent; raises when there is none."""
    from pibroch.rpc.calls.agent import current_agent

    return AgentView(current_agent())


class AgentView:
    def __init__(self, agent):
        self._agent = agent

    def get_worker_info(self, to=None):
        return self._agent.info if to is None else self._agent.find(to)

    def get_worker_infos(self):
        return self._agent.workers()

    def get_debug_info(self):
        options = self._agent.options
        requests = self._agent._requests
        return {
            "agent.num_pending_requests": str(requests.num_pending),
            "agent.thread_pool_size": str(options.num_worker_threads),
        }

    def _get_device_map(self, worker):
        return self._agent.options.device_maps.get(worker.name, {})


class ContextView:
    """What torch's object of an autograd context shows."""

    def __init__(self, context):
        self._context = context

    def _context_id(self):
        return self._context.id

    def _known_worker_ids(self):
        return {worker.id for worker in self._context.reached} - {agent()._agent.info.id}

    def _send_functions(self):
        from pibroch.rpc.autograd.send_receive import behind

        def view(sent):
            tensors = [behind(output)[-1] for output in sent.outputs.values()]
            return types.SimpleNamespace(next_functions=tuple(tensors))

        return {message: view(sent) for message, sent in self._context.sent.items()}


def retrieve_context(context_id):
    return ContextView(agent()._agent.packer.recorder.contexts.get(context_id))


def current_context():
    return retrieve_context(agent()._agent.packer.recorder.current_context() or -1)


def new_context():
    autograd = agent()._agent.packer.recorder
    context_id = autograd.contexts._of_thread.context = autograd.open()
    return retrieve_context(context_id)


def set_rpc_timeout(timeout_s):
    agent()._agent.options.rpc_timeout = timeout_s


def reference_counts():
    references = agent()._agent.packer.references
    counts = references.live_counts()
    shared = [entry for entry in references._table.owners.entries.values() if entry.forks]
    return {
        "num_owner_rrefs": str(len(shared)),
        "num_forks": str(counts["forks_of_others"]),
        "num_pending_futures": str(counts["pending"]),
        "num_pending_users": str(counts["pending"]),
    }


def autograd_counts():
    counts = agent()._agent.packer.recorder.live_counts()
    return {
        "num_autograd_contexts": str(counts["contexts"]),
        "num_current_backward_passes": str(counts["passes"]),
    }


def type_of(api):
    """``RRef._get_type``: by torch's own helpers, over our calls."""

    def get_type(rref, timeout=api.UNSET_RPC_TIMEOUT, blocking=True):
        if rref.is_owner():
            return api._rref_typeof_on_owner(rref, blocking)
        return api._rref_typeof_on_user(rref, timeout, blocking)

    return get_type


def creation_of(rref):
    """``RRef._get_future``: done when the owner answers or ``remote`` times out."""
    import torch

    future = torch.futures.Future()

    def watch():
        while not rref.confirmed_by_owner():
            try:
                rref.check_usable()
            except Exception as error:
                future.set_exception(error)
                return
            time.sleep(0.005)
        future.set_result(None)

    threading.Thread(target=watch, daemon=True).start()
    return future


def collecting(api):
    """``rpc_async``, whose futures ``_wait_all`` collects."""
    from pibroch import rpc

    def rpc_async(*args, **kwargs):
        future = rpc.rpc_async(*args, **kwargs)
        if hasattr(api._thread_local_var, "future_list"):
            api._thread_local_var.future_list.append(future)
        return future

    return rpc_async
