#!/usr/bin/env bash
# cuda_links.sh FOLDER: what a linker looks for and a machine that only runs CUDA lacks, for LIBRARY_PATH.
#
# FlashInfer links what it compiles with -lcudart and -lcuda. NVIDIA's wheels have the first without the name that a
# linker looks for; the second belongs to the driver, and where that brings no such name a stand-in answers in its place:
# a program takes the driver's, libcuda.so.1, when it runs. Needs CUDA_HOME and a C compiler.
set -euo pipefail
folder=$1
mkdir -p "$folder"
runtime=$(find -L "$CUDA_HOME" -name 'libcudart.so*' | sort | head -n 1)
[[ -n $runtime ]] || { echo "$0: no libcudart.so under CUDA_HOME, $CUDA_HOME" >&2; exit 1; }
ln -sfn "$runtime" "$folder/libcudart.so"
echo | cc -shared -x c - -o "$folder/libcuda.so" -Wl,-soname,libcuda.so.1
