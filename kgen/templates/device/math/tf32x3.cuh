// tf32x3: v = high + low in two tf32 parts of 11 bits each, three products, fp32 sums. tf32 has the
// range of fp32: nothing is scaled and no finite value is out of range; inf gives NaN. About 22
// bits of v are kept.

struct Product {
  int set, part;  // of the weights and of x
};

constexpr int kParts = 2, kSets = 2, kProducts = 3;
constexpr bool kScaledWeights = false;
constexpr int kSliceChannels = 4;  // of one 16-byte slice

// Sets: 0 low, 1 high. Smallest first, so that little is lost when they are added,
// and with the low part of x first of all, whose place is then soon free.
__device__ constexpr Product product(int i) {
  return i == 0 ? Product{1, 1} : i == 1 ? Product{0, 0} : Product{1, 0};
}

// Rounded to tf32, the low 13 bits zero.
__device__ __forceinline__ unsigned tf32_of(float v) {
  unsigned rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(v));
  return rounded;
}

// The parts of 8 channels of one pixel, 4 in a slice.
__device__ __forceinline__ void split_channels(const float (&v)[8], uint4 (&high)[2],
                                               uint4 (&low)[2]) {
  unsigned h[8], l[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    h[i] = tf32_of(v[i]);
    l[i] = tf32_of(v[i] - __uint_as_float(h[i]));
  }
  high[0] = make_uint4(h[0], h[1], h[2], h[3]), high[1] = make_uint4(h[4], h[5], h[6], h[7]);
  low[0] = make_uint4(l[0], l[1], l[2], l[3]), low[1] = make_uint4(l[4], l[5], l[6], l[7]);
}

// The sets of one slice of weights.
__device__ __forceinline__ void split_weights(const float (&w)[kSliceChannels],
                                              uint4 (&sets)[kSets]) {
  unsigned h[4], l[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    h[i] = tf32_of(w[i]);
    l[i] = tf32_of(w[i] - __uint_as_float(h[i]));
  }
  sets[0] = make_uint4(l[0], l[1], l[2], l[3]), sets[1] = make_uint4(h[0], h[1], h[2], h[3]);
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
