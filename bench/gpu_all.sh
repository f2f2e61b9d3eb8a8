#!/usr/bin/env bash
# Everything there is to check and time on a GPU machine: bench/gpu_all.sh [OUTPUT-FOLDER [PART...]]
#
# Ends within GPU_ALL_SECONDS (default 570), the most valuable parts first. A part that fails, or has no more time, leaves
# the others running, and what it had reported until then is in the output folder: PART.txt, and PART.err for what it wrote
# besides; summary.txt has a line for each. Needs the extra `gpu` (FlashInfer) and a CUDA toolkit for its just-in-time
# kernels (CUDA_HOME, /usr/local/cuda or the wheels that the extra brings) and a C++ compiler; no network.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
command -v nvidia-smi >/dev/null || { echo "$0 needs a machine with an NVIDIA GPU" >&2; exit 2; }
out=${1:-build/gpu}
shift || true
chosen=" $* "
deadline=${GPU_ALL_SECONDS:-570}
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
mkdir -p "$out"
: >"$out/summary.txt"
status=0

part() { # NAME SECONDS COMMAND...: run it for at most so long
    local name=$1 limit=$2 began=$SECONDS rc=0
    shift 2
    [[ $chosen == "  " || $chosen == *" $name "* ]] || return 0
    ((deadline - SECONDS < limit)) && limit=$((deadline - SECONDS))
    if ((limit < 5)); then
        status=1
        echo "$name: not run, no time is left" | tee -a "$out/summary.txt"
        return 0
    fi
    echo "== $name"
    # The interrupt lets pytest report what it has.
    timeout --signal=INT --kill-after=5 "$limit" "$@" 2>"$out/$name.err" | tee "$out/$name.txt" || rc=$?
    if ((rc)); then
        status=1
        tail -n 25 "$out/$name.err"
    fi
    case $rc in
    0) echo "$name: ok, $((SECONDS - began)) s" ;;
    124 | 137) echo "$name: ended after $limit s, what it reported until then is kept" ;;
    *) echo "$name: failed (status $rc), $((SECONDS - began)) s" ;;
    esac | tee -a "$out/summary.txt"
}

versions() {
    date -u +%Y-%m-%d
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    nvcc --version | tail -n 2
    "$python" - <<'PYTHON'
import platform
from importlib.metadata import PackageNotFoundError, version

print("python", platform.python_version())
for name in ("torch", "triton", "flashinfer-python", "apache-tvm-ffi", "ninja", "ucxx-cu13", "libucx-cu13", "grpcio",
             "protobuf", "pydantic", "llguidance", "numba", "xxhash", "transformers", "pytest", "pytest-asyncio",
             "pytest-timeout", "pytest-xdist"):
    try:
        print(name, version(name))
    except PackageNotFoundError:
        print(name, "MISSING")
PYTHON
}

# Where nvcc is a script elsewhere, FlashInfer takes that place for the toolkit's.
wheels=$("$python" -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null)
for home in "${CUDA_HOME:-}" /usr/local/cuda "${wheels:+$wheels/cu13}"; do
    [[ -n $home && -x $home/bin/nvcc ]] || continue
    export CUDA_HOME=$home
    deploy/images/cuda_links.sh "$out/links" && export LIBRARY_PATH=$(realpath "$out/links")${LIBRARY_PATH:+:$LIBRARY_PATH}
    break
done

roomy=${TMPDIR:-/tmp} # for a checkpoint of 16 GB: memory, where there is enough
(($(df --output=avail -k /dev/shm 2>/dev/null | tail -n 1) > 32 << 20)) 2>/dev/null && roomy=/dev/shm

versions 2>&1 | tee "$out/versions.txt"
part warm 240 "$python" -m bench.gpu_warm --limit 230
# Warnings are errors in the suite; of other people's libraries on a new machine they are none.
part tests 210 "$python" -m pytest tests/gpu -v -rs -W default --durations=10 -p no:cacheprovider
part model 170 "$python" -m bench.gpu_model --json
part cluster 130 env TMPDIR="$roomy" "$python" -m bench.gpu_cluster --json
part layers 60 "$python" -m bench.gpu --json
part handoff 40 "$python" -m bench.handoff --device cuda --transport shm --rounds 3 --json
part stages_ucx 40 "$python" -m bench.stages --channel ucx --json
if "$python" -c 'import sys, torch; sys.exit(torch.cuda.device_count() < 2)'; then
    part stages_nccl 40 "$python" -m bench.stages --channel nccl --json
else
    echo "stages over NCCL: not timed, one device only" | tee -a "$out/summary.txt"
fi
echo "== summary"
cat "$out/summary.txt"
exit "$status"
