// v * sigmoid(v); -inf gives NaN (-inf * 0), as torch.nn.functional.silu does.
__device__ __forceinline__ float op_silu(float v) { return v / (1.0f + expf(-v)); }
