// The same products by warps (PTX ISA, "mma.sync", "ldmatrix"; sm_80 and newer): a warp computes
// the 16 rows that are its own in a warpgroup's product, into the same registers.

__device__ __forceinline__ void load_matrices(unsigned address, unsigned (&matrices)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(address)
               : "memory");
}

// d += A B over one step of K, two slices of 16 bytes. a: address of A's first slice, [2][64 rows]
// of 16 bytes. b: address of B's first slice, one 16-byte row a column; `along_k` bytes to the
// second. An 8 x 8 matrix of 16-bit elements, one row from each of 8 lanes, is half of the fragment
// of A for 16 rows and of B for 8 columns, in 16-bit elements and in 32-bit ones alike.
template <int kRegisters>
__device__ __forceinline__ void warp_product(float (&d)[kRegisters], unsigned a, unsigned b,
                                             int along_k) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  unsigned rows[4];
  load_matrices(a + (lane / 16 * 64 + 16 * warp + lane % 16) * 16, rows);
  b += (lane / 16 * 8 + lane % 8) * 16 + lane / 8 % 2 * along_k;
#pragma unroll
  for (int i = 0; i < kRegisters; i += 8) {
    unsigned columns[4];
    load_matrices(b + i * 2 * 16, columns);
    multiply(&d[i], rows, columns[0], columns[1]);
    multiply(&d[i + 4], rows, columns[2], columns[3]);
  }
}
