// Full-precision tanh; tanh.approx is off by 5e-4 and GroupNorm would magnify it.
__device__ __forceinline__ float op_tanh(float v) { return tanhf(v); }
