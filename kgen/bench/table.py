"""A benchmark record as text for a terminal."""

from __future__ import annotations

from kgen.bench.record import Record


def text_table(record: Record) -> str:
    """One line a row, then what the figures rest on."""
    head = (
        f"{'':26}{'graph':>9}{'p20':>9}{'p80':>9}{'cold':>9}{'warm':>9}  ms"
        f"{'GB/s':>8}{'TFLOP/s':>9}{'of copy':>9}"
        f"{'x eager':>9}{'x compile':>10}{'host us':>9}{'first ms':>10}"
        f"{'max error':>11}"
    )
    lines = [f"{record.name}  x {list(record.x)}  {record.bytes_needed / 1e6:.1f} MB needed", head]
    for row in record.rows:
        shown = row.shown()
        if shown is None:
            lines.append(f"{row.label:26}  FAILED: {row.failed or 'it was not timed'}")
            continue
        kind, ms = shown[0], shown[1].median
        medians = "".join(
            f"{times.median:9.4f}" if times else f"{'-':>9}" for times in (row.cold, row.warm)
        )
        graph = (
            f"{row.graph.median:9.4f}{row.graph.p20:9.4f}{row.graph.p80:9.4f}"
            if row.graph
            else f"{'-':>9}" * 3
        )
        rate = record.bytes_needed / ms / 1e-3
        speedup = ""
        for label, width in (("eager", 9), ("compile", 10)):
            baseline = record.row(label)
            base = baseline.times(kind) if baseline else None
            speedup += f"{base.median / ms:{width}.2f}" if base else f"{'-':>{width}}"
        host = f"{row.host_us:9.1f}" if row.host_us is not None else f"{'-':>9}"
        first = f"{row.first_call_ms:10.0f}" if row.first_call_ms is not None else f"{'-':>10}"
        lines.append(
            f"{row.label:26}{graph}{medians}    {rate / 1e9:8.0f}{record.flops / ms / 1e9:9.2f}"
            f"{100 * rate / record.ceilings.copy_bytes:8.0f}%{speedup}{host}{first}"
            f"{row.max_error:11.1e}"
        )
        if row.ncu:
            moved = row.ncu["dram_read_bytes"] + row.ncu["dram_write_bytes"]
            stalls = sorted(
                ((value, name) for name, value in row.ncu.items() if name.startswith("stall_")),
                reverse=True,
            )
            worst = ", ".join(f"{name[6:]} {value:.1f}" for value, name in stalls[:3])
            lines.append(
                f"{'':26}  ncu: DRAM {moved / record.bytes_needed:.2f} of the bytes needed; "
                f"stalls: {worst}; spills {row.ncu['spill_bytes']:.0f} bytes"
            )
    rates = ", ".join(
        f"{name} {rate / 1e12:.0f}" for name, rate in record.ceilings.mma_flops.items()
    )
    context = record.context
    lines.append(
        f"speed of light: copy {record.ceilings.copy_bytes / 1e12:.2f} TB/s, fill "
        f"{record.ceilings.fill_bytes / 1e12:.2f} TB/s; TFLOP/s: {rates}"
    )
    lines.append(
        f"{context.gpu}, driver {context.driver}, torch {context.torch}, NVRTC {context.nvrtc}, "
        f"kgen {context.kgen}"
    )
    lines += [f"warning: {one}" for one in context.warnings]
    return "\n".join(lines)
