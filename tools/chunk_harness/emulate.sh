#!/usr/bin/env bash
# The harness's cases on the host, without a GPU: tools/chunk_harness/emulate.sh [debug | bits | steps |
# pairs [substring [longest T]] | substring [longest T [tokens of a segment; -1: beside the preparation]]].
# PRECISION=0 or 1: the mma.sync kernel at normal or high precision instead of Hopper's.
# Fibers for threads, wgmma, mma, bulk copies and mbarriers as in tests/emulator, asynchronous steps early and late.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
PRECISION=${PRECISION-}
folder=$(cd "$root" && "${PYTHON:-python3}" -m tools.emulate --sources)
g++ -std=c++17 -O2 -fno-strict-aliasing -ffp-contract=off -w -I"$folder/csrc" -I"$here" \
  ${PRECISION:+-DPRECISION=$PRECISION} -o "$folder/chunk_harness$PRECISION" "$here/emulated.cpp"
"$folder/chunk_harness$PRECISION" "$@"
