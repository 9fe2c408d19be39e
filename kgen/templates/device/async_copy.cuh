// Asynchronous copies from global to shared memory (PTX ISA, cp.async; sm_80 and newer).

// Copies one float, or writes zero where `valid` is false; `source` is not read then.
__device__ __forceinline__ void copy_async_or_zero(float* smem_target, const float* source,
                                                   bool valid) {
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(smem_target));
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source),
               "r"(bytes)
               : "memory");
}

// Waits for this thread's copies; a barrier must follow before other threads read them.
__device__ __forceinline__ void wait_for_async_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
