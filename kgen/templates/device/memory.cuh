// Vector loads and stores of 1, 2 or 4 floats; the address must be aligned to the vector.
// The stores are written in PTX: the compiler may split a float4 assignment into four stores, which
// leaves every sector to be merged in L2.

template <int kVec>
__device__ __forceinline__ void load_vector(const float* address, float (&value)[kVec]) {
  static_assert(kVec == 1 || kVec == 2 || kVec == 4, "a vector holds 1, 2 or 4 floats");
  if constexpr (kVec == 4) {
    const float4 vector = *reinterpret_cast<const float4*>(address);
    value[0] = vector.x, value[1] = vector.y, value[2] = vector.z, value[3] = vector.w;
  } else if constexpr (kVec == 2) {
    const float2 vector = *reinterpret_cast<const float2*>(address);
    value[0] = vector.x, value[1] = vector.y;
  } else {
    value[0] = *address;
  }
}

template <int kVec>
__device__ __forceinline__ void store_vector(float* address, const float (&value)[kVec]) {
  static_assert(kVec == 1 || kVec == 2 || kVec == 4, "a vector holds 1, 2 or 4 floats");
  if constexpr (kVec == 4) {
    asm volatile("st.global.v4.f32 [%0], { %1, %2, %3, %4 };" ::"l"(
                     __cvta_generic_to_global(address)),
                 "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3])
                 : "memory");
  } else if constexpr (kVec == 2) {
    asm volatile("st.global.v2.f32 [%0], { %1, %2 };" ::"l"(__cvta_generic_to_global(address)),
                 "f"(value[0]), "f"(value[1])
                 : "memory");
  } else {
    *address = value[0];
  }
}
