"""The simulator's parser, scheduler, memory and counts, on small kernels."""

from __future__ import annotations

import numpy as np
import pytest

from kgen.simulator.device import Device, Options, SimulationError
from kgen.simulator.ptx import Address, Immediate, PtxError, Register, Special, Vector, parse

HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n"


def ptx(body, parameters=2, head="", registers=""):
    """A kernel `k` of u64 parameters around a body of instructions."""
    listed = ",\n".join(f".param .u64 k_param_{index}" for index in range(parameters))
    declared = ".reg .pred %p<9>;\n.reg .b32 %r<40>;\n.reg .f32 %f<9>;\n.reg .b64 %rd<20>;\n"
    return (
        f"{HEAD}{head}.visible .entry k(\n{listed}\n)\n{{\n{declared}{registers}{body}\nret;\n}}\n"
    )


THREAD = """mov.u32 %r1, %tid.x;
mov.u32 %r2, %ctaid.x;
mov.u32 %r3, %ntid.x;
mad.lo.s32 %r4, %r2, %r3, %r1;
"""
STORE = """ld.param.u64 %rd1, [k_param_0];
mul.wide.u32 %rd2, %r4, 4;
add.s64 %rd3, %rd1, %rd2;
st.global.u32 [%rd3], %r10;
"""


def run(text, blocks=2, threads=64, size=None, inputs=(), smem=0, options=None, role="output"):
    """Launch `k` on an output of one word a thread and the given inputs."""
    device = Device(text, options)
    out = device.memory.allocate("out", 4 * (size or blocks * threads), role)
    given = [device.memory.allocate(f"in{n}", one.nbytes, "input", one)
             for n, one in enumerate(inputs)]  # fmt: skip
    count = len(device.module.kernels["k"].parameters)
    addresses = [out.base, *(one.base for one in given)]
    addresses += [0] * (count - len(addresses))
    device.launch("k", blocks, threads, smem, addresses)
    return out.view(np.uint32).copy(), device


# ---- Parser -----------------------------------------------------------------------------------


def test_operands_are_read():
    module = parse(ptx("@!%p1 ld.global.v2.f32 {%f1, %f2}, [%rd1+-8];\nmov.f32 %f3, 0f3F800000;\n"
                       "mov.u32 %r1, %tid.x;\nadd.s32 %r2, %r1, -5;"))  # fmt: skip
    load, move, special, add, end = module.kernels["k"].code
    assert load.predicate == Register("%p1", negated=True)
    assert load.operands == (
        Vector((Register("%f1"), Register("%f2"))),
        Address(Register("%rd1"), -8),
    )
    assert move.operands[1] == Immediate(0x3F800000, 32)
    assert special.operands[1] == Special("%tid.x")
    assert add.operands[2] == Immediate(-5)
    assert end.name == "ret"
    assert (module.version, module.target) == ("9.0", "sm_90a")


def test_variables_labels_and_source_lines_are_read():
    text = ptx("// comment\n.loc 1 42 3\n$L__BB0_1:\nbra $L__BB0_1;",
               head=".global .align 4 .u32 kConst = 7;\n"
                    ".extern .shared .align 16 .b8 smem[];\n")  # fmt: skip
    module = parse(text)
    kernel = module.kernels["k"]
    assert kernel.labels == {"$L__BB0_1": 0}
    assert kernel.code[0].source_line == 42
    assert module.variables["kConst"].data == (7).to_bytes(4, "little")
    assert module.variables["smem"].dynamic
    assert text.splitlines()[kernel.code[0].line - 1].startswith("bra")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("frob.b32 %r1, %r2;", "unknown opcode frob"),
        ("add.s32 %r1, %r2;", "sources"),
        ("bra nowhere;", "branch target"),
        ("ld.global.v3.f32 {%f1, %f2, %f3}, [%rd1];", "v3"),
        ("mov.u32 %r1, %smid;", "smid"),
        ("mov.u32 %zz1, %tid.x;", "undeclared register"),
        (".weird directive;", "unknown directive"),
        ("ld.param.u64 %rd1, [nothing];", "nothing"),
    ],
)
def test_what_is_not_known_is_named_and_never_guessed(body, words):
    with pytest.raises((PtxError, KeyError), match=words):
        run(ptx(body))


def test_unknown_opcodes_name_their_line():
    text = ptx(f"{THREAD}frob.b32 %r1, %r2;")
    line = next(n for n, one in enumerate(text.splitlines(), 1) if one.startswith("frob"))
    with pytest.raises(PtxError, match=f"PTX line {line}: unknown opcode frob.b32"):
        run(text)


# ---- Running ----------------------------------------------------------------------------------


def test_every_thread_has_its_own_numbers():
    out, device = run(ptx(f"{THREAD}mov.u32 %r10, %r4;\n{STORE}"), blocks=3)
    np.testing.assert_array_equal(out, np.arange(3 * 64))
    assert not device.findings


def test_divergent_branches_come_together_again():
    body = f"""{THREAD}and.b32 %r5, %r1, 1;
setp.eq.s32 %p1, %r5, 0;
@%p1 bra $even;
mov.u32 %r10, 100;
bra $end;
$even:
mov.u32 %r10, 200;
$end:
add.s32 %r10, %r10, %r4;
bar.sync 0;
{STORE}"""
    out, device = run(ptx(body))
    threads = np.arange(128)
    np.testing.assert_array_equal(out, np.where(threads % 2 == 0, 200, 100) + threads)
    assert not device.findings  # the barrier is met by whole warps


def test_loops_of_different_length_end_together():
    body = f"""{THREAD}mov.u32 %r10, 0;
mov.u32 %r6, 0;
$loop:
add.s32 %r10, %r10, %r6;
add.s32 %r6, %r6, 1;
setp.le.u32 %p1, %r6, %r1;
@%p1 bra $loop;
{STORE}"""
    out, _ = run(ptx(body), blocks=1)
    np.testing.assert_array_equal(out, [sum(range(thread + 1)) for thread in range(64)])


def test_predicated_instructions_act_on_their_threads_alone():
    body = f"""{THREAD}mov.u32 %r10, 1;
mov.u32 %r11, %r10;
setp.lt.u32 %p1, %r1, 10;
@%p1 mov.u32 %r10, 2;
add.s32 %r10, %r10, %r11;
{STORE}"""
    out, _ = run(ptx(body), blocks=1)
    np.testing.assert_array_equal(out, np.where(np.arange(64) < 10, 3, 2))


def test_shared_memory_belongs_to_its_block():
    body = f"""{THREAD}mov.u64 %rd5, shared;
mul.wide.u32 %rd6, %r1, 4;
add.s64 %rd7, %rd5, %rd6;
add.s32 %r9, %r4, 1000;
st.shared.u32 [%rd7], %r9;
bar.sync 0;
xor.b32 %r8, %r1, 63;
mul.wide.u32 %rd8, %r8, 4;
add.s64 %rd9, %rd5, %rd8;
ld.shared.u32 %r10, [%rd9];
{STORE}"""
    text = ptx(body, head=".shared .align 4 .b8 shared[256];\n")
    out, device = run(text, blocks=3)
    expected = 1000 + np.arange(192).reshape(3, 64)[:, ::-1].reshape(-1)
    np.testing.assert_array_equal(out, expected)
    assert not device.findings
    _, broken = run(text.replace("bar.sync 0;\n", ""), blocks=3)
    assert [one.kind for one in broken.findings.all()] == ["race in shared memory"]


def test_a_hang_is_reported_with_where_it_hangs():
    with pytest.raises(SimulationError, match=r"no progress.*block 0 thread 0"):
        run(ptx(f"{THREAD}$spin:\nbra $spin;"))


def test_a_barrier_that_cannot_be_met_is_a_deadlock():
    body = f"""{THREAD}setp.lt.u32 %p1, %r1, 32;
@%p1 bra $some;
bar.sync 1;
bra $end;
$some:
bar.sync 2;
$end:
mov.u32 %r10, 0;
{STORE}"""
    with pytest.raises(SimulationError, match=r"deadlock.*barrier 1.*barrier 2"):
        run(ptx(body), blocks=1)


# ---- Checks on memory -------------------------------------------------------------------------


def kinds(device):
    return [one.kind for one in device.findings.all()]


def test_bounds_alignment_and_initialisation():
    ok = ptx(f"{THREAD}mov.u32 %r10, 5;\n{STORE}")
    assert kinds(run(ok)[1]) == []
    assert kinds(run(ok, size=100)[1]) == ["out of bounds"]
    odd = ok.replace("st.global.u32 [%rd3]", "st.global.u32 [%rd3+2]")
    assert kinds(run(odd)[1]) == ["misaligned access"]
    wide = ok.replace("st.global.u32 [%rd3], %r10;", "st.global.v2.u32 [%rd3], {%r10, %r10};")
    assert "misaligned access" in kinds(run(wide)[1])
    reads = ptx(
        f"{THREAD}{STORE.replace('st.global.u32 [%rd3], %r10', 'ld.global.u32 %r10, [%rd3]')}"
    )
    assert kinds(run(reads)[1]) == ["uninitialised read"]


def test_the_word_out_of_bounds_is_named_in_terms_of_its_tensor():
    _, device = run(ptx(f"{THREAD}mov.u32 %r10, 5;\n{STORE}"), size=100)
    assert "at byte 400 of out, which has 400" in str(device.findings.all()[0])


def test_two_threads_that_write_one_word_race():
    one = ptx(f"{THREAD}mov.u32 %r10, 5;\nmov.u32 %r4, 0;\n{STORE}")
    assert "race in global memory" in kinds(run(one)[1])


def test_an_output_written_twice_is_found():
    twice = ptx(f"{THREAD}mov.u32 %r10, 5;\n{STORE}st.global.u32 [%rd3], %r10;")
    assert kinds(run(twice)[1]) == ["output written twice"]
    assert kinds(run(twice, role="workspace")[1]) == []


def test_checks_can_be_turned_off_but_bounds_stay():
    twice = ptx(f"{THREAD}mov.u32 %r10, 5;\n{STORE}st.global.u32 [%rd3], %r10;")
    assert kinds(run(twice, options=Options(checks=False))[1]) == []
    assert set(kinds(run(twice, size=100, options=Options(checks=False))[1])) == {"out of bounds"}


# ---- Warp-wide instructions -------------------------------------------------------------------

LANE = np.arange(64) % 32


@pytest.mark.parametrize(
    ("form", "by", "clamp", "source"),
    [
        ("down", 3, 31, np.where(LANE + 3 > 31, LANE, LANE + 3)),
        ("up", 2, 0, np.where(LANE - 2 < 0, LANE, LANE - 2)),
        ("bfly", 5, 31, LANE ^ 5),
        ("idx", 7, 31, np.full(64, 7)),
        ("bfly", 1, (24 << 8) | 31, LANE ^ 1),  # segments of 8
        ("down", 3, (24 << 8) | 31, np.where(LANE % 8 + 3 > 7, LANE, LANE + 3)),
    ],
)
def test_shfl(form, by, clamp, source):
    body = f"{THREAD}shfl.sync.{form}.b32 %r10|%p1, %r4, {by}, {clamp}, -1;\n{STORE}"
    out, device = run(ptx(body), blocks=1)
    np.testing.assert_array_equal(out, source + np.arange(64) // 32 * 32)
    assert not device.findings


@pytest.mark.parametrize(
    ("form", "wanted"),
    [("all", [0, 1]), ("any", [1, 1]), ("uni", [0, 1])],
)
def test_vote(form, wanted):
    """The predicate is thread >= 16: mixed in the first warp, true in the second."""
    body = f"""{THREAD}setp.ge.u32 %p1, %r1, 16;
vote.sync.{form}.pred %p2, %p1, -1;
selp.u32 %r10, 1, 0, %p2;
{STORE}"""
    out, _ = run(ptx(body), blocks=1)
    np.testing.assert_array_equal(out, np.repeat(wanted, 32))


def test_ballot_activemask_and_redux():
    ballot = f"{THREAD}setp.ge.u32 %p1, %r1, 16;\nvote.sync.ballot.b32 %r10, %p1, -1;\n{STORE}"
    out, _ = run(ptx(ballot), blocks=1)
    np.testing.assert_array_equal(out, np.repeat([0xFFFF0000, 0xFFFFFFFF], 32))
    mask = f"""{THREAD}mov.u32 %r10, 0;
setp.ge.u32 %p1, %r1, 16;
@%p1 activemask.b32 %r10;
{STORE}"""
    out, _ = run(ptx(mask), blocks=1)
    np.testing.assert_array_equal(out, np.repeat([0, 0xFFFF0000, 0xFFFFFFFF], [16, 16, 32]))
    for form, function in (("add.u32", np.sum), ("max.u32", np.max), ("min.s32", np.min)):
        body = f"{THREAD}redux.sync.{form} %r10, %r4, -1;\n{STORE}"
        out, _ = run(ptx(body), blocks=1)
        wanted = [function(np.arange(64).reshape(2, 32)[warp]) for warp in (0, 1)]
        np.testing.assert_array_equal(out, np.repeat(wanted, 32))


def test_a_mask_that_names_absent_lanes_is_reported():
    body = f"""{THREAD}mov.u32 %r10, 0;
setp.ge.u32 %p1, %r1, 16;
@%p1 shfl.sync.bfly.b32 %r10|%p2, %r4, 1, 31, -1;
{STORE}"""
    assert "divergent warp instruction" in kinds(run(ptx(body), blocks=1)[1])


# ---- Atomics ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "start", "wanted"),
    [("add.u32", 5, 5 + 64), ("max.u32", 5, 5), ("exch.b32", 5, 1), ("inc.u32", 0, 0)],
)
def test_atomics_act_thread_by_thread(form, start, wanted):
    body = f"""{THREAD}ld.param.u64 %rd5, [k_param_1];
mov.u32 %r8, 1;
atom.global.{form} %r10, [%rd5], %r8;
{STORE}"""
    counter = np.array([start], np.uint32)
    device = Device(ptx(body))
    out = device.memory.allocate("out", 256, "output")
    memory = device.memory.allocate("counter", 4, "workspace", counter)
    device.launch("k", 1, 64, 0, [out.base, memory.base])
    assert memory.words[0] == wanted
    if form == "add.u32":
        np.testing.assert_array_equal(out.words, start + np.arange(64))


# ---- Counts and trace -------------------------------------------------------------------------


def test_counts_are_exact_and_equal_on_every_run():
    body = f"{THREAD}mov.u32 %r10, 5;\n{STORE}"
    first = run(ptx(body), options=Options(measure=True))[1].counts["k"].values
    again = run(ptx(body), options=Options(measure=True))[1].counts["k"].values
    assert first == again
    assert first["store"] == 128
    assert first["bytes stored to global"] == 512
    assert first["sectors stored to global"] == 16
    assert first["partial sectors stored to global"] == 0


@pytest.mark.parametrize(("stride", "conflicts"), [(1, 0), (2, 1), (32, 31), (33, 0), (0, 0)])
def test_bank_conflicts(stride, conflicts):
    """A warp that stores words `stride` apart needs that many extra wavefronts."""
    body = f"""{THREAD}mov.u64 %rd5, shared;
mul.lo.s32 %r7, %r1, {stride};
mul.wide.u32 %rd6, %r7, 4;
add.s64 %rd7, %rd5, %rd6;
ld.shared.u32 %r10, [%rd7];
{STORE}"""
    text = ptx(body, head=".shared .align 4 .b8 shared[8192];\n")
    _, device = run(text, blocks=1, threads=32, options=Options(checks=False, measure=True))
    assert device.counts["k"].values["bank conflicts loaded from shared"] == conflicts


def test_partial_sectors_are_counted():
    body = f"{THREAD}mov.u32 %r10, 5;\nadd.s32 %r4, %r4, 1;\n{STORE}"
    _, device = run(ptx(body), blocks=1, threads=32, size=64, options=Options(measure=True))
    counts = device.counts["k"].values
    assert counts["sectors stored to global"] == 5
    assert counts["partial sectors stored to global"] == 2


def test_trace_shows_one_threads_instructions():
    body = f"{THREAD}mov.u32 %r10, %r4;\n{STORE}"
    _, device = run(ptx(body), options=Options(trace=(1, 3)))
    text = "\n".join(device.traced)
    assert "mov.u32 %r1, %tid.x -> 0x3" in text.replace("  ", " ").replace("  ", " ")
    assert "0x43" in text  # 1 * 64 + 3


@pytest.mark.parametrize("trace", [(1, 64), (5, 0)])
def test_a_thread_that_no_block_has_is_not_traced(trace):
    body = f"{THREAD}mov.u32 %r10, %r4;\n{STORE}"
    _, device = run(ptx(body), options=Options(trace=trace))
    assert device.traced == []


def test_local_memory_belongs_to_its_thread():
    """Written by its number, read back through a generic address; nothing else sees it."""
    body = f"""{THREAD}mov.u64 %rd4, depot;
cvta.local.u64 %rd5, %rd4;
st.local.u32 [%rd4+4], %r4;
add.s32 %r9, %r4, 7;
st.u32 [%rd5+8], %r9;
bar.sync 0;
ld.u32 %r7, [%rd5+4];
ld.local.u32 %r8, [%rd4+8];
sub.s32 %r6, %r8, %r7;
shl.b32 %r5, %r6, 16;
add.s32 %r10, %r5, %r7;
{STORE}"""
    text = ptx(body, registers=".local .align 4 .b8 depot[16];\n")
    out, device = run(text)
    np.testing.assert_array_equal(out, (7 << 16) + np.arange(128))
    assert not device.findings
    assert kinds(run(text.replace("[%rd4+8]", "[%rd4+12]"))[1]) == ["uninitialised read"]
    assert kinds(run(text.replace("[%rd5+8]", "[%rd5+16]"))[1])[0] == "out of bounds"


def test_lanes_of_a_warp_need_a_warp_sync_between_write_and_read():
    body = f"""{THREAD}mov.u64 %rd5, shared;
mul.wide.u32 %rd6, %r1, 4;
add.s64 %rd7, %rd5, %rd6;
st.shared.u32 [%rd7], %r4;
bar.warp.sync -1;
xor.b32 %r8, %r1, 1;
mul.wide.u32 %rd8, %r8, 4;
add.s64 %rd9, %rd5, %rd8;
ld.shared.u32 %r10, [%rd9];
{STORE}"""
    text = ptx(body, head=".shared .align 4 .b8 shared[256];\n")
    out, device = run(text)
    np.testing.assert_array_equal(out, np.arange(128) ^ 1)
    assert not device.findings
    _, broken = run(text.replace("bar.warp.sync -1;\n", ""))
    assert kinds(broken) == ["race in shared memory"]


@pytest.mark.parametrize(
    ("form", "start", "wanted"),
    [("add.u32", 5, 5 + 64 * 3), ("max.s32", 5, 5), ("min.u32", 5, 3), ("or.b32", 4, 7),
     ("and.b32", 6, 2), ("xor.b32", 1, 1)],
)  # fmt: skip
def test_red_acts_thread_by_thread_and_returns_nothing(form, start, wanted):
    """64 threads with the operand 3."""
    body = f"ld.param.u64 %rd5, [k_param_0];\nmov.u32 %r8, 3;\nred.global.{form} [%rd5], %r8;"
    device = Device(ptx(body, parameters=1))
    memory = device.memory.allocate("counter", 4, "workspace", np.array([start], np.uint32))
    device.launch("k", 1, 64, 0, [memory.base])
    assert memory.words[0] == wanted
    assert not device.findings


def test_red_adds_floats_in_the_order_of_the_threads():
    body = """ld.param.u64 %rd5, [k_param_0];
mov.f32 %f1, 0f3E800000;
red.global.add.f32 [%rd5], %f1;"""
    device = Device(ptx(body, parameters=1))
    memory = device.memory.allocate("sum", 4, "workspace", np.array([1.0], np.float32))
    device.launch("k", 1, 64, 0, [memory.base])
    assert memory.view(np.float32)[0] == 1.0 + 64 * 0.25


@pytest.mark.parametrize("base", ["%r8", "%rd5"])
def test_a_word_just_below_shared_memory_is_out_of_bounds(base):
    """The address wraps past zero, whichever width it is computed in."""
    body = f"""{THREAD}mov.u64 %rd4, shared;
mul.wide.u32 %rd6, %r1, 4;
add.s64 %rd5, %rd4, %rd6;
cvt.u32.u64 %r8, %rd5;
st.shared.u32 [%rd5], %r4;
ld.shared.u32 %r10, [{base}+-4];
{STORE}"""
    _, device = run(ptx(body, head=".shared .align 4 .b8 shared[256];\n"), blocks=1)
    assert kinds(device) == ["out of bounds", "race in shared memory"]


def test_a_short_address_wraps_to_where_it_belongs():
    body = f"""{THREAD}mov.u32 %r8, -16;
shl.b32 %r9, %r1, 2;
add.s32 %r8, %r8, %r9;
st.shared.u32 [%r8+16], %r4;
ld.shared.u32 %r10, [%r8+16];
{STORE}"""
    out, device = run(ptx(body), blocks=1, smem=256)
    np.testing.assert_array_equal(out, np.arange(64))
    assert not device.findings


def test_a_generic_address_below_zero_is_out_of_bounds():
    body = f"{THREAD}mov.u64 %rd5, -8;\nld.u32 %r10, [%rd5];\n{STORE}"
    assert kinds(run(ptx(body))[1]) == ["out of bounds"]


@pytest.mark.parametrize(("kind", "size"), [("s8", 1), ("s16", 2), ("u8", 1), ("u16", 2)])
@pytest.mark.parametrize("register", ["%r10", "%rs1"])
def test_narrow_loads_extend_to_the_register(kind, size, register):
    values = (np.arange(64) - 5).astype(f"{'i' if kind[0] == 's' else 'u'}{size}")
    end = "" if register == "%r10" else f"cvt.{kind[0]}32.{kind[0]}16 %r10, %rs1;\n"
    body = f"""{THREAD}ld.param.u64 %rd5, [k_param_1];
mul.wide.u32 %rd6, %r4, {size};
add.s64 %rd7, %rd5, %rd6;
ld.global.{kind} {register}, [%rd7];
{end}{STORE}"""
    text = ptx(body, registers=".reg .b16 %rs<4>;\n")
    out, _ = run(text, blocks=1, inputs=[values])
    np.testing.assert_array_equal(out.view(np.int32), values.astype(np.int32))


def test_both_halves_of_a_wide_word_are_checked():
    body = f"""{THREAD}mov.u64 %rd4, shared;
mul.wide.u32 %rd6, %r1, 8;
add.s64 %rd5, %rd4, %rd6;
st.shared.b32 [%rd5], %r4;
ld.shared.b64 %rd7, [%rd5];
cvt.u32.u64 %r10, %rd7;
{STORE}"""
    text = ptx(body, head=".shared .align 8 .b8 shared[512];\n")
    assert kinds(run(text, blocks=1)[1]) == ["uninitialised read"]
    race = text.replace("st.shared.b32 [%rd5], %r4", "st.shared.b64 [%rd5], %rd6")
    other = """xor.b32 %r8, %r1, 32;
mul.wide.u32 %rd8, %r8, 8;
add.s64 %rd9, %rd4, %rd8;
ld.shared.u32 %r10, [%rd9+4];"""
    race = race.replace("cvt.u32.u64 %r10, %rd7;", other)
    assert kinds(run(race, blocks=1)[1]) == ["race in shared memory"]


def test_what_only_some_threads_have_set_is_undefined_in_the_others():
    body = f"""{THREAD}{{
.reg .b32 q;
setp.ge.u32 %p1, %r1, 32;
@%p1 mov.u32 q, 7;
mov.u32 %r10, q;
}}
{STORE}"""
    out, _ = run(ptx(body), blocks=1)
    np.testing.assert_array_equal(out, np.repeat([0x7FC5A5A5, 7], 32))
    nowhere, _ = run(ptx(body.replace("@%p1 mov.u32 q, 7;", "")), blocks=1)
    assert set(nowhere.tolist()) == {0x7FC5A5A5}


def test_division_by_zero_ends_the_run_with_its_line():
    body = f"{THREAD}div.u32 %r10, %r4, %r1;\n{STORE}"
    with pytest.raises(SimulationError, match=r"division by zero, PTX line \d+"):
        run(ptx(body))


def test_an_endless_loop_that_diverges_counts_as_hung(monkeypatch):
    monkeypatch.setattr("kgen.simulator.schedule._MOST_STEPS", 5000)
    body = f"""{THREAD}and.b32 %r5, %r1, 1;
setp.eq.u32 %p1, %r5, 0;
AGAIN:
@%p1 bra EVEN;
add.s32 %r6, %r6, 1;
EVEN:
bra AGAIN;
{STORE}"""
    with pytest.raises(SimulationError, match="no progress"):
        run(ptx(body))


def test_an_fp64_zero_is_a_literal():
    body = f"""{THREAD}cvt.rn.f64.u32 %fd1, %r1;
setp.eq.f64 %p1, %fd1, 0d0000000000000000;
selp.b32 %r10, 1, 0, %p1;
{STORE}"""
    out, _ = run(ptx(body, registers=".reg .f64 %fd<4>;\n"), blocks=1)
    assert np.flatnonzero(out).tolist() == [0]


@pytest.mark.parametrize(
    "body",
    ["mov.u32 %r5, %smid;", "mov.u32 %r5, %nothing;", "mad.hi.sat.s32 %r5, %r5, %r5, %r5;",
     "red.global.add.noftz.f16x2 [%rd5], %r5;", "ld.global.b128 %rd5, [%rd6];",
     "cp.async.cg.shared.global.L2::cache_hint [%r5], [%rd5], 16, %rd6;"],
)  # fmt: skip
def test_forms_are_refused_before_anything_runs(body):
    with pytest.raises(PtxError, match=r"PTX line \d+: .* in `"):
        run(ptx(body))


def test_a_wide_atomic_in_a_tensor_of_odd_length():
    body = "ld.param.u64 %rd5, [k_param_0];\nmov.u64 %rd6, 3;\nred.global.add.u64 [%rd5], %rd6;"
    device = Device(ptx(body, parameters=1))
    memory = device.memory.allocate("sum", 12, "workspace", np.zeros(3, np.uint32))
    device.launch("k", 1, 64, 0, [memory.base])
    assert memory.words.tolist() == [192, 0, 0]


@pytest.mark.parametrize(
    ("form", "wanted"),
    [("popc.u32", [48, 64]), ("and.pred", [0, 1]), ("or.pred", [1, 1])],
)
def test_a_barrier_may_reduce_a_predicate_over_its_block(form, wanted):
    """True for threads of 16 and more in the first block, for all in the second."""
    target, after = ("%r10", "") if "u32" in form else ("%p2", "selp.u32 %r10, 1, 0, %p2;\n")
    body = f"{THREAD}setp.ge.u32 %p1, %r4, 16;\nbar.red.{form} {target}, 0, %p1;\n{after}{STORE}"
    out, device = run(ptx(body))
    np.testing.assert_array_equal(out, np.repeat(wanted, 64))
    assert not device.findings


def test_a_reducing_barrier_orders_as_any_other():
    body = f"""{THREAD}mov.u64 %rd5, shared;
mul.wide.u32 %rd6, %r1, 4;
add.s64 %rd7, %rd5, %rd6;
st.shared.u32 [%rd7], %r4;
setp.eq.u32 %p1, %r1, 0;
barrier.cta.red.popc.aligned.u32 %r9, 0, %p1;
xor.b32 %r8, %r1, 63;
mul.wide.u32 %rd8, %r8, 4;
add.s64 %rd9, %rd5, %rd8;
ld.shared.u32 %r10, [%rd9];
{STORE}"""
    out, device = run(ptx(body, head=".shared .align 4 .b8 shared[256];\n"))
    np.testing.assert_array_equal(out, np.arange(128) ^ 63)
    assert not device.findings


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("eq", 1 << LANE),
        ("lt", (1 << LANE) - 1),
        ("le", (2 << LANE) - 1),
        ("gt", 0xFFFFFFFF & ~((2 << LANE) - 1)),
        ("ge", 0xFFFFFFFF & ~((1 << LANE) - 1)),
    ],
)
def test_lane_masks(name, wanted):
    out, _ = run(ptx(f"{THREAD}mov.u32 %r10, %lanemask_{name};\n{STORE}"), blocks=1)
    np.testing.assert_array_equal(out, wanted)
