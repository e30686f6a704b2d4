"""Run with the peers' Python: the logits of TorchRec's own DLRM for an exported state_dict.

torchrec_forward.py STATE BATCH OUT; BATCH holds dense, ids [B, F], names and rows of the tables,
widths of the layers.
"""

import sys

import numpy as np
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

state_path, batch_path, out_path = sys.argv[1:]
batch = np.load(batch_path)
dense = torch.from_numpy(batch["dense"])
ids = torch.from_numpy(batch["ids"])
names, rows, bottom, top = (batch[key].tolist() for key in ("names", "rows", "bottom", "top"))
tables = [
    EmbeddingBagConfig(
        name=f"t_{name}", embedding_dim=bottom[-1], num_embeddings=count, feature_names=[name]
    )
    for name, count in zip(names, rows, strict=True)
]
model = DLRM(EmbeddingBagCollection(tables=tables), dense.shape[1], bottom, top)
model.load_state_dict(torch.load(state_path, weights_only=True))
lengths = torch.ones(ids.numel(), dtype=torch.int64)
features = KeyedJaggedTensor(keys=names, values=ids.T.reshape(-1), lengths=lengths)
with torch.no_grad():
    np.save(out_path, model(dense, features).squeeze(1).numpy())
