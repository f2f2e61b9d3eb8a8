#!/usr/bin/env bash
# Everything there is to check and time on a GPU machine, within ten minutes: bench/gpu_all.sh [OUTPUT-FOLDER]
# Needs the extra `gpu` (FlashInfer) and a CUDA toolkit for its just-in-time kernels; no network.
set -euo pipefail
cd "$(dirname "$0")/.."
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
timeout 300 "$python" -m pytest tests/gpu -q -rs -p no:cacheprovider 2>&1 | tee "$out/tests.txt" || status=$?
timeout 240 "$python" -m bench.gpu --json | tee "$out/bench.json" || status=$?
exit "$status"
