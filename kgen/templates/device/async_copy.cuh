// Asynchronous copies from global to shared memory (PTX ISA, cp.async; sm_80 and newer).

// Copies 1, 2 or 4 floats, or writes zeros where `valid` is false; `source` is not read then.
// Both addresses must be aligned to the size of the copy.
template <int kFloats>
__device__ __forceinline__ void copy_async_or_zero(float* smem_target, const float* source,
                                                   bool valid) {
  static_assert(kFloats == 1 || kFloats == 2 || kFloats == 4, "a copy moves 4, 8 or 16 bytes");
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(smem_target));
  const int bytes = valid ? 4 * kFloats : 0;
  if constexpr (kFloats == 4) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                 "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source),
                 "n"(4 * kFloats), "r"(bytes)
                 : "memory");
  }
}

// Waits for this thread's copies; a barrier must follow before other threads read them.
__device__ __forceinline__ void wait_for_async_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
