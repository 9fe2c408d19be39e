// Sigmoids of two values at the price of one reciprocal: 1 / a = b / (a b). Exponents end at 2^63,
// so that the product is finite; a sigmoid below 2^-63 becomes 2^-63. NaN in one gives NaN in both.
__device__ __forceinline__ void op_sigmoid_pair(float& v, float& w) {
  float a, b, reciprocal, low = v * -1.44269504f, high = w * -1.44269504f;
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(low) : "f"(63.0f));
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(high) : "f"(63.0f));
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(a) : "f"(low));
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(b) : "f"(high));
  a += 1.0f, b += 1.0f;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(a * b));
  v = reciprocal * b, w = reciprocal * a;
}
