// 1 / (1 + e^-v). e^-v overflows to inf for v below -88, which gives 0; NaN stays NaN.
__device__ __forceinline__ float op_sigmoid(float v) {
  return __fdividef(1.0f, 1.0f + __expf(-v));
}
