"""The dry run's report, for people; --json is the same for programs.

Tests: tests/test_plan.py.
"""

from nanogeex.watch import KINDS

GIB = 2**30


def table(report: dict) -> str:
    """The report for people."""
    flags = [name.replace("_", " ") for name in ("sequence_parallel", "reshard_after_forward")
             if report[name]]
    unit, size = ("GiB", GIB) if report["peak_gib"] >= 1 else ("MiB", 2**20)
    idle = report["dp"] - report["global_batch_size"]
    idle = f", and {idle:,} data ranks have nothing to do" if idle > 0 else ""
    lines = [
        f"{report['parameters']:,} parameters on {report['world']} ranks, dp {report['dp']} x tp "
        f"{report['tp']} | " + ", ".join([report["precision"], f"recompute {report['recompute']}",
                                          *flags]),
        f"a rank keeps {report['parameters_of_rank']:,} of them; {report['micro_batches']} "
        f"micro-batches a step{idle}", "",
        f"{f'memory of a rank, {unit}':<24}{'at rest':>12}{'at peak':>12}"]
    at_rest, at_peak = report["bytes_at_rest"], report["bytes_at_peak"]
    for kind in KINDS:
        lines.append(f"  {kind:<22}{at_rest[kind] / size:12.3f}{at_peak[kind] / size:12.3f}")
    held = [sum(bytes.values()) / size for bytes in (at_rest, at_peak)]
    lines.append(f"  {'in all':<22}{held[0]:12.3f}{held[1]:12.3f}")
    lines.append("fits, with 1 GiB to spare: " + ", ".join(
        f"{size} GiB {'yes' if fits else 'no'}" for size, fits in report["fits_gib"].items()))
    lines += ["", f"{'collectives a step':<24}{'group':>12}{'dtype':>10}{'calls':>10}{unit:>12}"]
    for entry in report["collectives"]:
        where = f"{entry['group']} {entry['ranks']}"
        lines.append(f"  {entry['kind']:<22}{where:>12}{entry['dtype']:>10}{entry['calls']:10,}"
                     f"{entry['bytes'] / size:12.3f}")
    lines += [
        "", f"on {report['accelerator']} ({report['peak_tflops']:g} TFLOP/s in 16 bits, "
        f"{report['memory_gib']:g} GiB, {report['link_gb_s']:g} GB/s in a node, "
        f"{report['network_gb_s']:g} out of it)",
        f"  {report['flops_of_rank'] / 1e12:,.1f} TFLOP a rank and step | compute "
        f"{report['compute_s']:.2f} s, TP {report['tp_s']:.2f} s, DP {report['dp_s']:.2f} s",
        f"  step {report['step_s']:.2f} s ({report['step_s_without_overlap']:.2f} without overlap)"
        f" | {report['tokens_per_s']:,.0f} tokens/s | mfu {report['mfu']:.1%} | 850B tokens in "
        f"{report['days_of_850b_tokens']:,.1f} days",
        "", f"which topology{'peak GiB':>14}{'fits':>8}{'step s':>10}{'tokens/s':>14}{'mfu':>8}"]
    for entry in report["topologies"]:
        name = f"dp {entry['dp']} x tp {entry['tp']}"
        lines.append(f"  {name:<16}{entry['peak_gib']:10.2f}{'yes' if entry['fits'] else 'no':>8}"
                     f"{entry['step_s']:10.2f}{entry['tokens_per_s']:14,.0f}{entry['mfu']:8.1%}")
    return "\n".join(lines)
