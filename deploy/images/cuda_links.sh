#!/usr/bin/env bash
# cuda_links.sh FOLDER: create the libraries that linking needs and CUDA's runtime packages lack, for LIBRARY_PATH.
#
# FlashInfer links the code that it compiles with -lcudart and -lcuda. NVIDIA's wheels contain libcudart without the name
# that a linker searches. libcuda belongs to the driver; if the driver has no such name, a stub is linked instead, and
# programs load the driver's libcuda.so.1 at run time. Needs CUDA_HOME and a C compiler.
set -euo pipefail
folder=$1
mkdir -p "$folder"
runtime=$(find -L "$CUDA_HOME" -name 'libcudart.so*' | sort | head -n 1)
[[ -n $runtime ]] || { echo "$0: no libcudart.so under CUDA_HOME, $CUDA_HOME" >&2; exit 1; }
ln -sfn "$runtime" "$folder/libcudart.so"
echo | cc -shared -x c - -o "$folder/libcuda.so" -Wl,-soname,libcuda.so.1
