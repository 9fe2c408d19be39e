// tf32: operands of 11 bits, one product, fp32 sums. An error of 4e-3 after GroupNorm is usual: kgen's
// tolerance is not met. This is what PyTorch calls allow_tf32.

struct Product {
  int set, part;  // of the weights and of x
};

constexpr int kParts = 1, kSets = 1, kProducts = 1;
constexpr bool kScaledWeights = false;
constexpr int kSliceChannels = 4;  // of one 16-byte slice

__device__ constexpr Product product(int) { return {0, 0}; }

// Rounded to tf32, the low 13 bits zero.
__device__ __forceinline__ unsigned tf32_of(float v) {
  unsigned rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(v));
  return rounded;
}

// 8 channels of one pixel, 4 in a slice; there is no low part.
__device__ __forceinline__ void split_channels(const float (&v)[8], uint4 (&high)[2], uint4 (&)[2]) {
  high[0] = make_uint4(tf32_of(v[0]), tf32_of(v[1]), tf32_of(v[2]), tf32_of(v[3]));
  high[1] = make_uint4(tf32_of(v[4]), tf32_of(v[5]), tf32_of(v[6]), tf32_of(v[7]));
}

// One slice of weights.
__device__ __forceinline__ void split_weights(const float (&w)[kSliceChannels],
                                              uint4 (&sets)[kSets]) {
  sets[0] = make_uint4(tf32_of(w[0]), tf32_of(w[1]), tf32_of(w[2]), tf32_of(w[3]));
}

// d [16 x 8] += a [16 x 8] b [8 x 8], of a warp.
__device__ __forceinline__ void multiply(float* d, const unsigned (&a)[4], unsigned b0,
                                         unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, "
      "{ %8, %9}, { %0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
