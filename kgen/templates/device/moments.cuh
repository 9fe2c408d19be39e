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

// 1 / sqrt(biased variance + eps), as torch.nn.GroupNorm defines it.
__device__ __forceinline__ float reciprocal_deviation(const Moments& moments, float eps) {
  return 1.0f / sqrtf(moments.m2 / moments.count + eps);
}
