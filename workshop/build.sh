#!/usr/bin/env bash
# Lays workshop/csrc over a copy of csrc/ and builds the harness there: workshop/build.sh [FOLDER, default .build/workshop].
# The harness then needs a Hopper GPU and nothing else: FOLDER/chunk_harness [debug] [check [substring]] [bits] [time] [phases].
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/../.build/workshop}
rm -rf "$out/csrc"
mkdir -p "$out"
cp -r "$here/../csrc" "$out/"
cp -r "$here/csrc" "$out/"
cp "$here"/harness/* "$out/"
cd "$out"
nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -Xptxas -v -cudart static -DTREE=csrc -o chunk_harness chunk_harness.cu 2>&1 |
  grep -E "error|warning|C75|spill|registers" | cut -c1-160
