#!/usr/bin/env bash
# Everything there is to check and time on a GPU machine, within ten minutes: bench/gpu_all.sh [OUTPUT-FOLDER]
# Needs the extra `gpu` (FlashInfer) and a CUDA toolkit for its just-in-time kernels; no network.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v nvidia-smi >/dev/null || { echo "$0 needs a machine with an NVIDIA GPU" >&2; exit 2; }
out=${1:-build/gpu}
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
unset TRITON_INTERPRET

{
    date -u +%Y-%m-%d
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    "$python" -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'
    "$python" -c 'import flashinfer; print("flashinfer", flashinfer.__version__)' || echo "flashinfer: not installed"
} | tee "$out/versions.txt"

status=0
timeout 180 "$python" -m pytest tests/gpu -q -rs -p no:cacheprovider 2>&1 | tee "$out/tests.txt" || status=$?
timeout 70 "$python" -m bench.gpu --json | tee "$out/bench.json" || status=$?
timeout 160 "$python" -m bench.gpu_model --json | tee "$out/model.json" || status=$?
timeout 20 "$python" -m bench.stages --channel ucx --json | tee "$out/stages_ucx.json" || status=$?
if "$python" -c 'import sys, torch; sys.exit(torch.cuda.device_count() < 2)'; then
    timeout 20 "$python" -m bench.stages --channel nccl --json | tee "$out/stages_nccl.json" || status=$?
else
    echo "stages over NCCL: not timed, one device only"
fi
timeout 40 "$python" -m bench.handoff --device cuda --transport shm --rounds 3 --json | tee "$out/handoff.json" || status=$?
timeout 110 "$python" -m bench.gpu_cluster --json | tee "$out/cluster.json" || status=$?
exit "$status"
