#!/bin/sh
# Make the environment of the peers: TorchRec and FBGEMM on CPU, versions that work together.
# Usage: benchmarks/peers/install.sh [FOLDER]     (default: benchmarks/peers/.venv; PYTHON picks the interpreter)
# pip complains at the end that torchrec wants fbgemm-gpu and an old torchmetrics. Both are harmless: its CPU build provides the
# first under another name, and nothing measured here uses the second.
set -eu
folder=${1:-$(dirname "$0")/.venv}
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "install.sh: got $("$python" --version); need Python 3.11 or later; do: set PYTHON to such an interpreter" >&2
    exit 2
}
"$python" -m venv "$folder"
pip="$folder/bin/python -m pip --disable-pip-version-check --quiet"
# The CPU build where its index can be reached; elsewhere whatever the machine's own index offers.
$pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu --retries 0 --timeout 10 2>/dev/null ||
    $pip install torch==2.13.0
$pip install numpy pandas psutil tqdm tensordict torchmetrics pyre-extensions iopath fbgemm-gpu-cpu==1.8.0
$pip install --no-deps torchrec==1.8.0
"$folder/bin/python" -W ignore - <<'CHECK'
import fbgemm_gpu, torch, torchrec
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from importlib.metadata import version
print("peers ready: torch", torch.__version__, "torchrec", version("torchrec"), "fbgemm_gpu-cpu", version("fbgemm_gpu-cpu"))
CHECK
