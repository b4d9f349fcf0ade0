#!/usr/bin/env bash
# The harness's cases on the host, without a GPU: tools/chunk_harness/emulate.sh [debug | bits | substring [longest T [tokens of a segment]]].
# Fibers for threads, wgmma, mma, bulk copies and mbarriers as in tests/emulator, asynchronous steps early and late.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
folder=$(cd "$root" && "${PYTHON:-python3}" -m tools.emulate --sources)
g++ -std=c++17 -O2 -fno-strict-aliasing -ffp-contract=off -w -I"$folder/csrc" -I"$here" \
  -o "$folder/chunk_harness" "$here/emulated.cpp"
"$folder/chunk_harness" "$@"
