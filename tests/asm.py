"""Small CUDA kernels with inline PTX, run in the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np

from kgen.compiler import compile_source
from kgen.simulator.device import Device, Options

# Wrappers of the PTX under test, each of one instruction (or of one and its loop).
PRELUDE = r"""
typedef unsigned int u32;
typedef unsigned long long u64;
__device__ __forceinline__ u32 at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void init(u64* bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at(bar)), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(u64* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at(bar)) : "memory");
}
__device__ __forceinline__ u64 arrive_token(u64* bar) {
  u64 token;
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];"
               : "=l"(token) : "r"(at(bar)) : "memory");
  return token;
}
__device__ __forceinline__ void arrive_expect(u64* bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(at(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void expect(u64* bar, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
               ::"r"(at(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ u32 test(u64* bar, u32 parity) {
  u32 done;
  asm volatile("{\n .reg .pred p;\n"
               " mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
               " selp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(at(bar)), "r"(parity) : "memory");
  return done;
}
__device__ __forceinline__ void wait(u64* bar, u32 parity) {
  asm volatile("{\n .reg .pred p;\n WAIT:\n"
               " mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
               " @p bra DONE;\n bra WAIT;\n DONE:\n}"
               ::"r"(at(bar)), "r"(parity) : "memory");
}
__device__ __forceinline__ void load(void* to, const void* from, u32 bytes, u64* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1], %2, [%3];"
               ::"r"(at(to)), "l"(from), "r"(bytes), "r"(at(bar)) : "memory");
}
__device__ __forceinline__ void store(void* to, const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               ::"l"(to), "r"(at(from)), "r"(bytes) : "memory");
}
#define COMMIT asm volatile("cp.async.bulk.commit_group;" ::: "memory")
#define WAIT_READ(n) asm volatile("cp.async.bulk.wait_group.read " #n ";" ::: "memory")
#define WAIT_ALL(n) asm volatile("cp.async.bulk.wait_group " #n ";" ::: "memory")
#define PROXY_FENCE asm volatile("fence.proxy.async.shared::cta;" ::: "memory")
#define BARRIER(id, n) asm volatile("bar.sync " #id ", " #n ";" ::: "memory")
#define ARRIVE(id, n) asm volatile("bar.arrive " #id ", " #n ";" ::: "memory")
__device__ __forceinline__ u32 ld_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u32 ld_relaxed(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void st_release(u32* p, u32 v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void st_relaxed(u32* p, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void red_release(u32* p, u32 v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
#define TID threadIdx.x
#define BLOCK blockIdx.x
"""


class Ran:
    """A finished launch: `out` as words, what was found, and the device."""

    def __init__(self, device: Device, out: Any) -> None:
        self.device, self.out = device, out

    @property
    def kinds(self) -> set[str]:
        """The kinds of findings."""
        return {one.kind for one in self.device.findings.all()}

    @property
    def text(self) -> str:
        """All findings in words."""
        return "\n".join(str(one) for one in self.device.findings.all())


def run(body: str, *, threads: int = 64, blocks: int = 1, words: int = 256, arch: str = "sm_90a",
        resident: int = 8192, cooperative: bool = False, checks: bool = True) -> Ran:  # fmt: skip
    """Run `body` with `in` (0, 1, 2, ...), `out` (zeros) and `work` (zeros) of `words` words."""
    source = PRELUDE + (
        'extern "C" __global__ void k(const u32* __restrict__ in, u32* out, u32* work) {'
        f"{body}}}\n"
    )
    device = Device(
        compile_source(source, arch).ptx, Options(checks=checks, resident_threads=resident)
    )
    numbers, zeros = np.arange(words, dtype=np.uint32), np.zeros(words, dtype=np.uint32)
    memory = device.memory
    given = [
        memory.allocate("in", 4 * words, "input", numbers),
        memory.allocate("out", 4 * words, "workspace", zeros),
        memory.allocate("work", 4 * words, "workspace", zeros),
    ]
    device.launch("k", blocks, threads, 0, [one.base for one in given], cooperative=cooperative)
    return Ran(device, given[1].view(np.uint32).copy())
