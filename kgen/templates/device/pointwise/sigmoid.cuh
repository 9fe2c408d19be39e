// 1 / (1 + 2^(-v log2 e)) with the hardware's exponential and reciprocal, each within 2 ulp.
// 2^big is inf and gives 0, 2^-big is 0 and gives 1; NaN stays NaN. Results below 2^-126 become 0.
__device__ __forceinline__ float op_sigmoid(float v) {
  float power, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v * -1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
  return result;
}
