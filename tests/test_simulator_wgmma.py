"""Hopper's wgmma in the PTX simulator: values against numpy, and each mistake beside its remedy."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from asm import PRELUDE, run

from kgen.compiler import compile_source
from kgen.simulator.device import Device, Options, SimulationError
from kgen.simulator.narrow import from_bf16, to_bf16, to_tf32
from kgen.simulator.ops import decode
from kgen.simulator.ptx import PtxError
from kgen.simulator.values import DTYPES

pytestmark = pytest.mark.nvrtc

KINDS = ("f16", "bf16", "tf32")
MACROS = r"""
#define OPEN asm volatile("wgmma.fence.sync.aligned;" ::: "memory")
#define CLOSE asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory")
#define AWAIT(n) asm volatile("wgmma.wait_group.sync.aligned " #n ";" ::: "memory")
#define WARP (TID % 128 / 32)
#define LANE (TID % 32)
// Element i of a thread's accumulators: row and column in the matrix.
#define ROW(i) (16 * WARP + LANE / 4 + 8 * (i / 2 % 2))
#define COLUMN(i) (i / 4 * 8 + 2 * (LANE % 4) + i % 2)
#define EACH(i, count) _Pragma("unroll") for (int i = 0; i < count; ++i)
__device__ __forceinline__ u64 desc(const void* p, u32 leading, u32 stride) {
  return (u64)(at(p) >> 4 & 0x3FFF) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32;
}
// Rows of 32 bytes, 8 words, go to core matrices.
__device__ __forceinline__ void fill(u32* to, const u32* from, int rows, u32 leading, u32 stride,
                                     int first, int threads) {
  for (int i = first; i < rows * 8; i += threads) {
    int r = i / 8, w = i % 8;
    to[w / 4 * (leading / 4) + r / 8 * (stride / 4) + r % 8 * 4 + w % 4] = from[i];
  }
}
"""


def mma(name: str, kind: str, n: int, *, registers: bool = False, scale: str = "1, 1",
        trans: str | None = None) -> str:  # fmt: skip
    """A device function name(x, a, db, keep) of one wgmma.mma_async."""
    count, k = n // 2, 8 if kind == "tf32" else 16
    last = count + (4 if registers else 1)
    results = ",".join(f"%{i}" for i in range(count))
    a = f"%{count}" if not registers else "{" + ",".join(f"%{count + i}" for i in range(4)) + "}"
    if trans is None:
        trans = "" if kind == "tf32" else ", 0" if registers else ", 0, 0"
    outputs = ", ".join(f'"+f"(x[{i}])' for i in range(count))
    inputs = '"l"(a)' if not registers else ", ".join(f'"r"(a[{i}])' for i in range(4))
    return (
        f"__device__ __forceinline__ void {name}(float (&x)[{count}], "
        f"{'const u32 (&a)[4]' if registers else 'u64 a'}, u64 db, u32 keep) {{\n"
        f'  asm volatile("{{\\n .reg .pred p;\\n setp.ne.b32 p, %{last + 1}, 0;\\n"\n'
        f'  " wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{kind} {{{results}}}, {a}, "\n'
        f'  "%{last}, p, {scale}{trans};\\n}}" : {outputs} : {inputs}, "l"(db), "r"(keep));\n}}\n'
    )


@lru_cache
def ptx(source: str, arch: str = "sm_90a") -> str:
    return compile_source(source, arch).ptx


class Ran:
    """A finished launch: `d`, and what was found."""

    def __init__(self, device: Device, d: Any) -> None:
        self.device, self.d = device, d

    @property
    def kinds(self) -> set[str]:
        return {one.kind for one in self.device.findings.all()}

    @property
    def text(self) -> str:
        return "\n".join(str(one) for one in self.device.findings.all())


def launch(body: str, functions: str, a: Any, b: Any, c: Any, *, threads: int = 128,
           blocks: int = 1, checks: bool = True, keep: int = 1, resident: int = 8192,
           edit: Any = None) -> Ran:  # fmt: skip
    """Run `body` with a and b as words and c and d as floats."""
    source = (
        PRELUDE + MACROS + functions + f'extern "C" __global__ void __launch_bounds__({threads}) '
        "k(const u32* __restrict__ a, const u32* __restrict__ b, const float* c, float* d, "
        f"u32 keep) {{\n{body}}}\n"
    )
    text = ptx(source)
    device = Device(edit(text) if edit else text, Options(checks=checks, resident_threads=resident))
    memory = device.memory
    given = [
        memory.allocate("a", a.nbytes, "input", a),
        memory.allocate("b", b.nbytes, "input", b),
        memory.allocate("c", c.nbytes, "input", c),
        memory.allocate("d", c.nbytes, "workspace", np.zeros_like(c)),
    ]
    device.launch("k", blocks, threads, 0, [one.base for one in given] + [keep])
    return Ran(device, given[3].view(np.float32).reshape(c.shape).copy())


def operand(rng: Any, kind: str, *rows: int) -> tuple[Any, Any]:
    """Random [rows, k] as stored and as fp64."""
    values = rng.standard_normal((*rows, 8 if kind == "tf32" else 16)).astype(np.float32)
    if kind == "f16":
        return values.astype(np.float16), values.astype(np.float16).astype(np.float64)
    if kind == "bf16":
        return to_bf16(values), from_bf16(to_bf16(values)).astype(np.float64)
    return values, to_tf32(values, "rz").view(np.float32).astype(np.float64)


def numbers(rng: Any, *shape: int) -> Any:
    return rng.standard_normal(shape).astype(np.float32)


# One product: each block and each of its warpgroups has an A of its own, B is the block's.
ONE = """
  const int group = TID / 128, groups = blockDim.x / 128, me = BLOCK * groups + group;
  __shared__ alignas(128) u32 sa[GROUPS * 64 * 8], sb[N * 8];
  fill(sa + group * 512, a + me * 512, 64, LEADING_A, STRIDE_A, TID % 128, 128);
  fill(sb, b + BLOCK * N * 8, N, LEADING_B, STRIDE_B, TID, blockDim.x);
  PROXY_FENCE; __syncthreads();
  float x[N / 2];
  c += me * 64 * N; d += me * 64 * N;
  EACH(i, N / 2) x[i] = c[ROW(i) * N + COLUMN(i)];
  OPEN;
  product(x, desc(sa + group * 512, LEADING_A, STRIDE_A), desc(sb, LEADING_B, STRIDE_B), keep);
  CLOSE; AWAIT(0);
  EACH(i, N / 2) d[ROW(i) * N + COLUMN(i)] = x[i];
"""
# (leading, stride) of A and of B: core matrices along k together, or those along the rows.
LAYOUTS = {"k first": ((128, 256), (128, 256)), "rows first": ((1024, 128), (None, 128))}


def one(n: int, groups: int, layout: str = "k first") -> str:
    (leading_a, stride_a), (leading_b, stride_b) = LAYOUTS[layout]
    names = {"GROUPS": groups, "LEADING_A": leading_a, "STRIDE_A": stride_a,
             "LEADING_B": leading_b or n * 16, "STRIDE_B": stride_b, "N": n}  # fmt: skip
    body = ONE
    for name, value in names.items():
        body = re.sub(rf"\b{name}\b", str(value), body)
    return body


# ---- Values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "layout"), [(8, "k first"), (24, "rows first"), (64, "k first"),
                                           (200, "rows first"), (256, "rows first")])  # fmt: skip
def test_a_product_is_right(kind, n, layout):
    rng = np.random.default_rng(n)
    (a, left), (b, right) = operand(rng, kind, 4, 64), operand(rng, kind, 2, n)
    c = numbers(rng, 4, 64, n)
    functions = mma("product", kind, n)
    expected = left @ right.repeat(2, axis=0).swapaxes(1, 2)
    for keep in (1, 0):
        ran = launch(one(n, 2, layout), functions, a, b, c, threads=256, blocks=2, keep=keep)
        assert not ran.kinds, ran.text
        exact = (expected + c if keep else expected).astype(np.float32)
        assert (ran.d == exact).mean() > 0.999  # the order of the sum may still show in fp64
        np.testing.assert_allclose(ran.d, exact, rtol=3e-7, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", ["-1, 1", "1, -1", "-1, -1"])
def test_operands_may_be_negated(kind, scale):
    rng = np.random.default_rng(1)
    (a, left), (b, right), c = operand(rng, kind, 64), operand(rng, kind, 16), numbers(rng, 64, 16)
    ran = launch(one(16, 1), mma("product", kind, 16, scale=scale), a, b, c)
    sign = 1 if scale == "-1, -1" else -1
    np.testing.assert_allclose(ran.d, c + sign * (left @ right.T), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_may_come_from_registers(kind):
    rng = np.random.default_rng(2)
    (a, left), (b, right), c = operand(rng, kind, 64), operand(rng, kind, 40), numbers(rng, 64, 40)
    # Register r: row lane / 4 + 8 (r % 2) of the warp's, word 4 (r / 2) + lane % 4 of the row.
    body = one(40, 1).replace("desc(sa + group * 512, 128, 256)", "ra")
    body = body.replace(
        "OPEN;",
        "u32 ra[4]; EACH(r, 4)"
        " ra[r] = a[(16 * WARP + LANE / 4 + 8 * (r % 2)) * 8 + LANE % 4 + r / 2 * 4]; OPEN;",
    )
    ran = launch(body, mma("product", kind, 40, registers=True), a, b, c)
    assert not ran.kinds, ran.text
    np.testing.assert_allclose(ran.d, c + left @ right.T, rtol=1e-6, atol=1e-6)


def test_tf32_ignores_the_low_bits():
    rng = np.random.default_rng(3)
    (a, _), (b, _), c = operand(rng, "tf32", 64), operand(rng, "tf32", 8), numbers(rng, 64, 8)
    short = [(one.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for one in (a, b)]
    functions = mma("product", "tf32", 8)
    same = [launch(one(8, 1), functions, *pair, c).d for pair in ((a, b), short)]
    assert (same[0] == same[1]).all()
    assert (a != short[0]).any()


SHIFTED = """
  __shared__ alignas(128) u32 sa[72 * 8], sb[3 * 32 * 8];
  fill(sa, a, 72, 72 * 16, 128, TID, 128);
  for (int s = 0; s < 3; ++s) fill(sb + s * 256, b + s * 256, 32, 128, 256, TID, 128);
  PROXY_FENCE; __syncthreads();
  float x[16];
  OPEN;
  EACH(s, 3) product(x, desc(sa + 4 * s, 72 * 16, 128), desc(sb + s * 256, 128, 256), s > 0);
  CLOSE; AWAIT(0);
  EACH(i, 16) d[ROW(i) * 32 + COLUMN(i)] = x[i];
"""


@pytest.mark.parametrize("kind", KINDS)
def test_windows_may_begin_at_any_row(kind):
    """A convolution along the rows: 3 windows of 64 rows that are shifted by one row each."""
    rng = np.random.default_rng(4)
    (a, left), (b, right) = operand(rng, kind, 72), operand(rng, kind, 3, 32)
    ran = launch(SHIFTED, mma("product", kind, 32), a, b, np.zeros((64, 32), np.float32))
    assert not ran.kinds, ran.text
    expected = sum(left[s : s + 64] @ right[s].T for s in range(3))
    np.testing.assert_allclose(ran.d, expected, rtol=1e-6, atol=2e-6)


def test_warpgroups_of_part_of_a_block():
    """192 threads: one warpgroup, and two warps that take no part."""
    rng = np.random.default_rng(5)
    (a, left), (b, right) = operand(rng, "f16", 2, 64), operand(rng, "f16", 2, 8)
    c = numbers(rng, 2, 64, 8)
    body = one(8, 1).replace("groups = blockDim.x / 128", "groups = 1")
    body = body.replace("fill(sa", "if (TID < 128) fill(sa").replace(
        "PROXY_FENCE; __syncthreads();",
        "PROXY_FENCE; __syncthreads(); if (TID >= 128) return;",
    )
    ran = launch(body, mma("product", "f16", 8), a, b, c, threads=192, blocks=2)
    assert not ran.kinds, ran.text
    np.testing.assert_allclose(ran.d, c + left @ right.swapaxes(1, 2), rtol=1e-5, atol=1e-5)


CHAIN = """
  __shared__ alignas(128) u32 sa[512], sb[256];
  fill(sa, a, 64, 128, 256, TID, 128);
  fill(sb, b, 32, 128, 256, TID, 128);
  PROXY_FENCE; __syncthreads();
  const u64 da = desc(sa, 128, 256), db = desc(sb, 128, 256);
  float x[16], y[16];
  EACH(i, 16) { x[i] = c[ROW(i) * 32 + COLUMN(i)]; y[i] = 0; }
  OPEN;
  product(x, da, db, 1); product(x, da, db, 1);
  CLOSE;
  product(y, da, db, 0);
  CLOSE;
  AWAIT(1);
  EACH(i, 16) d[ROW(i) * 32 + COLUMN(i)] = x[i];
  MIDDLE
  AWAIT(0);
  EACH(i, 16) d[ROW(i) * 32 + COLUMN(i)] += y[i];
  OPEN;
  for (u32 step = 0; step < keep; ++step) { product(y, da, db, 1); CLOSE; AWAIT(0); }
  EACH(i, 16) d[ROW(i) * 32 + COLUMN(i)] += y[i];
"""


def chain(middle: str = "", change: tuple[str, str] = ("", "")) -> Ran:
    rng = np.random.default_rng(6)
    (a, _), (b, _), c = operand(rng, "bf16", 64), operand(rng, "bf16", 32), numbers(rng, 64, 32)
    body = CHAIN.replace("MIDDLE", middle)
    assert change[0] in body
    return launch(body.replace(*change), mma("product", "bf16", 32), a, b, c, keep=3)


def test_groups_are_waited_for_in_order():
    rng = np.random.default_rng(6)
    (_, left), (_, right) = operand(rng, "bf16", 64), operand(rng, "bf16", 32)
    c = numbers(rng, 64, 32)
    ran = chain()
    assert not ran.kinds, ran.text
    np.testing.assert_allclose(ran.d, c + 7 * (left @ right.T), rtol=1e-5, atol=1e-5)


def test_blocks_may_use_each_others_results():
    rng = np.random.default_rng(15)
    (a, left), (b, right) = operand(rng, "f16", 2, 64), operand(rng, "f16", 2, 8)
    c = numbers(rng, 3, 64, 8)
    body = (
        one(8, 1)
        + """__syncthreads(); float* first = d - me * 512; u32* flag = (u32*)(first + 1024);
        if (BLOCK == 0 && TID == 0) st_release(flag, 1);
        if (BLOCK == 1) { WAITED EACH(i, 4) d[ROW(i) * 8 + COLUMN(i)] +=
            first[ROW(i) * 8 + COLUMN(i)]; }"""
    )
    ready = body.replace("WAITED", "while (ld_acquire(flag) == 0) ;")
    ran = launch(ready, mma("product", "f16", 8), a, b, c, blocks=2)
    assert not ran.kinds, ran.text
    both = (c[:2] + left @ right.swapaxes(1, 2)).sum(axis=0)
    np.testing.assert_allclose(ran.d[1], both, rtol=1e-5, atol=1e-5)
    ran = launch(body.replace("WAITED", ""), mma("product", "f16", 8), a, b, c, blocks=2)
    assert ran.kinds == {"race in global memory"}


OVERLAP = """
  __shared__ alignas(128) u32 sa[512], sb[256];
  fill(sa, a, 64, 128, 256, TID, 128); fill(sb, b, 32, 128, 256, TID, 128);
  PROXY_FENCE; __syncthreads();
  float x[16];
  EACH(i, 16) x[i] = c[ROW(i) * 32 + COLUMN(i)];
  OPEN;
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %18, 0;"
    " wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9,"
    " %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, 0, 0;"
    " wgmma.commit_group.sync.aligned; FIRST"
    " wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7},"
    " %16, %17, p, 1, 1, 0, 0; wgmma.commit_group.sync.aligned;"
    " wgmma.wait_group.sync.aligned 0; }"
    : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]),
      "+f"(x[7]), "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]),
      "+f"(x[14]), "+f"(x[15])
    : "l"(desc(sa, 128, 256)), "l"(desc(sb, 128, 256)), "r"(keep));
  EACH(i, 16) d[ROW(i) * 32 + COLUMN(i)] = x[i];
"""


def test_only_products_of_one_shape_may_follow_each_other_on_a_register():
    rng = np.random.default_rng(12)
    (a, left), (b, right) = operand(rng, "f16", 64), operand(rng, "f16", 32)
    c = numbers(rng, 64, 32)
    waiting = OVERLAP.replace("FIRST", "wgmma.wait_group.sync.aligned 0;")
    ran = launch(waiting, "", a, b, c)
    assert not ran.kinds, ran.text
    product = left @ right.T
    twice = np.concatenate([2 * product[:, :16], product[:, 16:]], axis=1)
    np.testing.assert_allclose(ran.d, c + twice, rtol=1e-5, atol=1e-5)
    assert launch(OVERLAP.replace("FIRST", ""), "", a, b, c).kinds == {"unfinished wgmma"}


# ---- Registers -----------------------------------------------------------------------------------

USE_Y = "EACH(i, 16) d[ROW(i) * 32 + COLUMN(i)] += y[i];"


def test_results_are_there_after_the_wait():
    ran = chain(USE_Y)
    assert ran.kinds == {"unfinished wgmma"}, ran.text
    assert "read before a wgmma.wait_group" in ran.text
    assert not chain("AWAIT(0);" + USE_Y).kinds


def test_changed_accumulators_need_a_fence():
    change = ("{ product(y", "{ EACH(i, 16) y[i] *= c[i]; MAYBE product(y")
    assert chain(change=(change[0], change[1].replace("MAYBE", ""))).kinds == {
        "missing wgmma fence"
    }
    assert not chain(change=(change[0], change[1].replace("MAYBE", "OPEN;"))).kinds


def test_the_first_product_needs_a_fence():
    rng = np.random.default_rng(7)
    (a, _), (b, _), c = operand(rng, "f16", 64), operand(rng, "f16", 8), numbers(rng, 64, 8)
    body = one(8, 1)
    ran = launch(body.replace("OPEN;\n  product", "product"), mma("product", "f16", 8), a, b, c)
    assert ran.kinds == {"missing wgmma fence"}
    assert "no wgmma.fence before the first" in ran.text


@pytest.mark.parametrize("which", [r"\{(%f\d+)[^;]*", r"\}, \{(%r\d+)[^;]*"])
def test_registers_must_not_be_written_before_the_wait(which):
    rng = np.random.default_rng(8)
    (a, _), (b, _), c = operand(rng, "f16", 64), operand(rng, "f16", 8), numbers(rng, 64, 8)
    body = one(8, 1).replace("desc(sa + group * 512, 128, 256)", "ra")
    body = body.replace("OPEN;", "u32 ra[4]; EACH(r, 4) ra[r] = a[TID + r]; OPEN;")
    functions = mma("product", "f16", 8, registers=True)

    def overwrite(text: str) -> str:  # the compiler would take another register
        found = re.search(r"wgmma\.mma_async[^;]*?" + which, text)
        assert found
        kind = "f32" if "f" in found[1] else "u32"
        change = f"add.{kind} {found[1]}, {found[1]}, {found[1]};\n"
        return text.replace("wgmma.commit_group", change + "wgmma.commit_group")

    assert not launch(body, functions, a, b, c).kinds
    ran = launch(body, functions, a, b, c, edit=overwrite)
    assert ran.kinds == {"unfinished wgmma"}, ran.text


def test_copies_between_registers_are_no_accesses():
    """Movs that the compiler may put anywhere: what they copy keeps its state."""
    rng = np.random.default_rng(9)
    (a, _), (b, _), c = operand(rng, "f16", 64), operand(rng, "f16", 8), numbers(rng, 64, 8)

    def detour(use: str) -> Any:
        def edit(text: str) -> str:
            found = re.search(r"wgmma\.mma_async\S* \{(%f\d+)", text)
            assert found
            text = text.replace(".reg .b32", ".reg .f32 \t%extra<2>;\n.reg .b32", 1)
            moves = f"mov.f32 %extra0, {found[1]};\n{use}\nmov.f32 {found[1]}, %extra0;\n"
            return text.replace("wgmma.wait_group", f"{moves}wgmma.wait_group")

        return edit

    functions = mma("product", "f16", 8)
    expected = launch(one(8, 1), functions, a, b, c)
    ran = launch(one(8, 1), functions, a, b, c, edit=detour(""))
    assert not ran.kinds, ran.text
    assert (ran.d == expected.d).all()
    ran = launch(one(8, 1), functions, a, b, c, edit=detour("add.f32 %extra1, %extra0, %extra0;"))
    assert ran.kinds == {"unfinished wgmma"}


# ---- Shared memory -------------------------------------------------------------------------------


def changed(*edits: tuple[str, str], n: int = 16, threads: int = 256) -> Ran:
    rng = np.random.default_rng(10)
    groups = threads // 128
    (a, _), (b, _) = operand(rng, "f16", groups, 64), operand(rng, "f16", n)
    body = one(n, groups)
    for old, new in edits:
        assert old in body
        body = body.replace(old, new)
    return launch(body, mma("product", "f16", n), a, b, numbers(rng, groups, 64, n),
                  threads=threads)  # fmt: skip


READY = "PROXY_FENCE; __syncthreads();"


def test_ordinary_stores_need_a_proxy_fence_before_the_barrier():
    assert not changed().kinds
    ran = changed((READY, "__syncthreads();"))
    assert ran.kinds == {"missing proxy fence"}
    assert "wgmma of shared address" in ran.text
    assert changed((READY, "__syncthreads(); PROXY_FENCE;")).kinds == {"missing proxy fence"}
    assert not changed((READY, "__syncthreads(); PROXY_FENCE; __syncthreads();")).kinds
    assert "missing proxy fence" in changed((READY, "PROXY_FENCE;")).kinds


def test_unwritten_words_are_found():
    ran = changed(("fill(sb,", "if (TID > 300) fill(sb,"))
    assert ran.kinds == {"uninitialised read"}


AWAITED = "CLOSE; AWAIT(0);"


@pytest.mark.parametrize(
    ("early", "late"),
    [
        ("CLOSE; WRITE AWAIT(0);", "CLOSE; AWAIT(0); __syncthreads(); WRITE"),
        # After a wait, but of another warpgroup than the one that still reads.
        ("CLOSE; AWAIT(0); WRITE", "CLOSE; AWAIT(0); BARRIER(1, 256); WRITE"),
        # The wait of one warp of the warpgroup stands for the others.
        (
            "CLOSE; AWAIT(0); if (TID % 128 == 0) sa[512 - 512 * group] = 0;",
            "CLOSE; AWAIT(0); if (TID % 128 == 1) sa[512 * group] = 0;",
        ),
    ],
)  # fmt: skip
def test_what_is_read_must_not_be_overwritten(early, late):
    once = ("WRITE", "if (TID >= 64 && TID < 128) sb[TID % 64] = 0;")
    ran = changed((AWAITED, early.replace(*once)))
    assert ran.kinds == {"race in shared memory"}, ran.text
    ran = changed((AWAITED, late.replace(*once)))
    assert not ran.kinds, ran.text


def test_the_wait_of_another_warp_tells_nothing():
    again = "product(x, desc(sa, 128, 256), desc(sb, 128, 256), 1); CLOSE;"
    some = "if (WARP == 0) AWAIT(0); MORE if (WARP == 1) sb[TID % 32] = 0; AWAIT(0);"
    edit = (AWAITED, f"CLOSE; AWAIT(0); {again} {some}")
    ran = changed((edit[0], edit[1].replace("MORE", "AWAIT(0);")), threads=128)
    assert ran.kinds == {"divergent warpgroup instruction"}, ran.text
    ran = changed((edit[0], edit[1].replace("MORE", "")), threads=128)
    assert ran.kinds == {"race in shared memory", "divergent warpgroup instruction"}, ran.text


def test_all_warps_of_a_warpgroup_wait_in_the_same_place():
    """They need not come together, but through the same instruction."""
    apart = (AWAITED, "CLOSE; if (WARP % 4 == 0) { AWAIT(0); } else { AWAIT(0); }")
    ran = changed(apart)
    assert ran.kinds == {"divergent warpgroup instruction"}, ran.text
    assert "other warps of the warpgroup execute PTX line" in ran.text
    by_warpgroup = (AWAITED, "CLOSE; if (WARP < 4) { AWAIT(0); } else { AWAIT(0); }")
    ran = changed(by_warpgroup)
    assert not ran.kinds, ran.text


def test_all_warps_of_a_warpgroup_deal_registers_in_the_same_place():
    deal = 'asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");'
    ran = changed((AWAITED, f"{AWAITED} if (WARP % 4 < 2) {{ {deal} }} else {{ {deal} }}"))
    assert ran.kinds == {"divergent warpgroup instruction"}, ran.text
    ran = changed((AWAITED, f"{AWAITED} {deal}"))
    assert not ran.kinds, ran.text


def test_a_warp_may_write_what_its_own_warpgroup_multiplies():
    """Its own writes need a fence, the order only the other warps."""
    alone = (READY, """__shared__ u64 bar[1]; if (TID == 0) init(bar, 32); __syncthreads();
      if (WARP == 0) { fill(sa, a, 64, 128, 256, TID, 32); fill(sb, b, 16, 128, 256, TID, 32);
        MAYBE arrive(bar); } else wait(bar, 0);""")  # fmt: skip
    fenced, bare = (alone[1].replace("MAYBE", one) for one in ("PROXY_FENCE;", ""))
    assert not changed((READY, fenced), threads=128).kinds
    assert changed((READY, bare), threads=128).kinds == {"missing proxy fence"}


def test_a_bulk_copy_is_ready_when_its_mbarrier_is():
    fetch = ("fill(sb, b + BLOCK * 16 * 8, 16, 128, 256, TID, blockDim.x);", """
      __shared__ u64 bar[1];
      if (TID == 0) { init(bar, 1); PROXY_FENCE; } __syncthreads();
      if (TID == 0) { arrive_expect(bar, 512); load(sb, b, 512, bar); }
      WAITED""")  # fmt: skip
    assert not changed((fetch[0], fetch[1].replace("WAITED", "wait(bar, 0);"))).kinds
    late = fetch[1].replace("WAITED", "")
    assert "unfinished copy" in changed((fetch[0], late)).kinds
    some = fetch[1].replace("WAITED", "if (TID == 32) wait(bar, 0);")
    assert (
        changed((READY, "__syncthreads(); PROXY_FENCE; __syncthreads();"), (fetch[0], some)).kinds
        == set()
    )


def test_a_matrix_must_lie_in_shared_memory():
    ran = changed(("desc(sb, 128, 256)", "desc(sb, 128, 512)"), n=256)
    assert ran.kinds == {"out of bounds"}
    assert "ends at" in ran.text


# ---- Divergence ----------------------------------------------------------------------------------


def test_all_four_warps_take_part():
    ran = changed(("  product(", "  if (TID % 128 < 96) product("), threads=128)
    assert ran.kinds == {"divergent warpgroup instruction"}, ran.text
    assert "96 of 128 threads" in ran.text
    ran = changed(("  product(", "  if (TID < 128) product("))
    assert not ran.kinds, ran.text


@pytest.mark.parametrize("what", ["OPEN", "CLOSE", "AWAIT(0)"])
def test_the_other_instructions_need_whole_warps(what):
    ran = changed((f"{what};", f"if (TID != 5) {what};"))
    assert "divergent warp instruction" in ran.kinds


def test_warps_that_are_late_are_waited_for():
    """One warp of each consumer waits for the data; that orders the others not, but they wait."""
    ran, expected = pipeline(("wait(full + s, t / STAGES % 2);",
                              "if (WARP == 2) wait(full + s, t / STAGES % 2);"))  # fmt: skip
    assert ran.kinds == {"missing proxy fence"}, ran.text
    np.testing.assert_allclose(ran.d, expected, rtol=1e-5, atol=1e-5)


def test_warps_that_go_another_way_are_waited_for():
    """Warp 0 takes a detour through the end of the code, where nothing spins."""
    rng = np.random.default_rng(14)
    (a, left), (b, right) = operand(rng, "f16", 64), operand(rng, "f16", 8)
    c = numbers(rng, 64, 8)

    def detour(text: str) -> str:
        fork = (
            "mov.u32 %away, %tid.x; setp.lt.u32 %far, %away, 32;\n@%far bra AWAY;\nBACK:\n"
            "wgmma.fence.sync.aligned;"
        )
        text = text.replace("wgmma.fence.sync.aligned;", fork)
        text = text.replace(".reg .pred", ".reg .b32 %away; .reg .pred %far; .reg .pred", 1)
        return text.replace("\tret;", "\tret;\nAWAY:\nbra BACK;")

    ran = launch(one(8, 1), mma("product", "f16", 8), a, b, c, edit=detour)
    assert not ran.kinds, ran.text
    np.testing.assert_allclose(ran.d, c + left @ right.T, rtol=1e-5, atol=1e-5)


def test_register_counts_are_set_by_whole_warps():
    change = 'asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");'
    assert not run(change).kinds
    assert run("if (TID % 32 < 9) " + change).kinds == {"divergent warp instruction"}


def test_operands_are_the_same_in_all_threads():
    ran = changed(("desc(sb, 128, 256)", "desc(sb + TID / 200 * 4, 128, 128)"))
    assert ran.kinds == {"divergent warpgroup instruction"}
    assert "not the same in all threads" in ran.text


# ---- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "words"),
    [("1ull << 62", "128-byte swizzle"), ("3ull << 62", "32-byte swizzle"),
     ("1ull << 49", "base offset 1"), ("1ull << 14", "reserved bits")],
)  # fmt: skip
def test_other_descriptors_are_refused(more, words):
    with pytest.raises(PtxError, match=words):
        changed(("desc(sb, 128, 256)", f"desc(sb, 128, 256) | {more}"))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("1, 1, 0, 0", "1, 1, 0, 1", "imm-trans"),
        ("1, 1, 0, 0", "1, 1", "constants after scale-d"),
        ("1, 1, 0, 0", "2, 1, 0, 0", "imm-scale"),
        (".f32.f16.f16", ".f16.f16.f16", "f16 accumulators"),
        (".f32.f16.f16", ".f32.e4m3.e4m3", "wgmma of f32.e4m3.e4m3"),
        (".f32.f16.f16", ".f32.f16.bf16", "wgmma of f32.f16.bf16"),
        ("m64n16k16", "m64n16k8", "unknown shape"),
        ("m64n16k16", "m64n24k16", "registers for D"),
        ("m64n16k16", "m64n20k16", "unknown shape"),
        ("mma_async.sync", "mma_async.sp.sync", "not supported"),
        ("wgmma.fence", "wgmma.other", "unknown form wgmma.other"),
        (".target sm_90a", ".target sm_90", "sm_90a"),
    ],
)  # fmt: skip
def test_other_forms_are_refused(old, new, words):
    zeros = np.zeros((64, 16), np.float32)

    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    with pytest.raises(PtxError, match=re.escape(words)):
        launch(one(16, 1), mma("product", "f16", 16), zeros, zeros, zeros, edit=edit)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("dp2a.lo.u32.u32", (0x00030002, 0xFF00FF05, 7), 7 + 2 * 5 + 3 * 255),
        ("dp2a.hi.s32.u32", (0xFFFF0002, 0x03050000, 1), 1 + 2 * 5 - 3),
        ("dp2a.lo.u32.s32", (0xFFFF0002, 0x0000FF80, 0), -2 * 128 - 65535),
        ("dp4a.u32.u32", (0x01020304, 0x05060708, 9), 9 + 5 + 12 + 21 + 32),
        ("dp4a.s32.s32", (0xFF020304, 0x05060708, 0), -5 + 12 + 21 + 32),
        ("dp4a.u32.u32", (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF), (4 * 255**2 - 1) % 2**32),
    ],
)
def test_dot_products_of_bytes(name, values, expected):
    """NVRTC makes index arithmetic of rings of places into them."""
    operation = decode(tuple(name.split(".")))
    given = [
        np.array([value], dtype=np.uint32).view(DTYPES[kind])
        for value, kind in zip(values, operation.sources, strict=True)
    ]
    assert operation.function(*given).tolist() == [expected]
    with pytest.raises(PtxError, match="unknown form"):
        decode((name.split(".")[0], "f32"))


# ---- Warps with different work -------------------------------------------------------------------

# Warps 0-3 write tiles of A and B in turn into STAGES places; the warpgroups behind them take every
# second tile each, and give its place back when their products have read it.
PIPELINE = """
  __shared__ alignas(128) u32 sa[STAGES * 72 * 8], sb[3 * N * 8];
  __shared__ u64 full[STAGES], empty[STAGES];
  if (TID == 0) {
    for (int s = 0; s < STAGES; ++s) { init(full + s, 128); init(empty + s, 1); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  for (int s = 0; s < 3; ++s) fill(sb + s * N * 8, b + s * N * 8, N, 128, 256, TID, 384);
  PROXY_FENCE; __syncthreads();
  a += BLOCK * TILES * 72 * 8; d += BLOCK * TILES * 64 * N;
  if (TID < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    for (int t = 0; t < TILES; ++t) {
      const int s = t % STAGES;
      wait(empty + s, t / STAGES % 2 ^ 1);
      fill(sa + s * 72 * 8, a + t * 72 * 8, 72, 72 * 16, 128, TID, 128);
      PROXY_FENCE;
      arrive(full + s);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int group = TID / 128 - 1;
    float x[N / 2];
    for (int t = group; t < TILES; t += 2) {
      const int s = t % STAGES;
      wait(full + s, t / STAGES % 2);
      OPEN;
      for (int step = 0; step < STEPS; ++step)
        product(x, desc(sa + s * 72 * 8 + step % 3 * 4, 72 * 16, 128),
                desc(sb + step % 3 * N * 8, 128, 256), step > 0);
      CLOSE; AWAIT(0);
      if (TID % 128 == 0) arrive(empty + s);
      if (group) { BARRIER(2, 128); } else { BARRIER(1, 128); }
      float* to = d + t * 64 * N;
      EACH(i, N / 2) to[ROW(i) * N + COLUMN(i)] = x[i];
    }
  }
"""


def pipeline(*edits: tuple[str, str], n: int = 16, tiles: int = 7, stages: int = 2, steps: int = 3,
             blocks: int = 2, checks: bool = True) -> tuple[Ran, Any]:  # fmt: skip
    rng = np.random.default_rng(11)
    (a, left), (b, right) = operand(rng, "f16", blocks, tiles, 72), operand(rng, "f16", 3, n)
    body = PIPELINE
    for old, new in edits:
        assert old in body
        body = body.replace(old, new)
    for name, value in {"STAGES": stages, "TILES": tiles, "STEPS": steps, "N": n}.items():
        body = re.sub(rf"\b{name}\b", str(value), body)
    c = np.zeros((blocks, tiles, 64, n), np.float32)
    ran = launch(body, mma("product", "f16", n), a, b, c, threads=384, blocks=blocks, checks=checks)
    window = [left[:, :, s : s + 64] @ right[s].T for s in range(3)]
    return ran, sum(window[step % 3] for step in range(steps))


@pytest.mark.parametrize(("stages", "tiles"), [(2, 7), (3, 8), (4, 9)])
def test_producers_and_consumers_work_side_by_side(stages, tiles):
    ran, expected = pipeline(stages=stages, tiles=tiles)
    assert not ran.kinds, ran.text
    np.testing.assert_allclose(ran.d, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("PROXY_FENCE;\n      arrive", "arrive", "missing proxy fence"),
        ("PROXY_FENCE;\n      arrive(full + s);", "arrive(full + s); PROXY_FENCE;",
         "missing proxy fence"),
        ("wait(full + s, t / STAGES % 2);", "", "missing proxy fence"),
        ("wait(empty + s, t / STAGES % 2 ^ 1);", "", "no progress"),  # all tiles at once
        ("CLOSE; AWAIT(0);\n      if (TID % 128 == 0) arrive(empty + s);",
         "CLOSE; if (TID % 128 == 0) arrive(empty + s); AWAIT(0);", "race in shared memory"),
        ("CLOSE; AWAIT(0);", "CLOSE; AWAIT(1);", "unfinished wgmma"),
    ],
)  # fmt: skip
def test_what_is_missing_between_them_is_found(old, new, kind):
    try:
        found = pipeline((old, new))[0].text
    except SimulationError as error:  # some hang in the end, too
        found = str(error)
    assert kind in found


def test_traces_and_counts_cover_products():
    rng = np.random.default_rng(13)
    (a, _), (b, _), c = operand(rng, "f16", 64), operand(rng, "f16", 8), numbers(rng, 64, 8)
    device = launch(one(8, 1), mma("product", "f16", 8), a, b, c).device
    assert device.counts["k"].values["tensor core"] == 128
    assert device.counts["k"].values["bytes loaded from shared"] == (64 + 8) * 32


# Every block publishes a value for each of the others in turn; the value is its own flag.
PUBLISH = """
  u64* box = (u64*)work;
  for (int step = 0; step < 3; ++step, box += gridDim.x) {
    if (BLOCK == 0) for (int i = 0; i < 200; ++i) { __syncthreads(); }
    if (TID == 0) {
      const u64 mine = (u64)(BLOCK + 1) << 32 | (step + 1);
      asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(box + BLOCK), "l"(mine) : "memory");
    }
    if (TID < gridDim.x) {
      u64 seen;
      do {
        asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];"
                     : "=l"(seen) : "l"(box + TID) : "memory");
        asm volatile("nanosleep.u32 20;");
      } while (seen == 0);
      out[(step * gridDim.x + BLOCK) * gridDim.x + TID] = (u32)(seen >> 32) * 10 + (u32)seen;
    }
    __syncthreads();
  }
"""


def test_blocks_that_are_there_together_may_spin_for_each_others_values():
    ran = run(PUBLISH, threads=128, blocks=6, cooperative=True, resident=256)
    assert not ran.kinds, ran.text
    expected = [[[10 * (other + 1) + step + 1 for other in range(6)]] * 6 for step in range(3)]
    assert ran.out[:108].tolist() == np.array(expected).reshape(-1).tolist()
    with pytest.raises(SimulationError, match="need a cooperative launch"):
        run(PUBLISH, threads=128, blocks=6, resident=256)
