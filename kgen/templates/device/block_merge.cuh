// Merges the moments of a block's threads; every thread gets the result.
//
// Lanes merge downwards within their warp, then every thread merges the warps in order.
// smem_moments: one entry a warp. The barrier makes the entries visible; the caller must not
// write them again without another.
template <int kBlockThreads>
__device__ __forceinline__ Moments block_merge(Moments moments, Moments* smem_moments) {
  static_assert(kBlockThreads % 32 == 0, "a block consists of whole warps");
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const Moments other = {__shfl_down_sync(0xffffffffu, moments.count, offset),
                           __shfl_down_sync(0xffffffffu, moments.mean, offset),
                           __shfl_down_sync(0xffffffffu, moments.m2, offset)};
    moments = merge(moments, other);
  }
  if (threadIdx.x % 32 == 0) {
    smem_moments[threadIdx.x / 32] = moments;
  }
  __syncthreads();
  moments = smem_moments[0];
  for (int warp = 1; warp < kBlockThreads / 32; ++warp) {
    moments = merge(moments, smem_moments[warp]);
  }
  return moments;
}
