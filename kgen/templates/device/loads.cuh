// A load that stays where it is written: the compiler may move an ordinary load of read-only memory
// behind the wait that it is meant to overlap with.
__device__ __forceinline__ float load_or_zero(const float* address, bool valid) {
  float value = 0.0f;
  asm volatile("{\n  .reg .pred p;\n  setp.ne.b32 p, %2, 0;\n  @p ld.global.nc.f32 %0, [%1];\n}"
               : "+f"(value)
               : "l"(__cvta_generic_to_global(address)), "r"(static_cast<int>(valid)));
  return value;
}

__device__ __forceinline__ void prefetch_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)));
}
