// Mean and centred sum of squares of a set of values, merged without cancellation.
//
// Two sets combine by Chan, Golub and LeVeque (1983), "Algorithms for Computing the Sample
// Variance", eq. 2.1. Every merge below happens in a fixed order, so equal inputs give equal bits.

struct Moments {
  float count;  // number of values
  float mean;
  float m2;  // sum of (value - mean)^2
};

__device__ __forceinline__ Moments merge(const Moments& a, const Moments& b) {
  const float count = a.count + b.count;
  const float share_b = count > 0.0f ? b.count / count : 0.0f;
  const float delta = b.mean - a.mean;
  return {count, a.mean + delta * share_b, a.m2 + b.m2 + delta * delta * (a.count * share_b)};
}

// Sum over a warp; every lane gets the same bits.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

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

// 1 / sqrt(biased variance + eps), as torch.nn.GroupNorm defines it.
__device__ __forceinline__ float reciprocal_deviation(const Moments& moments, float eps) {
  return 1.0f / sqrtf(moments.m2 / moments.count + eps);
}
