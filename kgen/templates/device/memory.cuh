// Vector loads and stores of 1, 2 or 4 floats; the address must be aligned to the vector.

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
    *reinterpret_cast<float4*>(address) = make_float4(value[0], value[1], value[2], value[3]);
  } else if constexpr (kVec == 2) {
    *reinterpret_cast<float2*>(address) = make_float2(value[0], value[1]);
  } else {
    *address = value[0];
  }
}
