#!/bin/sh
# Make an environment of the peers on CPU, of versions that work together: TorchRec and FBGEMM, FuxiCTR, or RecBole.
# Usage: benchmarks/peers/install.sh [FOLDER]                (default: benchmarks/peers/.venv)
#        benchmarks/peers/install.sh --fuxictr [FOLDER]      (default: benchmarks/peers/fuxictr/.venv)
#        benchmarks/peers/install.sh --recbole [FOLDER]      (default: benchmarks/peers/recbole/.venv)
# PYTHON picks the interpreter.
# With TorchRec pip complains at the end that it wants fbgemm-gpu and an old torchmetrics. Both are harmless: its CPU build provides
# the first under another name, and nothing measured here uses the second.
set -eu
peer=torchrec
folder=$(dirname "$0")/.venv
case "${1:-}" in
--fuxictr | --recbole)
    peer=${1#--}
    folder=$(dirname "$0")/$peer/.venv
    shift
    ;;
esac
folder=${1:-$folder}
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
if [ $peer = fuxictr ]; then
    # Later releases of polars and pandas lack what it calls.
    $pip install fuxictr==2.3.10 polars==1.36.1 'pandas<3' torch==2.13.0
    "$folder/bin/python" -W ignore - <<'CHECK'
import fuxictr.pytorch.dataloaders, fuxictr.pytorch.models, torch
from importlib.metadata import version
print("peer ready: torch", torch.__version__, "fuxictr", version("fuxictr"))
CHECK
    exit
fi
if [ $peer = recbole ]; then
    # Later releases lack what it calls.
    $pip install recbole==1.2.1 'numpy<2' 'pandas<2.3' 'scipy<1.14' 'setuptools<81' torch==2.13.0
    "$folder/bin/python" -W ignore - <<'CHECK'
import recbole.quick_start, torch
from importlib.metadata import version
print("peer ready: torch", torch.__version__, "recbole", version("recbole"))
CHECK
    exit
fi
$pip install numpy pandas psutil tqdm tensordict torchmetrics pyre-extensions iopath fbgemm-gpu-cpu==1.8.0
$pip install --no-deps torchrec==1.8.0
"$folder/bin/python" -W ignore - <<'CHECK'
import fbgemm_gpu, torch, torchrec
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from importlib.metadata import version
print("peers ready: torch", torch.__version__, "torchrec", version("torchrec"), "fbgemm_gpu-cpu", version("fbgemm_gpu-cpu"))
CHECK
