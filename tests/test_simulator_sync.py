"""Order between blocks and warps: releases, acquires, fences, named barriers, hangs."""

import pytest
from asm import run

from kgen.simulator.device import SimulationError

pytestmark = pytest.mark.nvrtc

RACE = {"race in global memory"}

# Block 0 hands 64 words to block 1: `PUBLISH` and `WAIT` are what each test varies.
HANDOVER = """if (BLOCK == 0) {
  work[TID] = TID + 100; __syncthreads();
  if (TID == 0) { PUBLISH }
} else {
  if (TID == 0) { WAIT }
  __syncthreads(); out[TID] = work[TID];
}"""
SIGNAL = {
    "release": "st_release(work + 128, 1);",
    "release atomic": "red_release(work + 128, 1);",
    "acquire-release exchange": 'u32 old; asm volatile("atom.acq_rel.gpu.global.exch.b32 %0, [%1],'
    ' 1;" : "=r"(old) : "l"(work + 128) : "memory");',
    "fence and relaxed": "__threadfence(); st_relaxed(work + 128, 1);",
    "fence and volatile": "__threadfence(); *(volatile u32*)(work + 128) = 1;",
    "fence and atomic": "__threadfence(); atomicAdd(work + 128, 1);",
    "system fence": "__threadfence_system(); st_relaxed(work + 128, 1);",
    "sequential fence": 'asm volatile("fence.sc.gpu;" ::: "memory"); st_relaxed(work + 128, 1);',
}
NO_SIGNAL = {
    "relaxed": "st_relaxed(work + 128, 1);",
    "volatile": "*(volatile u32*)(work + 128) = 1;",
    "atomic": "atomicAdd(work + 128, 1);",
    "fence afterwards": "st_relaxed(work + 128, 1); __threadfence();",
    "fence of the block": "__threadfence_block(); st_relaxed(work + 128, 1);",
    "release of the block": 'asm volatile("st.release.cta.global.u32 [%0], 1;" ::"l"(work + 128) :'
    ' "memory");',
}
SEE = {
    "acquire": "while (!ld_acquire(work + 128));",
    "relaxed and fence": "while (!ld_relaxed(work + 128)); __threadfence();",
    "volatile and fence": "while (!*(volatile u32*)(work + 128)); __threadfence();",
    "atomic and fence": "while (!atomicAdd(work + 128, 0)); __threadfence();",
    "acquiring swap": 'u32 v; do { asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], 1, 1;"'
    ' : "=r"(v) : "l"(work + 128) : "memory"); } while (!v);',
}
NOT_SEE = {
    "relaxed": "while (!ld_relaxed(work + 128));",
    "volatile": "while (!*(volatile u32*)(work + 128));",
    "atomic": "while (!atomicAdd(work + 128, 0));",
    "fence first": "__threadfence(); while (!ld_relaxed(work + 128));",
    "acquire of the block": 'u32 v; do { asm volatile("ld.acquire.cta.global.u32 %0, [%1];"'
    ' : "=r"(v) : "l"(work + 128) : "memory"); } while (!v);',
}


def handover(publish: str, wait: str, **options):
    body = HANDOVER.replace("PUBLISH", publish).replace("WAIT", wait)
    return run(body, **{"blocks": 2, "cooperative": True} | options)


@pytest.mark.parametrize("publish", SIGNAL)
def test_what_releases_orders(publish):
    ran = handover(SIGNAL[publish], SEE["acquire"])
    assert not ran.kinds, ran.text
    assert ran.out[:64].tolist() == list(range(100, 164))


@pytest.mark.parametrize("publish", NO_SIGNAL)
def test_what_does_not_release_does_not_order(publish):
    assert handover(NO_SIGNAL[publish], SEE["acquire"]).kinds == RACE


@pytest.mark.parametrize("wait", SEE)
def test_what_acquires_orders(wait):
    ran = handover(SIGNAL["release"], SEE[wait])
    assert not ran.kinds, ran.text
    assert ran.out[:64].tolist() == list(range(100, 164))


@pytest.mark.parametrize("wait", NOT_SEE)
def test_what_does_not_acquire_does_not_order(wait):
    assert handover(SIGNAL["release"], NOT_SEE[wait]).kinds == RACE


def test_fences_on_both_sides_order():
    ran = handover(SIGNAL["fence and volatile"], SEE["volatile and fence"])
    assert not ran.kinds, ran.text


def test_an_ordinary_flag_is_a_race_itself():
    ran = handover("__threadfence(); work[128] = 1;", SEE["acquire"])
    assert ran.kinds == RACE


@pytest.mark.parametrize(
    ("barrier", "where"),
    [("__syncthreads();\n  if", "publisher"), ("__syncthreads(); out", "reader")],
)
def test_the_barrier_around_the_signal_matters(barrier, where):
    body = HANDOVER.replace("PUBLISH", SIGNAL["release"]).replace("WAIT", SEE["acquire"])
    assert barrier in body
    ran = run(body.replace(barrier, barrier.replace("__syncthreads();", "")), blocks=2,
              cooperative=True)  # fmt: skip
    assert ran.kinds == RACE, where


def test_atomics_pass_on_what_they_find():
    chain = """if (BLOCK < 3) { work[64 * BLOCK + TID] = TID; __syncthreads();
      if (TID == 0) { FIRST }
    } else { if (TID == 0) while (ld_acquire(work + 200) != 3);
      __syncthreads(); out[TID] = work[TID] + work[64 + TID] + work[128 + TID]; }"""
    ran = run(chain.replace("FIRST", "red_release(work + 200, 1);"), blocks=4, cooperative=True)
    assert not ran.kinds, ran.text
    assert ran.out[:64].tolist() == [3 * t for t in range(64)]
    one = "if (BLOCK == 1) atomicAdd(work + 200, 1); else red_release(work + 200, 1);"
    assert run(chain.replace("FIRST", one), blocks=4, cooperative=True).kinds == RACE


GRID_SYNC = """for (u32 round = 1; round < 4; ++round) {
  work[64 * BLOCK + TID] = round * 1000 + 64 * BLOCK + TID;
  __syncthreads();
  if (TID == 0) { FENCE atomicAdd(work + 255, 1);
    while (*(volatile u32*)(work + 255) < (2 * round - 1) * gridDim.x); FENCE }
  __syncthreads();
  out[64 * BLOCK + TID] = work[64 * ((BLOCK + 1) % gridDim.x) + TID];
  __syncthreads();
  if (TID == 0) { FENCE atomicAdd(work + 255, 1);
    while (*(volatile u32*)(work + 255) < 2 * round * gridDim.x); FENCE }
  __syncthreads();
}"""


def test_a_barrier_of_the_grid_orders():
    ran = run(GRID_SYNC.replace("FENCE", "__threadfence();"), blocks=3, cooperative=True)
    assert not ran.kinds, ran.text
    assert ran.out[:192].tolist() == [3000 + (64 + t) % 192 for t in range(192)]
    assert run(GRID_SYNC.replace("FENCE", ""), blocks=3, cooperative=True).kinds == RACE


def test_the_last_block_may_come_after_the_others_have_left():
    last = """__shared__ u32 mine; work[64 * (BLOCK % 3) + TID] = TID; __syncthreads();
    if (TID == 0) { FENCE mine = atomicAdd(work + 255, 1); FENCE }
    __syncthreads();
    if (mine == 2) out[TID] = work[TID] + work[64 + TID] + work[128 + TID];"""
    for resident in (64, 8192):
        ran = run(last.replace("FENCE", "__threadfence();"), blocks=3, resident=resident)
        assert not ran.kinds, ran.text
        assert ran.out[:64].tolist() == [3 * t for t in range(64)]
        assert run(last.replace("FENCE", ""), blocks=3, resident=resident).kinds == RACE


def test_blocks_that_are_not_resident_cannot_be_waited_for():
    wait = "if (BLOCK == 0) while (!ld_acquire(work)); else st_release(work, 1);"
    assert not run(wait, blocks=2, resident=64, cooperative=True).kinds
    with pytest.raises(SimulationError, match=r"no progress: .*blocks 0 to 0 of 2 are resident.*"
                                              r"cooperative"):  # fmt: skip
        run(wait, blocks=2, resident=64)


def test_a_spin_that_cannot_end_names_its_blocks():
    with pytest.raises(SimulationError, match=r"no progress: 1 threads of block 1 .* at PTX line"):
        run("if (TID == 0 && BLOCK) while (!ld_acquire(work + BLOCK));", blocks=2, cooperative=True)
    crossed = (
        "if (TID == 0) { while (!ld_acquire(work + BLOCK)); st_release(work + 1 - BLOCK, 1); }"
    )
    with pytest.raises(SimulationError, match="2 threads of 2 blocks"):
        run(crossed, blocks=2, cooperative=True)


def test_a_lane_that_spins_keeps_its_warp_together():
    ran = run(
        """if (BLOCK == 0) {
          if (TID == 0) while (!ld_acquire(work));
          __syncwarp();
          out[TID] = __shfl_sync(~0u, TID + work[64], 3);
        } else if (TID == 0) { work[64] = 5; st_release(work, 1); }""",
        blocks=2,
        threads=32,
        cooperative=True,
    )
    assert not ran.kinds, ran.text
    assert ran.out[:32].tolist() == [8] * 32


def test_a_lock_orders_its_holders():
    lock = """if (TID == 0) {
      while (atomicCAS(work, 0, 1)); ENTER
      work[1] = work[1] + BLOCK + 1;
      LEAVE atomicExch(work, 0); }"""
    fence = "__threadfence();"
    ran = run(lock.replace("ENTER", fence).replace("LEAVE", fence), blocks=4, cooperative=True)
    assert not ran.kinds, ran.text
    ran = run(lock.replace("ENTER", fence).replace("LEAVE", ""), blocks=4, cooperative=True)
    assert ran.kinds == RACE


def test_flags_in_shared_memory_order_warps():
    flag = """__shared__ u32 data[32]; __shared__ volatile u32 flag;
    if (TID == 0) flag = 0; __syncthreads();
    if (TID >= 32) { data[TID - 32] = TID; __syncwarp();
      if (TID == 32) { FENCE flag = 1; } }
    else { while (!flag); FENCE out[TID] = data[TID]; }"""
    ran = run(flag.replace("FENCE", "__threadfence_block();"))
    assert not ran.kinds, ran.text
    assert ran.out[:32].tolist() == list(range(32, 64))
    assert run(flag.replace("FENCE", "")).kinds == {"race in shared memory"}


def test_atomics_race_with_ordinary_accesses():
    body = (
        "if (TID == 0) work[0] = 5; SYNC atomicAdd(work, 1); __syncthreads(); out[TID] = work[0];"
    )
    ran = run(body.replace("SYNC", "__syncthreads();"))
    assert not ran.kinds, ran.text
    assert ran.out[:64].tolist() == [69] * 64
    assert run(body.replace("SYNC", "")).kinds == RACE


# ---- Named barriers ------------------------------------------------------------------------------

PRODUCE = """__shared__ u32 buf[32];
if (TID < 32) { for (u32 i = 0; i < 3; ++i) { FREE(2, 64); buf[TID] = 10 * i + TID; FULL(1, 64); } }
else { ARRIVE(2, 64);
  for (u32 i = 0; i < 3; ++i) {
    BARRIER(1, 64); out[32 * i + TID - 32] = buf[31 - (TID - 32)]; if (i < 2) ARRIVE(2, 64); } }"""


def test_producers_and_consumers_meet_at_named_barriers():
    ran = run(PRODUCE.replace("FREE", "BARRIER").replace("FULL", "ARRIVE"))
    assert not ran.kinds, ran.text
    assert ran.out[:96].tolist() == [10 * i + 31 - t for i in range(3) for t in range(32)]


def test_writing_after_having_arrived_is_a_race():
    body = """__shared__ u32 buf[32];
    if (TID < 32) { EARLY ARRIVE(1, 64); LATE }
    else { BARRIER(1, 64); out[TID] = buf[TID - 32]; }"""
    write = "buf[TID] = TID;"
    assert not run(body.replace("EARLY", write).replace("LATE", "")).kinds
    late = run(body.replace("EARLY", "").replace("LATE", write))
    assert "race in shared memory" in late.kinds or "uninitialised read" in late.kinds


def test_an_arrival_does_not_order_the_one_who_arrives():
    body = """__shared__ u32 buf[32];
    if (TID >= 32) { buf[TID - 32] = TID; BARRIER(1, 64); }
    else { MEET(1, 64); out[TID] = buf[TID]; }"""
    assert not run(body.replace("MEET", "BARRIER")).kinds
    assert run(body.replace("MEET", "ARRIVE")).kinds & {
        "race in shared memory", "uninitialised read"}  # fmt: skip


def test_a_wrong_count_is_a_deadlock():
    body = "BARRIER(3, N); out[TID] = 1;"
    assert not run(body.replace("N", "64")).kinds
    with pytest.raises(SimulationError, match=r"deadlock: 64 threads of block 0.* at barrier 3"):
        run(body.replace("N", "96"))


def test_counts_that_differ_are_found():
    body = "if (TID < 32) BARRIER(1, 64); else BARRIER(1, N);"
    assert not run(body.replace("N", "64")).kinds
    assert "barrier count" in run(body.replace("N", "32"), threads=64).kinds


def test_more_threads_than_counted_do_not_all_meet():
    body = """__shared__ u32 buf[128]; buf[TID] = TID; BARRIER(1, N); out[TID] = buf[127 - TID];"""
    assert not run(body.replace("N", "128"), threads=128).kinds
    assert run(body.replace("N", "64"), threads=128).kinds == {"race in shared memory"}


def test_the_other_spelling_of_a_barrier():
    body = """__shared__ u32 buf[64]; buf[TID] = TID;
    asm volatile("barrier.sync 2, 64;" ::: "memory"); out[TID] = buf[63 - TID];"""
    ran = run(body)
    assert not ran.kinds, ran.text
    assert ran.out[:64].tolist() == [63 - t for t in range(64)]


# ---- Warp-wide instructions ----------------------------------------------------------------------


def test_elect_chooses_one_lane():
    ran = run(
        """u32 chosen, leader;
        asm volatile("{ .reg .pred p; elect.sync %1|p, 0xffffffff; selp.u32 %0, 1, 0, p; }"
                     : "=r"(chosen), "=r"(leader));
        out[TID] = chosen; out[64 + TID] = leader;
        asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }"
                     : "=r"(chosen));
        out[128 + TID] = chosen;"""
    )
    assert ran.out[:64].sum() == 2
    assert ran.out[[0, 32, 128, 160]].tolist() == [1] * 4
    assert not ran.out[64:128].any()


def test_match_finds_equal_lanes():
    ran = run(
        """out[TID] = __match_any_sync(~0u, TID % 4);
        int same; out[32 + TID] = __match_all_sync(~0u, TID / 32, &same); out[64 + TID] = same;
        out[96 + TID] = __match_all_sync(~0u, (u64)TID / 31 << 40, &same);
        out[128 + TID] = same;""",
        threads=32,
    )
    assert ran.out[:32].tolist() == [0x11111111 << t % 4 for t in range(32)]
    assert ran.out[32:64].tolist() == [0xFFFFFFFF] * 32
    assert ran.out[64:96].tolist() == [1] * 32
    assert not ran.out[96:160].any()


def test_instructions_without_effect_are_known():
    ran = run(
        """asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
        asm volatile("setmaxnreg.inc.sync.aligned.u32 128;");
        __nanosleep(20); out[TID] = 1;""",
        threads=128,
    )
    assert ran.out[:128].tolist() == [1] * 128


def test_each_copy_of_inline_assembly_has_names_of_its_own():
    ran = run(
        """for (int i = 0; i < 2; ++i) { u32 r = TID + i;
        asm volatile("{ .reg .pred p; .reg .b32 t<2>; setp.lt.u32 p, %0, 5;\\n"
          " mov.b32 t0, %0; @p bra SKIP; mov.b32 t1, 3; add.u32 t0, t0, t1; SKIP: mov.b32 %0, t0; }"
          : "+r"(r)); out[64 * i + TID] = r; }"""
    )
    expected = [t + i + (3 if t + i >= 5 else 0) for i in (0, 1) for t in range(64)]
    assert ran.out[:128].tolist() == expected


@pytest.mark.parametrize(("spelling", "kinds"), [("bar.sync", {"divergent barrier"}),
                                                 ("barrier.sync.aligned", {"divergent barrier"}),
                                                 ("barrier.sync", set())])  # fmt: skip
def test_only_aligned_barriers_need_whole_warps(spelling, kinds):
    meet = f'asm volatile("{spelling} 0;" ::: "memory");'
    assert (
        run(f"if (TID & 1) {{ {meet} out[TID] = 1; }} else {{ {meet} out[TID] = 2; }}").kinds
        == kinds
    )


ASYNC = """__shared__ u32 s[3][64];
#define COPY(i) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" \
    :: "r"(at(&s[i][TID])), "l"(in + 64 * (i) + TID) : "memory")
#define GROUP asm volatile("cp.async.commit_group;" ::: "memory")
#define AWAIT(n) asm volatile("cp.async.wait_group " #n ";" ::: "memory")
"""


def test_empty_groups_of_copies_count():
    """The last turns of a pipeline commit nothing and still wait for all but the newest group."""
    body = """for (int i = 0; i < 4; ++i) { if (i < 3) COPY(i); GROUP;
      if (i > 0) { AWAIT(1); __syncthreads(); out[64 * (i - 1) + TID] = s[i - 1][63 - TID]; } }"""
    ran = run(ASYNC + body)
    assert not ran.kinds, ran.text
    assert ran.out[128:192].tolist() == [128 + 63 - t for t in range(64)]


@pytest.mark.parametrize(
    "body",
    ["COPY(0); AWAIT(0);",  # never committed
     "COPY(1); GROUP; COPY(0); GROUP; AWAIT(1);",  # not the newest
     # Another warp's newer groups are not this one's.
     "COPY(0); if (TID >= 32) GROUP; GROUP; AWAIT(1);"],
)  # fmt: skip
def test_copies_that_were_not_waited_for(body):
    ran = run(f"{ASYNC}{body} __syncthreads(); out[TID] = s[0][TID];")
    assert ran.kinds == {"unfinished copy"}


def test_a_copy_reads_no_more_than_its_source_size():
    body = """__shared__ uint4 s[64];
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at(&s[TID])),
                 "l"(in + 60), "r"(TID == 0 ? 8 : 0) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads(); out[TID] = ((u32*)s)[TID];"""
    ran = run(body, words=62 + 2, threads=64)
    assert not ran.kinds, ran.text
    short = run(body.replace("in + 60", "in + 64"), words=66)
    assert not short.kinds, short.text
    assert short.out[:8].tolist() == [64, 65, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("writer", [0, 13, 31])
def test_a_word_that_a_whole_warp_has_read_is_not_one_lanes_to_write(writer):
    body = f"""__shared__ u32 s; if (TID == 0) s = 3; __syncthreads();
    u32 v = s; SYNC if (TID == {writer}) s = v + 1; out[TID] = v;"""
    ran = run(body.replace("SYNC", ""), threads=32)
    assert ran.kinds == {"race in shared memory"}
    assert f"thread {writer} (" not in ran.text  # names the other one
    assert not run(body.replace("SYNC", "__syncwarp();"), threads=32).kinds
