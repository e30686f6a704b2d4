"""The shortest DLRM over ranks.

Tables lie row by row on all of them, and dense layers are one model.

Run: torchrun --nproc-per-node 2 examples/distributed_dlrm.py
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits

from pibroch import Embeddings, JaggedBatch, RowWiseAdagrad, Table, data_parallel
from pibroch.models import build_model

dist.init_process_group("gloo")
drawn = torch.randint(1000, (20, 26, 256), generator=torch.manual_seed(dist.get_rank()))
embeddings = Embeddings(
    [Table(f"C{i}", 1000, 16) for i in range(26)], RowWiseAdagrad(lr=0.02), exchange="alltoall"
)
model = data_parallel(build_model("dlrm", num_dense=13, num_features=26, dim=16))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
batches = (
    JaggedBatch.from_one_hot(i[:13].T / 1e3, embeddings.row_space.features, i, i[0] % 2.0)
    for i in drawn
)
for batch in embeddings.feed(batches):
    loss = binary_cross_entropy_with_logits(
        model(batch.dense, partial(embeddings, batch)), batch.labels
    )
    optimizer.zero_grad()
    loss.backward()  # rows are updated in here, by the gradients of all ranks
    optimizer.step()
print(f"rank {dist.get_rank()}: log loss {loss.item():.4f} in the last step; guessing gives 0.6931")
