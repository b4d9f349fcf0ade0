#!/usr/bin/env bash
# Builds the harness from the working tree: tools/chunk_harness/build.sh [FOLDER, default .build/chunk_harness]. See README.md.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
out=${1:-$root/.build/chunk_harness}
mkdir -p "$out"
nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -Xptxas -v -cudart static -I"$root/csrc" \
  ${PRECISION:+-DPRECISION=$PRECISION --fmad=false} -o "$out/chunk_harness${PRECISION-}" "$here/chunk_harness.cu" 2>&1 |
  grep -E "error|warning|C75|spill|registers" | cut -c1-160
