"""What a plan decided and why, as data and as text for `kgen explain`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kgen.arch import SMEM_RESERVED
from kgen.launches import Launch
from kgen.plan import Plan, resident_blocks
from kgen.spec import STRATEGIES, Spec
from kgen.strategy import predicted_ms


def explain(spec: Spec, plan: Plan) -> dict[str, Any]:
    """The plan's decisions and figures; plain JSON values. Bytes, counts and ms as named.

    Totals are for the whole batch, or for one sample where the batch is dynamic.
    """
    g, arch, N = plan.g, plan.arch, plan.g.N or 1
    x_bytes, y_bytes = 4 * N * g.x_elements, 4 * N * g.y_elements
    weight_bytes = 4 * g.C_out * g.taps
    macs = N * g.y_elements * g.taps
    passes = {"two_kernel": 3, "hybrid": 4}.get(plan.strategy, 1)  # over y
    moved = x_bytes + weight_bytes + passes * y_bytes
    floor_bytes = x_bytes + y_bytes + weight_bytes
    memory_ms, fma_ms = 1e3 * moved / arch.bandwidth, 1e3 * macs / arch.fma_rate
    predictions = {name: predicted_ms(spec, g, arch, name) for name in STRATEGIES}
    return {
        "name": spec.name,
        "spec_hash": plan.spec_hash,
        "strategy": plan.strategy,
        "reasons": list(plan.reasons),
        "arch": arch.name,
        "board": arch.board,
        "speeds_measured": arch.measured,
        "batch": g.N or "dynamic",
        "x": [g.N or "N", g.C_in, g.H, g.W],
        "y": [g.N or "N", g.C_out, g.P, g.Q],
        "tile": _tile(plan),
        "fused": _fused(plan),
        "launches": [
            {**asdict(launch), "blocks": _blocks(launch, N, arch.sms)} for launch in plan.launches
        ],
        "smem_map": [asdict(region) for region in plan.smem_map],
        "blocks_per_sm": resident_blocks(plan),
        "limited_by": _occupancy_limit(plan),
        "workspace_bytes": 4 * (plan.workspace_fixed + N * plan.workspace_per_sample),
        "bytes_needed": floor_bytes,
        "bytes_moved": moved,
        "multiply_adds": macs,
        "memory_ms": memory_ms,
        "fma_ms": fma_ms,
        "floor_ms": 1e3 * floor_bytes / arch.bandwidth,
        "bound_by": _bound(plan, memory_ms, fma_ms),
        "predicted_ms": predictions,
    }


def _tile(plan: Plan) -> dict[str, int] | None:
    tile = plan.tile
    if tile is None:
        return None
    names = (
        "tile_h", "tile_w", "tile_k", "tile_c", "pixels", "threads", "thread_k", "registers",
        "smem", "copy",
    )  # fmt: skip
    return {name: getattr(tile, name) for name in names}


def _fused(plan: Plan) -> dict[str, Any] | None:
    tile = plan.fused
    if tile is None:
        return None
    names = (
        "tile_h", "tile_w", "rows_m", "n", "units", "unit_groups", "slabs", "unit_jobs", "chunks",
        "accumulators", "weights_resident", "smem",
    )  # fmt: skip
    facts = {name: getattr(tile, name) for name in names}
    clocks = tile.costs(plan.arch, stores=True)
    return {"math": tile.math.name, **facts, "clocks_of_a_job": clocks}


def _bound(plan: Plan, memory_ms: float, fma_ms: float) -> str:
    """What a plan's time is bound by, by its own estimate."""
    if plan.fused is not None:
        costs = plan.fused.costs(plan.arch, stores=True)
        return max(costs, key=costs.__getitem__)
    return "multiply-adds" if fma_ms > memory_ms else "memory"


def _blocks(launch: Launch, N: int, sms: int) -> int:
    """Blocks of a launch for a batch of N on a board with so many SMs."""
    if launch.team is not None:
        return launch.team.grid(sms)
    return launch.blocks + launch.blocks_per_sample * N


def _occupancy_limit(plan: Plan) -> str:
    """What keeps more blocks of the first kernel off an SM."""
    if plan.fused is not None:
        return "registers"
    arch, launch = plan.arch, plan.launches[0]
    registers = plan.tile.registers if plan.tile else 0
    limits = {
        "threads": arch.threads_per_sm // launch.threads,
        "shared memory": arch.smem_per_sm // (launch.smem_bytes + SMEM_RESERVED),
        "blocks per SM": arch.blocks_per_sm,
    }
    if registers:
        limits["registers"] = arch.registers_per_sm // (registers * launch.threads)
    return min(limits, key=lambda name: limits[name])


def _shape(sizes: list[int | str]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def as_text(facts: dict[str, Any]) -> str:
    """`explain` as lines for a terminal."""
    per = "one sample" if facts["batch"] in ("dynamic", 1) else f"{facts['batch']} samples"
    lines = [
        f"{facts['name']}  {facts['spec_hash']}  {facts['strategy']} for {facts['arch']}",
        f"  x {_shape(facts['x'])} -> y {_shape(facts['y'])}, fp32",
        *(f"  {reason}" for reason in facts["reasons"]),
    ]
    if facts["tile"]:
        tile = facts["tile"]
        lines += [
            f"  a block: {tile['tile_h']} x {tile['tile_w']} output pixels of {tile['tile_k']} "
            f"channels, {tile['tile_c']} input channels staged at a time",
            f"  a thread: {tile['pixels']} rows of a column x {tile['thread_k']} channels = "
            f"{tile['pixels'] * tile['thread_k']} accumulators, about {tile['registers']} "
            "registers",
        ]
    if facts["fused"]:
        lines += _fused_lines(facts["fused"])
    lines.append("  launches:")
    for launch in facts["launches"]:
        each = f"{launch['blocks_per_sample']:,} a sample"
        if launch["team"]:
            each = f"resident together, {launch['team']['jobs_per_sample']:,} jobs a sample"
        elif not launch["blocks_per_sample"]:
            each = "for any batch"
        lines.append(
            f"    {launch['kernel']}: {launch['blocks']:,} blocks x {launch['threads']} threads "
            f"({each}), {launch['smem_bytes']:,} bytes of dynamic shared memory"
        )
    lines.append("  shared memory map:")
    for region in facts["smem_map"]:
        end = region["offset"] + region["bytes"]
        lines.append(
            f"    {region['kernel']} {region['offset']:>7,} .. {end:>7,}  {region['name']}  "
            f"{region['layout']}"
        )
    lines += [
        f"  resident: {facts['blocks_per_sm']} blocks an SM, limited by {facts['limited_by']}",
        f"  workspace: {facts['workspace_bytes']:,} bytes",
        f"  for {per}: moves {facts['bytes_moved']:,} bytes ({facts['bytes_needed']:,} needed), "
        f"{facts['multiply_adds']:,} multiply-adds",
        f"  on one {facts['board']} ({'measured' if facts['speeds_measured'] else 'datasheet'} "
        f"speeds): memory {facts['memory_ms']:.3g} ms, multiply-adds {facts['fma_ms']:.3g} ms: "
        f"bound by {facts['bound_by']}",
        "  predicted: "
        + ", ".join(
            f"{name} {time:.3g} ms" if time is not None else f"{name} does not fit"
            for name, time in facts["predicted_ms"].items()
        )
        + f"; floor (every byte once) {facts['floor_ms']:.3g} ms",
    ]
    if "simulated" in facts:
        lines += _simulated_lines(facts["simulated"])
    return "\n".join(lines)


def _fused_lines(tile: dict[str, Any]) -> list[str]:
    """The tile of single_pass and recompute, and what one job costs an SM."""
    weights = "stay in shared memory" if tile["weights_resident"] else "pass with the input"
    clocks = ", ".join(f"{name} {value:,.0f}" for name, value in tile["clocks_of_a_job"].items())
    return [
        f"  a job: {tile['tile_h']} x {tile['tile_w']} output pixels, products of {tile['rows_m']} "
        f"rows x {64 // tile['rows_m']} channels by {tile['n']} pixels, math {tile['math']}",
        f"  normalised together: {tile['unit_jobs']} jobs of {tile['unit_groups']} groups, "
        f"{tile['units']} such units a sample",
        f"  a thread: {tile['accumulators']} accumulators; {tile['chunks']} chunks of input "
        f"channels, weights {weights}",
        f"  clocks an SM spends on a job: {clocks}",
    ]


def _simulated_lines(simulated: dict[str, Any]) -> list[str]:
    """The counts of a simulated run, a kernel at a time."""
    lines = [f"  simulated for {simulated['arch']}: {simulated['ran']}"]
    for kernel, counts in simulated["counts"].items():
        lines.append(f"    {kernel}:")
        lines += [f"      {name:42}{count:>15,}" for name, count in counts.items()]
    lines += [
        f"    bank conflicts at PTX line {one['line']} of {one['kernel']}: {one['count']:,}"
        for one in simulated["conflicts"]
    ]
    return lines
