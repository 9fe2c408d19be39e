__device__ __forceinline__ float op_mul(float v, float factor) { return v * factor; }
