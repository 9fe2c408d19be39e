// bf16x3: v = high + low in two bf16 parts of 8 bits each, three products, fp32 sums. bf16 has the
// range of fp32: nothing is scaled and no finite value is out of range; inf gives NaN. About 16
// bits of v are kept.

struct Product {
  int set, part;  // of the weights and of x
};

constexpr int kParts = 2, kSets = 2, kProducts = 3;
constexpr bool kScaledWeights = false;
constexpr int kSliceChannels = 8;  // of one 16-byte slice

// Sets: 0 low, 1 high. Smallest first, so that little is lost when they are added,
// and with the low part of x first of all, whose place is then soon free.
__device__ constexpr Product product(int i) {
  return i == 0 ? Product{1, 1} : i == 1 ? Product{0, 0} : Product{1, 0};
}

__device__ __forceinline__ unsigned bf16x2_of(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ float2 floats_of(unsigned pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// The parts of 8 channels of one pixel.
__device__ __forceinline__ void split_channels(const float (&v)[8], uint4 (&high)[1],
                                               uint4 (&low)[1]) {
  unsigned h[4], l[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    h[i] = bf16x2_of(v[2 * i], v[2 * i + 1]);
    const float2 rounded = floats_of(h[i]);
    l[i] = bf16x2_of(v[2 * i] - rounded.x, v[2 * i + 1] - rounded.y);
  }
  high[0] = make_uint4(h[0], h[1], h[2], h[3]);
  low[0] = make_uint4(l[0], l[1], l[2], l[3]);
}

// The sets of one slice of weights.
__device__ __forceinline__ void split_weights(const float (&w)[kSliceChannels],
                                              uint4 (&sets)[kSets]) {
  uint4 high[1], low[1];
  split_channels(w, high, low);
  sets[0] = low[0], sets[1] = high[0];
}

// d [16 x 8] += a [16 x 16] b [16 x 8], of a warp.
__device__ __forceinline__ void multiply(float* d, const unsigned (&a)[4], unsigned b0,
                                         unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, "
      "{ %8, %9}, { %0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
