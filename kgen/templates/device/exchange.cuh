// Pairs of floats that blocks hand to each other through global memory. The pair itself is the
// flag: its place holds kAbsent until it is written, 64 bits at once, so no fence is needed and a
// reader sees either nothing or the whole pair (PTX ISA, "Memory Consistency Model": relaxed
// operations of one size on one address are morally strong, single-copy atomic).

constexpr unsigned long long kAbsent = ~0ull;

// kAbsent is a pair of NaNs; a result that happens to have these bits is told as another NaN.
__device__ __forceinline__ void publish(unsigned long long* place, float2 pair) {
  unsigned long long bits =
      static_cast<unsigned long long>(__float_as_uint(pair.y)) << 32 | __float_as_uint(pair.x);
  bits = bits == kAbsent ? kAbsent >> 1 : bits;
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(place)),
               "l"(bits)
               : "memory");
}

__device__ __forceinline__ unsigned long long peek(const unsigned long long* place) {
  unsigned long long bits;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];"
               : "=l"(bits)
               : "l"(__cvta_generic_to_global(place))
               : "memory");
  return bits;
}

__device__ __forceinline__ float2 as_pair(unsigned long long bits) {
  return make_float2(__uint_as_float(static_cast<unsigned>(bits)),
                     __uint_as_float(static_cast<unsigned>(bits >> 32)));
}
