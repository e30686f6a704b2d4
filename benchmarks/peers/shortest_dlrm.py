"""The same as examples/distributed_dlrm.py, as short as we could write it with TorchRec.

Run: benchmarks/peers/.venv/bin/torchrun --nproc-per-node 2 benchmarks/peers/shortest_dlrm.py
"""

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

dist.init_process_group("gloo")
drawn = torch.randint(1000, (20, 26, 256), generator=torch.Generator().manual_seed(dist.get_rank()))
names = [f"C{i}" for i in range(26)]
configs = [
    EmbeddingBagConfig(name=name, embedding_dim=16, num_embeddings=1000, feature_names=[name])
    for name in names
]
tables = EmbeddingBagCollection(configs, device=torch.device("meta"))
dlrm = DLRM(tables, 13, [512, 256, 16], [512, 256, 1], dense_device=torch.device("cpu"))
apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.02})
model = DistributedModelParallel(DLRMTrain(dlrm), device=torch.device("cpu"))
dense = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adam(parameters, lr=1e-3))
lengths = torch.ones(26 * 256, dtype=torch.int32)
batches = (
    Batch(i[:13].T / 1e3, KeyedJaggedTensor(names, i.reshape(-1), lengths=lengths), i[0] % 2.0)
    for i in drawn
)
pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
for _ in drawn:
    loss, *_ = pipeline.progress(batches)
print(f"rank {dist.get_rank()}: log loss {loss.item():.4f} in the last step; guessing gives 0.6931")
