// v * Phi(v) with the exact error function, torch's default (approximate="none").
__device__ __forceinline__ float op_gelu(float v) {
  return 0.5f * v * (1.0f + erff(v * 0.70710678118654752f));
}
