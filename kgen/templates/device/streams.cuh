// Loads and stores of data that streams by.

// A load that stays where it is written: the compiler may move an ordinary load of read-only memory
// behind the wait that it is meant to overlap with.
__device__ __forceinline__ float load_in_place(const float* address) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];"
               : "=f"(value)
               : "l"(__cvta_generic_to_global(address)));
  return value;
}

__device__ __forceinline__ float load_or_zero(const float* address, bool valid) {
  float value = 0.0f;
  asm volatile("{\n  .reg .pred p;\n  setp.ne.b32 p, %2, 0;\n  @p ld.global.nc.f32 %0, [%1];\n}"
               : "+f"(value)
               : "l"(__cvta_generic_to_global(address)), "r"(static_cast<int>(valid)));
  return value;
}

// What makes `words` happens before this point, not when they are used.
__device__ __forceinline__ void settle(uint4& words) {
  asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
}

// A number of which the compiler knows nothing, so that it keeps nothing that follows from it.
__device__ __forceinline__ void settle(int& number) { asm volatile("" : "+r"(number)); }

// A pointer from which the compiler reaches its neighbours by constants, instead of computing each.
__device__ __forceinline__ void settle(float*& pointer) { asm volatile("" : "+l"(pointer)); }

__device__ __forceinline__ void prefetch_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)));
}

// A store of 1, 2 or 4 floats of what will not be read again: it is the first to leave L2, so that
// the input stays.
template <int kVec>
__device__ __forceinline__ void store_vector_streaming(float* address, const float (&value)[kVec]) {
  const unsigned long long target = __cvta_generic_to_global(address);
  if constexpr (kVec == 4) {
    asm volatile("st.global.cs.v4.f32 [%0], { %1, %2, %3, %4};" ::"l"(target), "f"(value[0]),
                 "f"(value[1]), "f"(value[2]), "f"(value[3])
                 : "memory");
  } else if constexpr (kVec == 2) {
    asm volatile("st.global.cs.v2.f32 [%0], { %1, %2};" ::"l"(target), "f"(value[0]), "f"(value[1])
                 : "memory");
  } else {
    asm volatile("st.global.cs.f32 [%0], %1;" ::"l"(target), "f"(value[0]) : "memory");
  }
}
