#!/usr/bin/env bash
# The chunk kernel on the host, without a GPU: fibers for threads, wgmma, cp.async, mbarriers and clusters emulated, each
# asynchronous step both at once and as late as its wait allows. workshop/emulate.sh [longest T, default 260].
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$here/../.build/workshop-emulator
rm -rf "$out"
mkdir -p "$out/emu_tree"
cp -r "$here/../csrc" "$out/emu_tree/"
cp -r "$here/csrc" "$out/emu_tree/"
cp "$here"/emulator/emu_ptx/*.cuh "$out/emu_tree/csrc/cuda/ptx/"
cp "$here"/emulator/*.h "$here"/emulator/*.cpp "$here"/harness/*.h "$out/"
cd "$out"
sed -i 's/extern __shared__ __align__(1024) char smem_bytes\[\];/char* const smem_bytes = emu::smem_of[emu::cur->rank];/' \
  emu_tree/csrc/cuda/chunk_sm90/kernel.cuh
g++ -std=c++17 -O1 -g -fno-strict-aliasing -w -I. -include emu.h emu_main.cpp emu.cpp -o emu_run -Wno-attributes
./emu_run "${1:-260}"
