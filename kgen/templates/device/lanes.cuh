// What the lanes of a warp do together.

// Sum over kLanes neighbouring lanes; every one of them gets the same bits.
template <int kLanes>
__device__ __forceinline__ float lanes_sum(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}
