__device__ __forceinline__ float op_add(float v, float shift) { return v + shift; }
