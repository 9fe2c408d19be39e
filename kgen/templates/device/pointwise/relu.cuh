// max(v, 0) that lets NaN through, as torch.relu does; fmaxf would return 0 for it.
__device__ __forceinline__ float op_relu(float v) { return v < 0.0f ? 0.0f : v; }
