"""Where a step of TorchRec's training pipeline spends its time.

Its own code does not say, so its pieces are wrapped.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchrec.distributed import TrainPipelineSparseDist, comm_ops
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from benchmarks.workers.parts import Parts


def record_parts(pipeline: TrainPipelineSparseDist, model: nn.Module, parts: Parts) -> None:
    """Have ``parts`` record a pipeline's steps; this process must train nothing else."""
    if not parts.is_on:
        return
    for method in ("_wait_for_batch", "start_sparse_data_dist", "wait_sparse_data_dist"):
        setattr(pipeline, method, parts.timed("ids", getattr(pipeline, method)))
    pipeline._model_fwd = parts.timed("forward", pipeline._model_fwd)
    pipeline._optimizer_step = parts.timed("dense optimizer", pipeline._optimizer_step)
    backward = pipeline._backward

    def reporting_backward(losses: Tensor) -> None:
        parts.after_backward(
            "wait", losses
        )  # DistributedDataParallel waits for its sums where the graph ends
        with parts.part("backward"):
            backward(losses)

    pipeline._backward = reporting_backward
    for module in model.modules():
        if isinstance(module, ShardedEmbeddingBagCollection):
            for lookup in module._lookups:
                lookup.forward = parts.timed("lookup", _tell_update(lookup.forward, parts))
    send = comm_ops.All2All_Pooled_Req
    wait = comm_ops.All2All_Pooled_Wait
    send.forward = staticmethod(parts.timed("lookup", send.forward))
    wait.forward = staticmethod(parts.timed("wait", wait.forward))
    wait.backward = staticmethod(parts.timed("update", wait.backward))
    send.backward = staticmethod(parts.timed("wait gradients", send.backward))


def _tell_update(look_up: Any, parts: Parts) -> Any:
    """FBGEMM's lookup, whose backward updates the rows."""

    def reporting(*args: Any, **kwargs: Any) -> Tensor:
        pooled: Tensor = look_up(*args, **kwargs)
        parts.in_backward("update", pooled)
        return pooled

    return reporting
