// SPDX-License-Identifier: Apache-2.0
// Tiles of 16-bit elements in shared memory as wgmma reads them: panels of 64 columns, a row of a panel is 128 bytes,
// 16-byte chunk c of row r lies at chunk c ^ (r % 8), so that 8 rows of one chunk column hit 8 different bank groups.
// A panel starts at a multiple of 1024 bytes. Or panels of 16 columns, of blocks of 16 rows: a row of a block is 32 bytes, its
// halves are swapped in rows 4..7 and 12..15, so that 8 rows of a half hit 8 different bank groups.
#pragma once

#include <cstdint>

namespace gdn::cuda {

constexpr int kPanelRowBytes = 128;

// Bytes from the start of a tile of kRows rows to chunk `chunk` (8 elements) of row `row`.
template <int kRows>
__host__ __device__ __forceinline__ uint32_t swizzled_offset(int row, int chunk) {
  return static_cast<uint32_t>((chunk / 8) * (kRows * kPanelRowBytes) + row * kPanelRowBytes + ((chunk % 8) ^ (row % 8)) * 16);
}

// The address that lane `lane` gives to an x4 ldmatrix or stmatrix of the 16 x 16 block (row_block, column_block) of a tile
// of one panel: matrices in the order upper left, lower left, upper right, lower right. Blocks of a row differ in two bits.
__device__ __forceinline__ uint32_t block_address(uint32_t tile, int row_block, int column_block, int lane) {
  const uint32_t first = tile + (lane % 16) * kPanelRowBytes + ((lane / 16) ^ (lane % 8)) * 16;
  return (first + row_block * (16 * kPanelRowBytes)) ^ (column_block * 32);
}

// The same for a transposed ldmatrix or stmatrix: upper left, upper right, lower left, lower right of the block as it lies in
// the tile, so that its transpose comes in the order of an operand.
__device__ __forceinline__ uint32_t transposed_block_address(uint32_t tile, int row_block, int column_block, int lane) {
  const uint32_t first = tile + (8 * (lane / 16) + lane % 8) * kPanelRowBytes + ((lane / 8 % 2) ^ (lane % 8)) * 16;
  return (first ^ (column_block * 32)) + row_block * (16 * kPanelRowBytes);   // the rows' blocks by immediate offsets
}

constexpr int kBlockBytes = 16 * 16 * 2;   // of 16 rows of a panel of 16 columns, which starts at a multiple of 256 bytes

// Bytes from the start of such a block to columns 8 half .. of row `row`.
__host__ __device__ __forceinline__ constexpr uint32_t small_tile_offset(int row, int half) {
  return static_cast<uint32_t>(32 * row + 16 * (half ^ (row / 4 % 2)));
}

}  // namespace gdn::cuda
