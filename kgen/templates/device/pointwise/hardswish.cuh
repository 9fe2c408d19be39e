// v * clamp(v + 3, 0, 6) / 6; NaN stays NaN because it fails both comparisons.
__device__ __forceinline__ float op_hardswish(float v) {
  float gate = v + 3.0f;
  gate = gate < 0.0f ? 0.0f : gate;
  gate = gate > 6.0f ? 6.0f : gate;
  return v * gate * (1.0f / 6.0f);
}
