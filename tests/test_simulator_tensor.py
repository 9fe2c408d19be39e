"""Matrix instructions and narrow formats of the PTX simulator, against numpy."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from kgen.compiler import compile_source
from kgen.simulator.device import Device, Options
from kgen.simulator.narrow import from_bf16, to_bf16, to_f16, to_tf32
from kgen.simulator.ptx import PtxError

pytestmark = pytest.mark.nvrtc

BLOCKS, THREADS = 2, 64  # four warps, each with its own matrices
WARPS = BLOCKS * THREADS // 32

# (row and k of element i of A, k of element i of B), as the PTX ISA writes them for each shape.
LAYOUTS = {
    ("m16n8k4", "tf32"): ("i == 0 ? g : g + 8", "t", "t"),
    ("m16n8k8", "tf32"): (
        "i == 0 || i == 2 ? g : g + 8", "i < 2 ? t : t + 4", "i == 0 ? t : t + 4",
    ),
    ("m16n8k8", "bf16"): ("i < 2 ? g : g + 8", "t * 2 + (i & 1)", "t * 2 + i"),
    ("m16n8k8", "f16"): ("i < 2 ? g : g + 8", "t * 2 + (i & 1)", "t * 2 + i"),
    ("m16n8k16", "bf16"): (
        "i < 2 || (i >= 4 && i < 6) ? g : g + 8",
        "t * 2 + (i & 1) + (i >= 4 ? 8 : 0)",
        "t * 2 + (i & 1) + (i >= 2 ? 8 : 0)",
    ),
    ("m16n8k16", "f16"): (
        "i < 2 || (i >= 4 && i < 6) ? g : g + 8",
        "t * 2 + (i & 1) + (i >= 4 ? 8 : 0)",
        "t * 2 + (i & 1) + (i >= 2 ? 8 : 0)",
    ),
}  # fmt: skip
SHAPES = list(LAYOUTS)

MMA = """
extern "C" __global__ void __launch_bounds__({threads}) {name}(
    const {word}* a, const {word}* b, const float* c, float* d) {{
  const int lane = threadIdx.x % 32, warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int g = lane / 4, t = lane % 4;
  a += warp * 16 * {k}; b += warp * {k} * 8; c += warp * 128; d += warp * 128;
  {word} ea[{na}], eb[{nb}];
  for (int i = 0; i < {na}; ++i) ea[i] = a[({row_a}) * {k} + ({k_a})];
  for (int i = 0; i < {nb}; ++i) eb[i] = b[({k_b}) * 8 + g];
  unsigned ra[{ra}], rb[{rb}];
  for (int r = 0; r < {ra}; ++r) ra[r] = {pack_a};
  for (int r = 0; r < {rb}; ++r) rb[r] = {pack_b};
  float x[4];
  for (int i = 0; i < 4; ++i) x[i] = c[(i < 2 ? g : g + 8) * 8 + t * 2 + (i & 1)];
  {before}
  asm volatile("mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 "
               "{{%0,%1,%2,%3}}, {{{regs_a}}}, {{{regs_b}}}, {{%0,%1,%2,%3}};\\n"
               : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]) : {inputs});
  {after}
  for (int i = 0; i < 4; ++i) d[(i < 2 ? g : g + 8) * 8 + t * 2 + (i & 1)] = x[i];
}}
"""
SWAP_16 = "{{ unsigned s = {0}; {0} = (s >> 16) | (s << 16); }}"
SWAP = "{{ auto s = {0}; {0} = {1}; {1} = s; }}"
# Wrong fragment orders: register pairs exchanged, halves of one exchanged, rows of C exchanged.
WRONG = {
    "a01": (SWAP.format("ra[0]", "ra[1]"), ""),
    "a12": (SWAP.format("ra[1]", "ra[2]"), ""),
    "b01": (SWAP.format("rb[0]", "rb[1]"), ""),
    "a_halves": (SWAP_16.format("ra[0]"), ""),
    "d12": ("", SWAP.format("x[1]", "x[2]")),
    "lanes": ("", "x[0] = __shfl_xor_sync(~0u, x[0], 1);"),
}


def mma_kernel(shape: str, kind: str, name: str, before: str = "", after: str = "") -> str:
    row_a, k_a, k_b = LAYOUTS[shape, kind]
    k, each = int(shape.split("k")[1]), 1 if kind == "tf32" else 2
    na, nb = k // 2, k // 4
    ra, rb = na // each, nb // each
    pack = "e{0}[r]" if each == 1 else "e{0}[2 * r] | (unsigned)e{0}[2 * r + 1] << 16"
    numbers = [f"%{4 + i}" for i in range(ra + rb)]
    inputs = [f'"r"(ra[{i}])' for i in range(ra)] + [f'"r"(rb[{i}])' for i in range(rb)]
    return MMA.format(
        threads=THREADS, name=name, shape=shape, kind=kind, k=k, na=na, nb=nb, ra=ra, rb=rb,
        word="unsigned" if each == 1 else "unsigned short", row_a=row_a, k_a=k_a, k_b=k_b,
        pack_a=pack.format("a"), pack_b=pack.format("b"), before=before, after=after,
        regs_a=",".join(numbers[:ra]), regs_b=",".join(numbers[ra:]), inputs=", ".join(inputs),
    )  # fmt: skip


@lru_cache
def ptx(source: str) -> str:
    return compile_source(source, "sm_90a").ptx


def launch(
    source: str,
    kernel: str,
    inputs: list[Any],
    out_words: int,
    *numbers: int,
    blocks: int = BLOCKS,
    threads: int = THREADS,
    **options: Any,
) -> tuple[Any, Device]:
    """Run a kernel on the arrays, an output of uint32 words, and further integer arguments."""
    device = Device(ptx(source), Options(**options))
    bases = [
        device.memory.allocate(f"in{i}", one.nbytes, "input", one).base
        for i, one in enumerate(inputs)
    ]
    out = device.memory.allocate("out", 4 * out_words, "output")
    device.launch(kernel, blocks, threads, 0, [*bases, out.base, *numbers])
    return out.words, device


def kinds(device: Device) -> set[str]:
    return {one.kind for one in device.findings.all()}


def narrowed(values: Any, kind: str) -> tuple[Any, Any]:
    """fp32 values as the words that a kernel loads, and what they are worth in fp64."""
    if kind == "tf32":  # unconverted: the low bits are there, and do not count
        return values.view(np.uint32), to_tf32(values, "rz").view(np.float32).astype(np.float64)
    if kind == "bf16":
        return to_bf16(values), from_bf16(to_bf16(values)).astype(np.float64)
    return to_f16(values), values.astype(np.float16).astype(np.float64)


def problem(shape: str, kind: str) -> tuple[list[Any], Any]:
    """Random matrices of every warp, no two elements equal, and the product."""
    k = int(shape.split("k")[1])
    random = np.random.default_rng(k)
    a = random.uniform(0.5, 2, (WARPS, 16, k)).astype(np.float32)
    b = random.uniform(0.5, 2, (WARPS, k, 8)).astype(np.float32)
    c = random.uniform(-9, 9, (WARPS, 16, 8)).astype(np.float32)
    a *= np.where(random.random(a.shape) < 0.5, -1, 1).astype(np.float32)
    assert all(len(np.unique(one)) == one.size for one in (a, b, c))
    (words_a, left), (words_b, right) = narrowed(a, kind), narrowed(b, kind)
    return [words_a, words_b, c], (left @ right + c).astype(np.float32)


@pytest.mark.parametrize(("shape", "kind"), SHAPES)
def test_mma_is_a_matrix_product(shape, kind):
    inputs, expected = problem(shape, kind)
    words, device = launch(mma_kernel(shape, kind, "product"), "product", inputs, expected.size)
    got = words.view(np.float32).reshape(expected.shape)
    np.testing.assert_array_equal(got, expected)  # the sums are exact in fp64
    assert not device.findings.all()
    assert device.counts["product"].values["tensor core"] == BLOCKS * THREADS


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_fragment_order_gives_a_wrong_product(mistake):
    inputs, expected = problem("m16n8k16", "bf16")
    source = mma_kernel("m16n8k16", "bf16", "wrong", *WRONG[mistake])
    words, _ = launch(source, "wrong", inputs, expected.size)
    got = words.view(np.float32).reshape(expected.shape)
    assert np.abs(got - expected).max() > 0.1


@pytest.mark.parametrize("mistake", ["a01", "a12", "b01", "d12", "lanes"])
def test_a_wrong_tf32_fragment_order_gives_a_wrong_product(mistake):
    inputs, expected = problem("m16n8k8", "tf32")
    words, _ = launch(
        mma_kernel("m16n8k8", "tf32", "wrong", *WRONG[mistake]), "wrong", inputs, expected.size
    )
    assert np.abs(words.view(np.float32).reshape(expected.shape) - expected).max() > 0.1


def test_tf32_operands_are_truncated():
    inputs, expected = problem("m16n8k8", "tf32")
    cleared = [inputs[0] & np.uint32(0xFFFFE000), inputs[1] & np.uint32(0xFFFFE000), inputs[2]]
    assert (cleared[0] != inputs[0]).any()
    source = mma_kernel("m16n8k8", "tf32", "product")
    words, _ = launch(source, "product", cleared, expected.size)
    np.testing.assert_array_equal(words.view(np.float32).reshape(expected.shape), expected)


def test_a_product_is_rounded_once():
    # 2^24 + 1 + 1: rounding after each summand would stay at 2^24.
    ones = np.zeros((WARPS, 16, 8), np.float32)
    ones[:, :, :2] = 1
    right = np.ones((WARPS, 8, 8), np.float32)
    c = np.full((WARPS, 16, 8), 2.0**24, np.float32)
    inputs = [to_bf16(ones), to_bf16(right), c]
    words, _ = launch(mma_kernel("m16n8k8", "bf16", "product"), "product", inputs, c.size)
    assert (words.view(np.float32) == np.float32(2.0**24 + 2)).all()


REFUSED = """
extern "C" __global__ void integers(int* d) {
  int x[4] = {0, 0, 0, 0}; unsigned a = threadIdx.x;
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
               "{%0,%1,%2,%3}, {%4,%4,%4,%4}, {%4,%4}, {%0,%1,%2,%3};"
               : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3]) : "r"(a));
  d[threadIdx.x] = x[0] + x[1] + x[2] + x[3];
}
extern "C" __global__ void half_sums(unsigned* d) {
  unsigned x[2] = {0, 0}, a = threadIdx.x;
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 "
               "{%0,%1}, {%2,%2,%2,%2}, {%2,%2}, {%0,%1};" : "+r"(x[0]), "+r"(x[1]) : "r"(a));
  d[threadIdx.x] = x[0] + x[1];
}
extern "C" __global__ void generic(unsigned* d) {
  __shared__ __align__(16) unsigned tile[32]; unsigned x;
  tile[threadIdx.x % 32] = 0;
  __syncthreads();
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.b16 {%0}, [%1];"
               : "=r"(x) : "l"(&tile[threadIdx.x % 8 * 4]));
  d[threadIdx.x] = x;
}
extern "C" __global__ void negated(unsigned* d) {
  unsigned x;
  asm volatile("neg.bf16x2 %0, %1;" : "=r"(x) : "r"(threadIdx.x));
  d[threadIdx.x] = x;
}
extern "C" __global__ void saturated(unsigned* d) {
  unsigned x;
  asm volatile("cvt.rn.relu.bf16x2.f32 %0, %1, %1;" : "=r"(x) : "f"(1.0f * threadIdx.x));
  d[threadIdx.x] = x;
}
"""


@pytest.mark.parametrize(
    ("kernel", "opcode", "why"),
    [
        ("integers", "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", "unknown form"),
        ("half_sums", "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", "f16 accumulators"),
        ("generic", "ldmatrix.sync.aligned.m8n8.x1.b16", "unknown form"),
        ("negated", "neg.bf16x2", "unknown form"),
        ("saturated", "cvt.rn.relu.bf16x2.f32", "unknown form"),
    ],
)
def test_unknown_forms_are_refused_with_opcode_and_line(kernel, opcode, why):
    text = ptx(REFUSED)
    line = next(n for n, one in enumerate(text.split("\n"), 1) if opcode in one)
    with pytest.raises(PtxError) as error:
        launch(REFUSED, kernel, [], 32, blocks=1, threads=32)
    assert str(error.value).startswith(f"PTX line {line}: {why}")
    assert f"{opcode} " in str(error.value)


MATRICES = """
#define FILL 1      // write the tile
#define WAIT 2      // and wait for it
#define COPY 4      // write it with cp.async
#define HALF_WARP 8 // only half of each warp takes part
#define TOUCH 16    // write the tile once more afterwards
#define NAME_(a, b, c) a##b##c
#define NAME(a, b, c) NAME_(a, b, c)
#define SPOT (tile + order[lane] * pitch + warp * 32 * pitch + shift)
__device__ unsigned at(void* p) { return (unsigned)__cvta_generic_to_shared(p); }
#define LOAD(X, TRANS, SUFFIX, REGS, OPERANDS) \\
extern "C" __global__ void __launch_bounds__(64) NAME(load_##X, _, SUFFIX)( \\
    const unsigned* in, const int* order, unsigned* out, int pitch, int shift, int mode) { \\
  __shared__ __align__(16) unsigned char tile[2 * 32 * 144]; \\
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32; \\
  unsigned r[4] = {0, 0, 0, 0}; \\
  const unsigned* row = in + (blockIdx.x * 64 + threadIdx.x) * 4; \\
  unsigned* to = (unsigned*)(tile + threadIdx.x * pitch); \\
  if (mode & FILL) for (int i = 0; i < 4; ++i) to[i] = row[i]; \\
  if (mode & COPY) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" \\
                                :: "r"(at(to)), "l"(row) : "memory"); \\
  if (mode & WAIT) __syncthreads(); \\
  if (!(mode & HALF_WARP) || lane < 16) \\
    asm volatile("ldmatrix.sync.aligned.m8n8." #X TRANS ".shared.b16 " REGS ", [%4];" \\
                 : OPERANDS : "r"(at(SPOT)) : "memory"); \\
  if (mode & TOUCH) *(unsigned*)(tile + (threadIdx.x ^ 1) * pitch) = 7; \\
  for (int i = 0; i < 4; ++i) out[(blockIdx.x * 64 + threadIdx.x) * 4 + i] = r[i]; \\
}
#define OUT "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3])
LOAD(x1, "", plain, "{%0}", OUT)
LOAD(x2, "", plain, "{%0,%1}", OUT)
LOAD(x4, "", plain, "{%0,%1,%2,%3}", OUT)
LOAD(x1, ".trans", trans, "{%0}", OUT)
LOAD(x2, ".trans", trans, "{%0,%1}", OUT)
LOAD(x4, ".trans", trans, "{%0,%1,%2,%3}", OUT)
#define STORE(X, TRANS, SUFFIX, REGS) \\
extern "C" __global__ void __launch_bounds__(64) NAME(store_##X, _, SUFFIX)( \\
    const unsigned* in, const int* order, unsigned* out, int pitch, int shift, int mode) { \\
  __shared__ __align__(16) unsigned char tile[2 * 32 * 144]; \\
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32; \\
  unsigned r[4]; \\
  for (int i = 0; i < 4; ++i) r[i] = in[(blockIdx.x * 64 + threadIdx.x) * 4 + i]; \\
  unsigned* from = (unsigned*)(tile + threadIdx.x * pitch); \\
  if (mode & FILL) for (int i = 0; i < 4; ++i) from[i] = 0; \\
  if (mode & WAIT) __syncthreads(); \\
  if (!(mode & HALF_WARP) || lane < 16) \\
    asm volatile("stmatrix.sync.aligned.m8n8." #X TRANS ".shared.b16 [%0], " REGS ";" \\
                 :: "r"(at(SPOT)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory"); \\
  if (mode & WAIT) __syncthreads(); \\
  for (int i = 0; i < 4; ++i) out[(blockIdx.x * 64 + threadIdx.x) * 4 + i] = from[i]; \\
}
STORE(x1, "", plain, "{%1}")
STORE(x2, "", plain, "{%1,%2}")
STORE(x4, "", plain, "{%1,%2,%3,%4}")
STORE(x1, ".trans", trans, "{%1}")
STORE(x2, ".trans", trans, "{%1,%2}")
STORE(x4, ".trans", trans, "{%1,%2,%3,%4}")
"""
FILL, WAIT, COPY, HALF_WARP, TOUCH = 1, 2, 4, 8, 16
IDENTITY = np.arange(32, dtype=np.int32)
ORDER = np.random.default_rng(5).permutation(32).astype(np.int32)


def tiles() -> Any:
    """[warps, 32 rows, 8 elements] of 16 bits, all different."""
    count = WARPS * 32 * 8
    return np.random.default_rng(6).permutation(count).astype(np.uint16).reshape(WARPS, 32, 8)


def matrices(kernel: str, values: Any, order: Any, pitch: int = 16, shift: int = 0,
             mode: int = FILL | WAIT, **options: Any) -> tuple[Any, Device]:  # fmt: skip
    """Run a kernel of MATRICES on [warps, 32, 8] elements; returns words [warps, 32, 4]."""
    inputs = [np.ascontiguousarray(values).view(np.uint32), order]
    words, device = launch(MATRICES, kernel, inputs, WARPS * 128, pitch, shift, mode, **options)
    return words.reshape(WARPS, 32, 4), device


def fragments(rows: Any, count: int, trans: bool) -> Any:
    """What ldmatrix gives for rows [warps, 32, 8]: words [warps, lanes, 4], by plain indexing."""
    result = np.zeros((WARPS, 32, 4), np.uint32)
    for warp in range(WARPS):
        for lane in range(32):
            for one in range(count):
                matrix = rows[warp, 8 * one : 8 * one + 8]
                row, column = lane // 4, lane % 4 * 2
                low, high = (
                    (matrix[column, row], matrix[column + 1, row])
                    if trans
                    else (matrix[row, column], matrix[row, column + 1])
                )
                result[warp, lane, one] = int(low) | int(high) << 16
    return result


@pytest.mark.parametrize("order", [IDENTITY, ORDER], ids=["in order", "shuffled"])
@pytest.mark.parametrize("trans", [False, True], ids=["plain", "trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_is_indexing(count, trans, order):
    values = tiles()
    name = f"load_x{count}_{'trans' if trans else 'plain'}"
    got, device = matrices(name, values, order, pitch=144)
    np.testing.assert_array_equal(got, fragments(values[:, order], count, trans))
    assert not device.findings.all()


@pytest.mark.parametrize("order", [IDENTITY, ORDER], ids=["in order", "shuffled"])
@pytest.mark.parametrize("trans", [False, True], ids=["plain", "trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_is_the_inverse_of_ldmatrix(count, trans, order):
    values = tiles()
    expected = values.copy()
    expected[:, order[8 * count :]] = 0  # rows that no matrix holds
    given = fragments(values[:, order], count, trans)
    name = f"store_x{count}_{'trans' if trans else 'plain'}"
    got, device = matrices(name, given, order, pitch=144)
    np.testing.assert_array_equal(got, expected.view(np.uint32))
    assert not device.findings.all()


@pytest.mark.parametrize(("pitch", "conflicts"), [(16, 0), (144, 0), (32, 1), (64, 3), (128, 7)])
@pytest.mark.parametrize(
    ("kernel", "name"), [("load", "loaded from shared"), ("store", "stored to shared")]
)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_bank_conflicts_count_eight_rows_a_matrix(pitch, conflicts, kernel, name, count):
    _, device = matrices(f"{kernel}_x{count}_plain", tiles(), IDENTITY, pitch=pitch, measure=True)
    lines = ptx(MATRICES).split("\n")
    at = [
        found for (_, line), found in device.conflicts.items() if "matrix.sync" in lines[line - 1]
    ]
    assert sum(at) == conflicts * count * WARPS
    assert device.counts[f"{kernel}_x{count}_plain"].values[f"wavefronts {name}"] > 0


@pytest.mark.parametrize("kernel", ["load_x4_plain", "store_x4_plain", "load_x1_trans"])
@pytest.mark.parametrize(
    ("shift", "kind"), [(8, "misaligned access"), (1 << 20, "out of bounds")]
)  # fmt: skip
def test_rows_are_aligned_and_inside(kernel, shift, kind):
    _, device = matrices(kernel, tiles(), IDENTITY, shift=shift)
    assert kind in kinds(device)
    assert any("matrix.sync" in one.text for one in device.findings.all())


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        (WAIT, "uninitialised read"),
        (FILL, "race in shared memory"),
        (FILL | WAIT | TOUCH, "race in shared memory"),
        (COPY | WAIT, "unfinished copy"),
        (FILL | WAIT | HALF_WARP, "divergent warp instruction"),
    ],
)
def test_ldmatrix_is_checked(mode, kind):
    _, device = matrices("load_x4_plain", tiles(), IDENTITY, mode=mode)
    assert kinds(device) == {kind}


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        (FILL, "race in shared memory"),
        (FILL | WAIT | HALF_WARP, "divergent warp instruction"),
    ],
)
def test_stmatrix_is_checked(mode, kind):
    _, device = matrices("store_x4_plain", tiles(), ORDER, mode=mode)
    assert kinds(device) == {kind}


def test_two_rows_stored_to_one_place_race():
    _, device = matrices("store_x2_plain", tiles(), np.zeros(32, np.int32))
    assert "race in shared memory" in kinds(device)


def test_a_row_address_of_another_lane_is_not_used():
    # x1 takes the addresses of lanes 0 to 7; those of the others may be anything.
    order = np.where(IDENTITY < 8, IDENTITY, 1 << 20).astype(np.int32)
    _, device = matrices("load_x1_plain", tiles(), order)
    assert not device.findings.all()


def test_mma_needs_whole_warps():
    inputs, expected = problem("m16n8k8", "tf32")
    source = mma_kernel("m16n8k8", "tf32", "torn", "if (lane >= 16 && c[0] > -100) return;")
    _, device = launch(source, "torn", inputs, expected.size)
    assert kinds(device) == {"divergent warp instruction"}
    assert "16 of 32 threads" in device.findings.all()[0].detail


NARROW = """
#define ONE(NAME, TO, CODE) \\
extern "C" __global__ void NAME(const unsigned* a, const unsigned* b, const unsigned* c, \\
                                unsigned* out) { \\
  const int i = blockIdx.x * blockDim.x + threadIdx.x; \\
  const unsigned x = a[i], y = b[i], z = c[i]; TO r; \\
  const float fx = __uint_as_float(x), fy = __uint_as_float(y); \\
  const unsigned short hx = x, hy = y, hz = z; \\
  CODE; \\
  out[i] = (unsigned)r; \\
}
#define CVT_PAIR(NAME, OP) ONE(NAME, unsigned, asm(OP " %0, %1, %2;" : "=r"(r) : "f"(fx), "f"(fy)))
#define CVT_TF32(NAME, OP) ONE(NAME, unsigned, asm(OP " %0, %1;" : "=r"(r) : "f"(fx)))
#define CVT_NARROW(NAME, OP) ONE(NAME, unsigned short, asm(OP " %0, %1;" : "=h"(r) : "f"(fx)))
#define CVT_WIDEN(NAME, OP) ONE(NAME, unsigned, float f; \\
  asm(OP " %0, %1;" : "=f"(f) : "h"(hx)); r = __float_as_uint(f))
#define TWO(NAME, OP) ONE(NAME, unsigned, asm(OP " %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y)))
#define THREE(NAME, OP) \\
  ONE(NAME, unsigned, asm(OP " %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(z)))
#define THREE_16(NAME, OP) \\
  ONE(NAME, unsigned short, asm(OP " %0, %1, %2, %3;" : "=h"(r) : "h"(hx), "h"(hy), "h"(hz)))
CVT_TF32(tf32_rna, "cvt.rna.tf32.f32")
CVT_TF32(tf32_rn, "cvt.rn.tf32.f32")
CVT_TF32(tf32_rz, "cvt.rz.tf32.f32")
CVT_PAIR(pair_bf16, "cvt.rn.bf16x2.f32")
CVT_PAIR(pair_f16, "cvt.rn.f16x2.f32")
CVT_NARROW(one_bf16, "cvt.rn.bf16.f32")
CVT_NARROW(one_f16, "cvt.rn.f16.f32")
CVT_WIDEN(wide_bf16, "cvt.f32.bf16")
CVT_WIDEN(wide_f16, "cvt.f32.f16")
TWO(add_f16x2, "add.rn.f16x2")
TWO(sub_f16x2, "sub.rn.f16x2")
TWO(mul_f16x2, "mul.rn.f16x2")
TWO(add_bf16x2, "add.rn.bf16x2")
TWO(sub_bf16x2, "sub.rn.bf16x2")
TWO(mul_bf16x2, "mul.rn.bf16x2")
THREE(fma_f16x2, "fma.rn.f16x2")
THREE(fma_bf16x2, "fma.rn.bf16x2")
THREE_16(fma_f16, "fma.rn.f16")
THREE_16(fma_bf16, "fma.rn.bf16")
"""


def converted(kernel: str, *inputs: Any) -> Any:
    """A kernel of NARROW on up to three lists of 32-bit words."""
    count = len(inputs[0])
    wide = [np.zeros(-(-count // 32) * 32, np.uint32) for _ in range(3)]
    for to, one in zip(wide, inputs, strict=False):
        to[:count] = one
    words, device = launch(NARROW, kernel, wide, len(wide[0]), blocks=len(wide[0]) // 32,
                           threads=32)  # fmt: skip
    assert not device.findings.all()
    return words[:count]


def bits(*values: float) -> Any:
    return np.array(values, np.float32).view(np.uint32)


def assert_words(got: Any, *expected: int) -> None:
    assert [f"{one:#x}" for one in got] == [f"{one:#x}" for one in expected]


def test_cvt_to_tf32():
    # 1 + half a unit of tf32, that and a little, just below, its negative, 1.5 units, inf.
    given = [0x3F801000, 0x3F801001, 0x3F800FFF, 0xBF801000, 0x3F803000, 0x7F800000]
    one, two = 0x3F800000, 0x3F802000
    assert_words(converted("tf32_rna", given), two, two, one, 0xBF802000, 0x3F804000, 0x7F800000)
    assert_words(converted("tf32_rn", given), one, two, one, 0xBF800000, 0x3F804000, 0x7F800000)
    assert_words(converted("tf32_rz", given), one, one, one, 0xBF800000, two, 0x7F800000)


def test_cvt_to_pairs_puts_the_first_source_in_the_upper_half():
    assert_words(converted("pair_bf16", bits(1, -2, 3), bits(2, 0.5, -4)),
                 0x3F804000, 0xC0003F00, 0x4040C080)  # fmt: skip
    assert_words(converted("pair_f16", bits(1, -2, 65504), bits(2, 0.5, 2.0**-24)),
                 0x3C004000, 0xC0003800, 0x7BFF0001)  # fmt: skip


def test_cvt_rounds_to_nearest_even():
    bf16 = [0x3F808000, 0x3F808001, 0x3F818000, 0x3F807FFF, 0x7F7FFFFF, 0x7FC01234, 0x80000000]
    assert_words(
        converted("one_bf16", bf16), 0x3F80, 0x3F81, 0x3F82, 0x3F80, 0x7F80, 0x7FFF, 0x8000
    )
    f16 = [0x3F801000, 0x3F801001, 0x3F803000, 0x477FEFFF, 0x477FF000, 0x7FC01234, 0x33000000,
           0x33000001]  # fmt: skip
    assert_words(converted("one_f16", f16), 0x3C00, 0x3C01, 0x3C02, 0x7BFF, 0x7C00, 0x7FFF, 0, 1)


def test_cvt_widens_exactly():
    assert_words(converted("wide_bf16", [0x3F81, 0xC080, 1, 0x7F80]),
                 0x3F810000, 0xC0800000, 0x10000, 0x7F800000)  # fmt: skip
    expected = bits(1.0, -2.5, 2.0**-24, 65504, np.inf)
    assert_words(converted("wide_f16", [0x3C00, 0xC100, 1, 0x7BFF, 0x7C00]), *expected)


def random_pairs(kind: str, seed: int) -> tuple[Any, Any]:
    """Words of two 16-bit values, and those in fp64 as [words, 2]."""
    random = np.random.default_rng(seed)
    values = (random.uniform(-4, 4, (256, 2)) * 2.0 ** random.integers(-6, 7, (256, 2))).astype(
        np.float32
    )
    words, exact = narrowed(values, kind)
    return np.ascontiguousarray(words).view(np.uint32).reshape(-1), exact


def rounded(exact: Any, kind: str) -> Any:
    """fp64 [words, 2] as words of two 16-bit values, rounded to nearest even by scaling."""
    digits = 11 if kind == "f16" else 8
    unit = 2.0 ** (np.floor(np.log2(np.abs(exact))) - digits + 1)
    unit = np.maximum(unit, 2.0**-24) if kind == "f16" else unit
    value = (np.rint(exact / unit) * unit).astype(np.float32)
    narrow = value.astype(np.float16).view(np.uint16) if kind == "f16" else to_bf16(value)
    return np.ascontiguousarray(narrow).view(np.uint32).reshape(-1)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_packed_arithmetic(kind, name):
    (x, a), (y, b), (z, c) = (random_pairs(kind, seed) for seed in (1, 2, 3))
    exact = {"add": a + b, "sub": a - b, "mul": a * b, "fma": a * b + c}[name]
    inputs = (x, y, z) if name == "fma" else (x, y)
    np.testing.assert_array_equal(converted(f"{name}_{kind}x2", *inputs), rounded(exact, kind))
    if name == "fma":
        np.testing.assert_array_equal(
            converted(f"fma_{kind}", *inputs), rounded(exact, kind) & 0xFFFF
        )


def test_fma_of_bf16_is_rounded_once():
    # 1.0078125 * 1.0078125 lies 2^-14 above a value; (1 + 2^-7) * 1.5 lies halfway between two,
    # and a summand too small for fp64 to keep beside it decides.
    tiny, halfway = 0x0080, (0x3F81, 0x3FC0)
    got = converted("fma_bf16", *np.array([[*halfway, 0], [*halfway, tiny],
                                           [*halfway, tiny | 0x8000]]).T)  # fmt: skip
    assert_words(got, 0x3FC2, 0x3FC2, 0x3FC1)
