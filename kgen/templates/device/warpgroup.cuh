// Products of a warpgroup (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"; sm_90a).

// Where something lies in shared memory, in slices of 16 bytes, as descriptors count.
__device__ __forceinline__ unsigned slices_at(unsigned address) { return (address & 0x3ffff) / 16; }

// Describes an operand in shared memory without swizzle, K fastest, which begins `offset` slices
// after `base`: core matrices of 8 rows of one slice, 128 bytes in one piece; `along_k` slices lie
// between two that are neighbours along K, 8 between neighbours along the rows. Rows of B are
// columns of the product. The first row only has to be 16-byte aligned, which is what lets a filter
// tap be a shift of the same pixels. One addition makes it: all else is constant.
__device__ __forceinline__ unsigned long long operand_descriptor(unsigned base, int offset,
                                                                 int along_k) {
  constexpr unsigned long long kAlongRows = 8;
  return base + (static_cast<unsigned>(along_k) << 16 | static_cast<unsigned>(offset)) |
         kAlongRows << 32;
}

// Makes what this thread stored in shared memory visible to the tensor cores' reads.
__device__ __forceinline__ void fence_before_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `left`, a constant once loops are unrolled, committed groups are unfinished.
__device__ __forceinline__ void products_wait(int left) {
  if (left == 0) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  } else if (left == 1) {
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
  } else if (left == 2) {
    asm volatile("wgmma.wait_group.sync.aligned 2;" ::: "memory");
  } else {
    asm volatile("wgmma.wait_group.sync.aligned 3;" ::: "memory");
  }
}

// The registers of a block are dealt out anew; every warpgroup calls one of the two. 0: it keeps
// what it has.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  if constexpr (kRegisters > 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  if constexpr (kRegisters > 0) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }
}
