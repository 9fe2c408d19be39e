// Barriers in shared memory (PTX ISA, "mbarrier"): a phase ends when `count` arrivals have come;
// who waits names the phase's parity. An arrival releases what its thread did before, a wait
// acquires it.

__device__ __forceinline__ unsigned smem_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(unsigned long long* barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(count)
               : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(unsigned long long* barrier) {
  asm volatile("{\n  .reg .b64 state;\n  mbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(
                   smem_address(barrier))
               : "memory");
}

// One arrival for a warp, by its first lane; what the other lanes did must be ordered before. It
// spares a warp that multiplies a little, but compute-sanitizer's racecheck does not follow it.
__device__ __forceinline__ void mbarrier_arrive_lane(unsigned long long* barrier) {
  if (threadIdx.x % 32 == 0) {
    mbarrier_arrive(barrier);
  }
}

__device__ __forceinline__ bool mbarrier_passed(unsigned long long* barrier, unsigned parity) {
  unsigned passed;
#if __CUDA_ARCH__ >= 900  // may sleep for a while
  asm volatile(
      "{\n  .reg .pred p;\n  mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
      "  selp.u32 %0, 1, 0, p;\n}"
      : "=r"(passed)
      : "r"(smem_address(barrier)), "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n  .reg .pred p;\n  mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
      "  selp.u32 %0, 1, 0, p;\n}"
      : "=r"(passed)
      : "r"(smem_address(barrier)), "r"(parity)
      : "memory");
#endif
  return passed != 0;
}

__device__ __forceinline__ void mbarrier_wait(unsigned long long* barrier, unsigned parity) {
  while (!mbarrier_passed(barrier, parity)) {
  }
}

// A barrier of the threads of one warpgroup; `id` 0 belongs to __syncthreads().
__device__ __forceinline__ void warpgroup_barrier(int id) {
  asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}
