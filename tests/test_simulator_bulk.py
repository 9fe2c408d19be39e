"""mbarriers and bulk copies in the simulator: known values, and each mistake beside its remedy."""

import numpy as np
import pytest
from asm import run

from kgen.simulator.device import SimulationError
from kgen.simulator.ptx import PtxError

pytestmark = pytest.mark.nvrtc

SHARED = "__shared__ alignas(16) u32 buf[128]; __shared__ u64 bar[2];\n"
READY = SHARED + "if (TID == 0) { init(bar, 1); init(bar + 1, 64); } __syncthreads();\n"
FETCH = "if (TID == 0) { arrive_expect(bar, 256); load(buf, in, 256, bar); }\n"


# ---- mbarrier ------------------------------------------------------------------------------------


def test_a_phase_ends_with_its_last_arrival():
    ran = run(
        SHARED
        + """if (TID == 0) { init(bar, 2);
        out[0] = test(bar, 0); arrive(bar); out[1] = test(bar, 0);
        arrive(bar); out[2] = test(bar, 0); out[3] = test(bar, 1);
        arrive(bar); arrive(bar); out[4] = test(bar, 0); out[5] = test(bar, 1); }""",
        threads=32,
    )
    # Parity 1 of a phase 1 that has not ended is false; of an even one it is the phase before.
    assert ran.out[:6].tolist() == [0, 0, 1, 0, 0, 1]
    assert not ran.kinds, ran.text


def test_the_phase_before_the_first_counts_as_complete():
    ran = run(SHARED + "if (TID == 0) { init(bar, 1); out[0] = test(bar, 1); }", threads=32)
    assert ran.out[0] == 1


def test_arrivals_may_count_for_several():
    ran = run(
        SHARED
        + """if (TID == 0) { init(bar, 5);
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 3;" ::"r"(at(bar)) : "memory");
        out[0] = test(bar, 0);
        asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], 2;"
                     ::"r"(at(bar)) : "memory");
        out[1] = test(bar, 0); }""",
        threads=32,
    )
    assert ran.out[:2].tolist() == [0, 1]
    assert not ran.kinds, ran.text


@pytest.mark.parametrize("form", ["test_wait", "try_wait"])
def test_a_state_names_the_phase_of_its_arrival(form):
    ran = run(
        SHARED
        + """if (TID == 0) { init(bar, 2); u64 first = arrive_token(bar); u32 before, after;
        asm volatile("{ .reg .pred p; mbarrier.FORM.shared::cta.b64 p, [%1], %2;"
          " selp.u32 %0, 1, 0, p; }" : "=r"(before) : "r"(at(bar)), "l"(first) : "memory");
        arrive(bar);
        asm volatile("{ .reg .pred p; mbarrier.FORM.shared::cta.b64 p, [%1], %2;"
          " selp.u32 %0, 1, 0, p; }" : "=r"(after) : "r"(at(bar)), "l"(first) : "memory");
        out[0] = before; out[1] = after; }""".replace("FORM", form),
        threads=32,
    )
    assert ran.out[:2].tolist() == [0, 1]
    assert not ran.kinds, ran.text


def test_bytes_hold_a_phase_back():
    ran = run(
        SHARED
        + """if (TID == 0) { init(bar, 1); expect(bar, 32); arrive(bar); out[0] = test(bar, 0);
        asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 24;"
                     ::"r"(at(bar)) : "memory");
        out[1] = test(bar, 0);
        asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 8;"
                     ::"r"(at(bar)) : "memory");
        out[2] = test(bar, 0); }""",
        threads=32,
    )
    assert ran.out[:3].tolist() == [0, 0, 1]


def test_a_thread_that_drops_out_is_not_expected_again():
    ran = run(
        SHARED
        + """if (TID == 0) { init(bar, 2); arrive(bar);
        asm volatile("mbarrier.arrive_drop.shared::cta.b64 _, [%0];" ::"r"(at(bar)) : "memory");
        out[0] = test(bar, 0); arrive(bar); out[1] = test(bar, 1); }""",
        threads=32,
    )
    assert ran.out[:2].tolist() == [1, 1]
    assert not ran.kinds, ran.text


EXCHANGE = """if (TID < 32) { work[TID] = TID + 5; arrive(bar + 1); }
else { arrive(bar + 1); WAIT out[TID] = work[TID - 32]; }"""


def test_a_wait_is_ordered_after_the_arrivals():
    ran = run(READY + EXCHANGE.replace("WAIT", "wait(bar + 1, 0);"))
    assert not ran.kinds, ran.text
    assert ran.out[32:64].tolist() == list(range(5, 37))
    assert "race in global memory" in run(READY + EXCHANGE.replace("WAIT", "")).kinds


def test_a_relaxed_arrival_orders_nothing():
    relaxed = """if (TID < 32) { work[TID] = TID;
    asm volatile("mbarrier.arrive.SEM.cta.shared::cta.b64 _, [%0];" ::"r"(at(bar+1)) : "memory"); }
    else { arrive(bar + 1); wait(bar + 1, 0); out[TID] = work[TID - 32]; }"""
    assert not run(READY + relaxed.replace("SEM", "release")).kinds
    ran = run(READY + relaxed.replace("SEM", "relaxed"))
    assert ran.kinds == {"race in global memory"}


def test_barriers_that_are_not_ready_are_found():
    unready = SHARED + "if (TID == 0) init(bar, 64); SYNC arrive(bar);"
    assert not run(unready.replace("SYNC", "__syncthreads();")).kinds
    assert run(unready.replace("SYNC", "")).kinds == {"race in shared memory"}
    assert run(SHARED + "if (TID == 0) arrive(bar);").kinds == {"mbarrier misuse"}


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("init(bar, 1);", "initialised again"),
        ("out[0] = (u32)*(volatile u64*)bar;", "an ordinary read of a live mbarrier"),
        ("*(volatile u64*)bar = 0;", "an ordinary write of a live mbarrier"),
        ("init(bar + 1, in[0]);", "a count of 0"),
    ],
)
def test_misuse_is_found(broken, words):
    inval = 'asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(at(bar)) : "memory");'
    body = SHARED + "if (TID == 0) { init(bar, 1); FIRST " + broken + " }"
    ran = run(body.replace("FIRST", ""), threads=32)
    assert "mbarrier misuse" in ran.kinds
    assert words in ran.text
    if broken.startswith(("init(bar, 1)", "*")):
        assert not run(body.replace("FIRST", inval), threads=32).kinds


def test_too_many_arrivals_are_found():
    body = (
        SHARED + "if (TID == 0) { init(bar, 2); arrive(bar);"
        'asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], N;" ::"r"(at(bar)) : "memory"); }'
    )
    assert not run(body.replace("N;", "1;"), threads=32).kinds
    assert run(body.replace("N;", "2;"), threads=32).kinds == {"mbarrier misuse"}


def test_a_hang_names_the_mbarrier():
    with pytest.raises(SimulationError, match=r"no progress.*mbarrier at shared address .*0 of 1 "
                                              r"arrivals and 16 bytes pending"):  # fmt: skip
        run(READY + FETCH.replace("(bar, 256)", "(bar, 272)") + "wait(bar, 0);")
    with pytest.raises(SimulationError, match="1 of 64 arrivals"):
        run(READY + "if (TID) arrive(bar + 1); wait(bar + 1, 0);")


# ---- Bulk copies to shared memory ----------------------------------------------------------------


def test_a_bulk_load_lands_for_those_who_wait():
    ran = run(READY + FETCH + "wait(bar, 0); out[TID] = buf[TID];")
    assert not ran.kinds, ran.text
    assert ran.out[:64].tolist() == list(range(64))


@pytest.mark.parametrize("space", ["cta", "cluster"])
@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
def test_the_newer_spelling_and_a_cache_hint_are_known(space, hint):
    ran = run(
        READY
        + """if (TID == 0) { arrive_expect(bar, 256);
        asm volatile("{ .reg .b64 policy; mov.b64 policy, 0x1000000000000000;"
          " cp.async.bulk.shared::SPACE.global.mbarrier::complete_tx::bytesHINT"
          " [%0], [%1], 256, [%2]MORE; }" ::"r"(at(buf)), "l"(in), "r"(at(bar)) : "memory"); }
        wait(bar, 0); out[TID] = buf[TID];""".replace("SPACE", space)
        .replace("HINT", hint)
        .replace("MORE", ", policy" if hint else "")
    )
    assert not ran.kinds, ran.text
    assert ran.out[:64].tolist() == list(range(64))


def test_fences_of_the_asynchronous_proxy_have_several_forms():
    body = FILL + SEND + "WAIT_READ(0); }"
    for form, enough in (("async", 1), ("async.shared::cluster", 1), ("async.global", 0)):
        fence = f'asm volatile("fence.proxy.{form};" ::: "memory")'
        ran = run(body.replace("PROXY_FENCE", fence))
        assert ran.kinds == (set() if enough else {"missing proxy fence"}), form
    ran = run(
        READY.replace("__sync", 'asm volatile("fence.mbarrier_init.release.cluster;"); __sync')
    )
    assert not ran.kinds


@pytest.mark.parametrize("waiting", ["", "wait(bar, 1);", "if (TID == 0) test(bar, 1);"])
def test_reading_before_the_phase_is_found(waiting):
    ran = run(READY + FETCH + waiting + "out[TID] = buf[TID]; __syncthreads(); wait(bar, 0);")
    assert "unfinished copy" in ran.kinds
    assert ran.out[:64].tolist() != list(range(64))  # the copy has not landed, either


def test_the_wait_of_one_warp_is_not_that_of_another():
    body = READY + FETCH + "if (TID < 32) wait(bar, 0); SYNC if (TID >= 32) out[TID] = buf[TID];"
    assert not run(body.replace("SYNC", "__syncthreads();")).kinds
    assert run(body.replace("SYNC", "")).kinds == {"race in shared memory"}


def test_copying_over_words_in_use_is_found():
    twice = (
        READY
        + FETCH
        + """wait(bar, 0); out[TID] = buf[TID]; SYNC
    if (TID == 0) { arrive_expect(bar, 256); load(buf, in + 64, 256, bar); }
    wait(bar, 1); out[TID + 64] = buf[TID];"""
    )
    for sync in ("__syncthreads();", "arrive(bar + 1); if (TID == 0) wait(bar + 1, 0);"):
        ran = run(twice.replace("SYNC", sync))
        assert not ran.kinds, ran.text
        assert ran.out[:128].tolist() == list(range(128))
    assert run(twice.replace("SYNC", "")).kinds == {"race in shared memory"}


def test_a_pipeline_of_two_stages_is_clean():
    pipeline = """__shared__ alignas(16) u32 buf[2][32]; __shared__ u64 full[2], empty[2];
    if (TID == 0) { for (int i = 0; i < 2; ++i) { init(full + i, 1); init(empty + i, 64); } }
    __syncthreads();
    if (TID >= 64) {
      if (TID == 64) for (int i = 0; i < 7; ++i) {
        EMPTY
        arrive_expect(full + i % 2, 128); load(buf[i % 2], in + 32 * i, 128, full + i % 2); }
    } else {
      u32 sum = 0;
      for (int i = 0; i < 7; ++i) {
        wait(full + i % 2, i / 2 % 2); sum += buf[i % 2][TID % 32]; arrive(empty + i % 2); }
      out[TID] = sum; }"""
    right = pipeline.replace("EMPTY", "wait(empty + i % 2, (i / 2 + 1) % 2);")
    for blocks in (1, 3):
        ran = run(right, threads=96, blocks=1 if blocks == 1 else blocks)
        found = ran.kinds - ({"race in global memory"} if blocks > 1 else set())
        assert not found, ran.text  # blocks write the same outputs
        assert ran.out[:32].tolist() == [sum(32 * i + t for i in range(7)) for t in range(32)]
    ran = run(right, threads=96, checks=False)
    assert ran.out[:32].tolist() == [sum(32 * i + t for i in range(7)) for t in range(32)]
    wrong = pipeline.replace("EMPTY", "wait(empty + i % 2, i / 2 % 2);")
    with pytest.raises(SimulationError, match="mbarrier at"):
        run(wrong, threads=96)
    with pytest.raises(SimulationError, match="mbarrier misuse: 1 arrivals, phase 0, 0 of 1"):
        run(pipeline.replace("EMPTY", ""), threads=96)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ("load(buf, in, 24, bar)", "misaligned access"),
        ("load(buf + 1, in, 32, bar)", "misaligned access"),
        ("load(buf, in + 2, 32, bar)", "misaligned access"),
        ("load(buf + 124, in, 4096, bar)", "out of bounds"),
        ("load(buf, in + 252, 32, bar)", "out of bounds"),
        ("store(out, buf, 24); COMMIT; WAIT_ALL(0)", "misaligned access"),
        ("store(out + 252, buf, 32); COMMIT; WAIT_ALL(0)", "out of bounds"),
    ],
)
def test_bad_sizes_and_addresses_are_found(call, kind):
    ran = run(READY + f"if (TID == 0) {{ {call}; }}")
    assert kind in ran.kinds, ran.text


def test_copies_nobody_waits_for_are_found():
    assert run(READY + FETCH).kinds == {"unfinished copy"}


# ---- Bulk copies to global memory ----------------------------------------------------------------

FILL = SHARED + "buf[TID] = TID * 3; PROXY_FENCE; __syncthreads();\n"
SEND = "if (TID == 0) { store(out, buf, 256); COMMIT; "


def test_a_bulk_store_writes_what_was_there():
    ran = run(FILL + SEND + "WAIT_READ(0); }")
    assert not ran.kinds, ran.text
    assert ran.out[:64].tolist() == [3 * t for t in range(64)]


def test_groups_are_waited_for_oldest_first():
    ran = run(
        FILL
        + SEND
        + """store(out + 64, buf, 256); COMMIT; WAIT_READ(1);
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], 16;" ::"l"(in)); WAIT_ALL(0); }"""
    )
    assert not ran.kinds, ran.text
    assert ran.out[64:128].tolist() == [3 * t for t in range(64)]


def test_a_missing_proxy_fence_is_found():
    for wrong in (
        FILL.replace("PROXY_FENCE; ", ""),
        FILL.replace("PROXY_FENCE; __syncthreads();", "__syncthreads(); PROXY_FENCE;"),
        FILL.replace("PROXY_FENCE;", "if (TID == 0) PROXY_FENCE;"),
    ):
        assert run(wrong + SEND + "WAIT_READ(0); }").kinds == {"missing proxy fence"}, wrong
    unordered = FILL.replace("__syncthreads();", "")
    assert "race in shared memory" in run(unordered + SEND + "WAIT_READ(0); }").kinds


def test_a_load_over_ordinary_writes_needs_the_fence_too():
    again = FILL + "if (TID == 0) init(bar, 1); __syncthreads();" + FETCH
    read = "wait(bar, 0); out[TID] = buf[TID];"
    assert not run(again + read).kinds
    assert run(again.replace("PROXY_FENCE;", "") + read).kinds == {"missing proxy fence"}


def test_overwriting_a_source_is_found():
    body = FILL + SEND + "WAIT } SYNC buf[TID] = 7;"
    right = body.replace("WAIT", "WAIT_READ(0);").replace("SYNC", "__syncthreads();")
    assert not run(right).kinds
    for wait, sync in (("", "__syncthreads();"), ("WAIT_READ(1);", "__syncthreads();")):
        ran = run(body.replace("WAIT", wait).replace("SYNC", sync))
        assert "race in shared memory" in ran.kinds
        assert 7 in ran.out[:64]
    unordered = run(right.replace("__syncthreads(); buf[TID] = 7", "buf[TID] = 7"))
    assert "race in shared memory" in unordered.kinds


def test_the_target_is_complete_only_after_the_whole_wait():
    body = FILL + SEND + "WAIT } __syncthreads(); if (TID >= 32) work[TID] = out[TID];"
    assert not run(body.replace("WAIT", "WAIT_ALL(0);")).kinds
    assert run(body.replace("WAIT", "WAIT_READ(0);")).kinds == {"race in global memory"}


def test_a_store_that_outlives_its_block_is_found():
    assert run(FILL + SEND + "}").kinds == {"unfinished copy"}
    assert run(FILL + "if (TID == 0) { store(out, buf, 256); WAIT_ALL(0); }").kinds == {
        "unfinished copy"
    }


@pytest.mark.parametrize(
    "text",
    [
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], 16;",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%1], 1, [%1];",
        "{ .reg .b32 t; mapa.shared::cluster.u32 t, %1, 0; }",
        "barrier.cluster.arrive;",
    ],
)
def test_other_forms_are_refused_by_name(text):
    with pytest.raises(PtxError, match="unknown"):
        run(SHARED + f'asm volatile("{text}" ::"l"(out), "r"(at(buf)) : "memory");')


def test_many_blocks_keep_their_barriers_apart():
    ran = run(
        READY
        + """if (TID == 0) { arrive_expect(bar, 256); load(buf, in + 64 * (BLOCK % 2), 256, bar); }
        wait(bar, 0); if (TID < 16) out[16 * BLOCK + TID] = buf[TID];""",
        blocks=16,
    )
    assert not ran.kinds, ran.text
    expected = np.arange(16) + 64 * (np.arange(16)[:, None] % 2)
    assert ran.out.reshape(16, 16).tolist() == expected.tolist()


def test_consumers_meet_before_one_of_them_hands_a_buffer_back():
    body = """__shared__ alignas(16) u32 buf[2][64]; __shared__ u64 full[2], empty[2];
    if (TID == 0) for (int i = 0; i < 2; ++i) { init(full + i, 1); init(empty + i, 2); }
    __syncthreads();
    if (TID < 32) { if (TID == 0) for (int i = 0; i < 6; ++i) {
        wait(empty + i % 2, (i / 2 + 1) % 2);
        arrive_expect(full + i % 2, 256); load(buf[i % 2], in + 64 * (i % 3), 256, full + i % 2); }
    } else { u32 sum = 0, group = (TID - 32) / 64;
      for (int i = 0; i < 6; ++i) {
        wait(full + i % 2, i / 2 % 2); sum += buf[i % 2][TID % 64]; MEET
        if (TID % 64 == 32) arrive(empty + i % 2); }
      if (BLOCK == 4) out[TID - 32] = sum; }"""
    meet = 'asm volatile("bar.sync %0, 64;" ::"r"(1 + group) : "memory");'
    ran = run(body.replace("MEET", meet), threads=160, blocks=5)
    assert not ran.kinds, ran.text
    assert ran.out[:128].tolist() == [2 * (3 * (t % 64) + 192) for t in range(32, 160)]
    ran = run(body.replace("MEET", ""), threads=160, blocks=5)
    assert ran.kinds == {"race in shared memory"}
