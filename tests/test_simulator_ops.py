"""Every arithmetic opcode of the simulator against values worked out by hand or by Python."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest

from kgen.simulator.ops import decode, known_opcodes
from kgen.simulator.ptx import PtxError
from kgen.simulator.values import DTYPES

INF, NAN = math.inf, math.nan
MIN, TINY = 2.0**-126, 2.0**-140  # least normal fp32, a subnormal
ULP = 2.0**-23


def run(name, *arguments):
    """The operation on one-element arrays of its source types; negative integers wrap."""
    operation = decode(tuple(name.split(".")))
    arrays = []
    for value, kind in zip(arguments, operation.sources, strict=True):
        dtype = np.dtype(DTYPES[kind])
        if dtype.kind in "iu":
            value = int(value) % (1 << (8 * dtype.itemsize))
            arrays.append(np.array([value], dtype=f"u{dtype.itemsize}").view(dtype))
        else:
            arrays.append(np.array([value], dtype=dtype))
    with np.errstate(all="ignore"):
        result = operation.function(*arrays)
    assert result.dtype == np.dtype(DTYPES[operation.result]) or result.dtype == np.bool_
    return result[0].item()


CASES = [
    ("add.s32", (2**31 - 1, 1), -(2**31)),
    ("add.u32", (2**32 - 1, 2), 1),
    ("add.sat.s32", (2**31 - 1, 5), 2**31 - 1),
    ("add.s64", (2**40, -1), 2**40 - 1),
    ("add.s16", (-3, 1), -2),
    ("add.f32", (1.0, ULP / 2), 1.0),
    ("add.rp.f32", (1.0, ULP / 4), 1 + ULP),
    ("add.rm.f32", (1.0, ULP / 4), 1.0),
    ("add.rz.f32", (-1.0, -ULP * 0.75), -1.0),
    ("add.ftz.f32", (TINY, TINY), 0.0),
    ("add.sat.f32", (0.75, 0.75), 1.0),
    ("sub.f32", (1.0, 3.5), -2.5),
    ("sub.s32", (-(2**31), 1), 2**31 - 1),
    ("sub.s64", (1, 3), -2),
    ("mul.f32", (3.0, -0.5), -1.5),
    ("mul.lo.s32", (123456789, 987654321), -67153019),
    ("mul.hi.s32", (-(2**31), 4), -2),
    ("mul.hi.u32", (2**31, 6), 3),
    ("mul.hi.u16", (40000, 40000), 40000 * 40000 >> 16),
    ("mul.hi.s64", (-1, 5), -1),
    ("mul.hi.u64", (2**63, 6), 3),
    ("mul.wide.s32", (-70000, 70000), -4900000000),
    ("mul.wide.u32", (2**32 - 1, 2**32 - 1), (2**32 - 1) ** 2),
    ("mul.wide.u16", (65535, 65535), 65535 * 65535),
    ("mul.lo.s64", (2**33, 3), 3 * 2**33),
    ("mul.lo.s16", (300, 300), np.array([90000 & 0xFFFF], np.uint16).view(np.int16)[0].item()),
    ("mad.lo.s32", (7, -3, 4), -17),
    ("mad.hi.s32", (2**30, 8, 1), 3),
    ("mad.wide.s32", (100000, 100000, -1), 9999999999),
    ("mad.lo.s64", (2**33, 2, 1), 2**34 + 1),
    ("fma.rn.f32", (1 + ULP, 1 + ULP, -(1 + 2 * ULP)), 2.0**-46),
    ("fma.rm.f32", (1.0, 1.0, ULP / 4), 1.0),
    ("fma.rp.f32", (1.0, 1.0, ULP / 4), 1 + ULP),
    ("fma.rn.ftz.f32", (1.0, TINY, 0.0), 0.0),
    ("div.rn.f32", (1.0, 3.0), float(np.float32(1) / np.float32(3))),
    ("div.approx.f32", (6.0, 2.0), 3.0),
    ("div.s32", (-7, 2), -3),
    ("div.u32", (7, 2), 3),
    ("rem.s32", (-7, 2), -1),
    ("min.s32", (-5, 3), -5),
    ("min.u32", (-5, 3), 3),
    ("max.f32", (NAN, 2.0), 2.0),
    ("max.NaN.f32", (NAN, 2.0), NAN),
    ("min.f32", (-0.5, 2.0), -0.5),
    ("neg.f32", (2.5,), -2.5),
    ("neg.s32", (7,), -7),
    ("abs.f32", (-2.5,), 2.5),
    ("abs.s32", (-9,), 9),
    ("and.b32", (0b1100, 0b1010), 0b1000),
    ("or.b32", (0b1100, 0b1010), 0b1110),
    ("xor.b64", (0b1100, 0b1010), 0b0110),
    ("not.b32", (0,), 2**32 - 1),
    ("and.pred", (True, False), False),
    ("or.pred", (True, False), True),
    ("xor.pred", (True, True), False),
    ("not.pred", (True,), False),
    ("shl.b32", (1, 31), 2**31),
    ("shl.b32", (1, 32), 0),
    ("shl.b64", (1, 40), 2**40),
    ("shl.b16", (3, 15), 2**15),
    ("shr.u32", (2**31, 31), 1),
    ("shr.u32", (2**31, 40), 0),
    ("shr.s32", (-8, 1), -4),
    ("shr.s32", (-8, 99), -1),
    ("shr.u64", (2**50, 50), 1),
    ("shf.l.wrap.b32", (0x80000000, 1, 1), 3),
    ("shf.r.wrap.b32", (2, 1, 1), 0x80000001),
    ("shf.r.clamp.b32", (2, 7, 40), 7),
    ("bfi.b32", (0b101, 0xFF00, 4, 3), 0xFF50),
    ("bfe.u32", (0xABCD, 4, 8), 0xBC),
    ("bfe.s32", (0x00F0, 4, 4), -1),
    ("prmt.b32", (0x33221100, 0x77665544, 0x0123), 0x00112233),
    ("prmt.b32", (0x33221100, 0x77665544, 0x7654), 0x77665544),
    ("prmt.b32", (0x80, 0, 0x8888), 0xFFFFFFFF),
    ("popc.b32", (0xF0F0,), 8),
    ("clz.b32", (1,), 31),
    ("clz.b32", (0,), 32),
    ("clz.b32", (0xFFFFFFFF,), 0),
    ("brev.b32", (1,), 2**31),
    ("bfind.u32", (0x00F0,), 7),
    ("bfind.u32", (0xFFFFFFFF,), 31),
    ("bfind.u32", (0,), 0xFFFFFFFF),
    ("bfind.shiftamt.u32", (0x00F0,), 24),
    ("setp.lt.s32", (-1, 1), True),
    ("setp.lt.u32", (-1, 1), False),
    ("setp.eq.f32", (NAN, NAN), False),
    ("setp.ne.f32", (NAN, 1.0), False),
    ("setp.neu.f32", (NAN, 1.0), True),
    ("setp.leu.f32", (NAN, 1.0), True),
    ("setp.gt.f32", (2.0, 1.0), True),
    ("setp.nan.f32", (NAN, 1.0), True),
    ("setp.num.f32", (NAN, 1.0), False),
    ("setp.lt.and.s32", (1, 2, False), False),
    ("setp.lt.or.s32", (3, 2, True), True),
    ("setp.eq.ftz.f32", (TINY, 0.0), True),
    ("setp.hs.u32", (3, 3), True),
    ("selp.b32", (5, 6, True), 5),
    ("selp.f32", (5.0, 6.0, False), 6.0),
    ("mov.b32", (77,), 77),
    ("mov.pred", (True,), True),
    ("rcp.rn.f32", (3.0,), float(np.float32(1) / np.float32(3))),
    ("rcp.approx.ftz.f32", (INF,), 0.0),
    ("rcp.approx.ftz.f32", (TINY,), INF),
    ("sqrt.rn.f32", (2.0,), float(np.sqrt(np.float32(2)))),
    ("sqrt.approx.f32", (9.0,), 3.0),
    ("rsqrt.approx.f32", (4.0,), 0.5),
    ("ex2.approx.ftz.f32", (3.0,), 8.0),
    ("ex2.approx.ftz.f32", (-INF,), 0.0),
    ("ex2.approx.ftz.f32", (-140.0,), 0.0),
    ("ex2.approx.f32", (-140.0,), TINY),
    ("ex2.approx.f32", (200.0,), INF),
    ("lg2.approx.f32", (8.0,), 3.0),
    ("sin.approx.f32", (0.0,), 0.0),
    ("cos.approx.f32", (0.0,), 1.0),
    ("tanh.approx.f32", (INF,), 1.0),
    ("copysign.f32", (-1.0, 3.0), -3.0),
    ("cvt.rn.f32.s32", (-7,), -7.0),
    ("cvt.rn.f32.u32", (2**32 - 1,), 2.0**32),
    ("cvt.rz.f32.u32", (2**32 - 1,), float(2**32 - 256)),
    ("cvt.rzi.s32.f32", (-2.7,), -2),
    ("cvt.rni.s32.f32", (2.5,), 2),
    ("cvt.rmi.s32.f32", (-2.1,), -3),
    ("cvt.rpi.s32.f32", (2.1,), 3),
    ("cvt.rzi.s32.f32", (1e20,), 2**31 - 1),
    ("cvt.rzi.u32.f32", (-5.0,), 0),
    ("cvt.rzi.s32.f32", (NAN,), 0),
    ("cvt.rni.f32.f32", (2.5,), 2.0),
    ("cvt.sat.f32.f32", (1.5,), 1.0),
    ("cvt.sat.f32.f32", (NAN,), 0.0),
    ("cvt.f64.f32", (0.5,), 0.5),
    ("cvt.rn.f32.f64", (1 + 2.0**-40,), 1.0),
    ("cvt.rp.f32.f64", (1 + 2.0**-40,), 1 + ULP),
    ("cvt.s64.s32", (-1,), -1),
    ("cvt.u64.u32", (-1,), 2**32 - 1),
    ("cvt.u32.u64", (2**40 + 5,), 5),
    ("cvt.u16.u32", (2**16 + 9,), 9),
    ("cvt.u32.u16", (65535,), 65535),
    ("cvt.s32.s8", (-3,), -3),
    ("cvt.sat.s8.s32", (300,), 127),
    ("cvt.sat.s32.u64", (2**64 - 5,), 2**31 - 1),
    ("cvt.sat.u64.s32", (-5,), 0),
    ("cvt.f32.f16", (0.1,), float(np.float16(0.1))),
    ("cvt.rn.f16.f32", (0.1,), float(np.float16(0.1))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "wanted"), CASES)
def test_known_value(name, arguments, wanted):
    result = run(name, *arguments)
    if isinstance(wanted, float) and math.isnan(wanted):
        assert math.isnan(result)
    else:
        assert result == wanted


def test_every_opcode_has_a_known_value():
    assert {name.split(".")[0] for name, *_ in CASES} == set(known_opcodes())


def test_rounding_of_a_product_sum_is_that_of_the_exact_value():
    """fma against Python's exact rationals on random values."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(2000).astype(np.float32) for _ in range(3))
    fused = decode(("fma", "rn", "f32")).function(a, b, c)
    for x, y, z, got in zip(a, b, c, fused, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        near = np.float32(float(exact))
        assert abs(Fraction(float(got)) - exact) <= abs(Fraction(float(near)) - exact) * 1.0001


def test_fma_of_fp64_is_rounded_once():
    """Against Python's exact rationals, half of the sums cancelling all but the last bits."""
    rng = np.random.default_rng(3)
    a = rng.standard_normal(4000) * 2.0 ** rng.integers(-40, 40, 4000)
    b = rng.standard_normal(4000) * 2.0 ** rng.integers(-40, 40, 4000)
    c = rng.standard_normal(4000)
    c[:2000] = -(a * b)[:2000] * (1 + rng.integers(-3, 4, 2000) * 2.0**-51)
    fused = decode(("fma", "rn", "f64")).function(a, b, c)
    rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    assert fused.tolist() == [float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in rows]
    with np.errstate(all="ignore"):
        special = decode(("fma", "rn", "f64")).function(
            np.array([np.inf, np.nan, 1e200, 0.0]), np.array([2.0, 1.0, 1e200, np.inf]),
            np.array([-1.0, 1.0, 1.0, 1.0]),
        )  # fmt: skip
    assert special[0] == special[2] == np.inf
    assert np.isnan(special[[1, 3]]).all()


@pytest.mark.parametrize(
    "name",
    ["frobnicate.f32", "add.f33", "shf.x.wrap.b32", "cvt.rn.f32", "fma.rz.f64", "setp.zz.s32"],
)
def test_unknown_forms_are_refused_by_name(name):
    with pytest.raises(PtxError, match=name.split(".")[0] if "zz" not in name else "zz"):
        decode(tuple(name.split(".")))


def test_integer_division_by_zero_is_an_error():
    with pytest.raises(ZeroDivisionError):
        run("div.s32", 1, 0)


def test_bits_of_a_float_survive_a_move():
    bits = struct.unpack("<I", struct.pack("<f", -0.0))[0]
    assert run("mov.b32", bits) == 0x80000000
