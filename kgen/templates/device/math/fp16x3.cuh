// fp16x3: v = high + low / 2048 in two fp16 parts of 11 bits each, three products, fp32 sums.
//
// low is scaled by 2^11 so that it is as large as high and keeps its bits where v is small: v is
// exact to 2^-22 of itself down to 2^-14 and to 2^-36 absolutely below that. The scale is undone in
// the weights, of which the third set is high / 2048. Weights are scaled by a power of two for each
// output channel, so that the largest lies in [2^14, 2^15): none is out of range, and none that
// matters is too small. |v| >= 65520 is out of range: high is inf, low is -inf, every sum that they
// enter is NaN, and so is the whole group after GroupNorm, never a wrong finite value.

struct Product {
  int set, part;  // of the weights and of x
};

constexpr int kParts = 2, kSets = 3, kProducts = 3;
constexpr bool kScaledWeights = true;
constexpr int kSliceChannels = 8;  // of one 16-byte slice

// Sets: 0 low, 1 high / 2048, 2 high. Smallest first, so that little is lost when they are added,
// and with the low part of x first of all, whose place is then soon free.
__device__ constexpr Product product(int i) {
  return i == 0 ? Product{1, 1} : i == 1 ? Product{0, 0} : Product{2, 0};
}

__device__ __forceinline__ unsigned half2_of(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ float2 floats_of(unsigned pair) {
  float2 v;
  asm("{\n  .reg .b16 low, high;\n  mov.b32 {low, high}, %2;\n  cvt.f32.f16 %0, low;\n"
      "  cvt.f32.f16 %1, high;\n}"
      : "=f"(v.x), "=f"(v.y)
      : "r"(pair));
  return v;
}

// The parts of 8 channels of one pixel.
__device__ __forceinline__ void split_channels(const float (&v)[8], uint4 (&high)[1],
                                               uint4 (&low)[1]) {
  unsigned h[4], l[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    h[i] = half2_of(v[2 * i], v[2 * i + 1]);
    const float2 rounded = floats_of(h[i]);
    l[i] = half2_of((v[2 * i] - rounded.x) * 2048.0f, (v[2 * i + 1] - rounded.y) * 2048.0f);
  }
  high[0] = make_uint4(h[0], h[1], h[2], h[3]);
  low[0] = make_uint4(l[0], l[1], l[2], l[3]);
}

// The sets of one slice of weights.
__device__ __forceinline__ void split_weights(const float (&w)[kSliceChannels],
                                              uint4 (&sets)[kSets]) {
  unsigned low[4], scaled[4], high[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    high[i] = half2_of(w[2 * i], w[2 * i + 1]);
    const float2 rounded = floats_of(high[i]);
    low[i] = half2_of(w[2 * i] - rounded.x, w[2 * i + 1] - rounded.y);
    scaled[i] = half2_of(rounded.x * (1.0f / 2048.0f), rounded.y * (1.0f / 2048.0f));
  }
  sets[0] = make_uint4(low[0], low[1], low[2], low[3]);
  sets[1] = make_uint4(scaled[0], scaled[1], scaled[2], scaled[3]);
  sets[2] = make_uint4(high[0], high[1], high[2], high[3]);
}

// d [16 x 8] += a [16 x 16] b [16 x 8], of a warp.
__device__ __forceinline__ void multiply(float* d, const unsigned (&a)[4], unsigned b0,
                                         unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, "
      "{ %8, %9}, { %0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
