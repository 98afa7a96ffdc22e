"""The table of `--profile`: where the time of steps went."""

from __future__ import annotations

from collections.abc import Sequence

from paged_kv.runtime.step_profile import Part, StepProfile, copied_bytes_per_second

KINDS = ("steps of one token a request", "other steps")


def profile_lines(profiles: Sequence[StepProfile], seconds: float, outside: str) -> list[str]:
    """The lines of the table of each kind of step that there was.

    Args:
        profiles: One for each of `KINDS`.
        seconds: The time in which they were noted.
        outside: What took the rest of it.
    """
    copied = copied_bytes_per_second(profiles[0].dtype)
    lines: list[str] = []
    for kind, profile in zip(KINDS, profiles, strict=True):
        if profile.runs:
            lines.append(f"{kind}: {profile.runs}, {profile.run_ns / profile.runs / 1e6:.3f} ms each")
            lines += table(profile, copied)
    of_steps = sum(profile.run_ns for profile in profiles) / 1e9
    return [*lines, f"outside of steps ({outside}): {seconds - of_steps:.3f} s of {seconds:.3f} s"]


def table(profile: StepProfile, copied: float) -> list[str]:
    """The lines of a profile: milliseconds of a step by operation and by layer.

    Args:
        profile: It has a run.
        copied: What a copy reads and writes a second.
    """
    runs, whole = profile.runs, profile.run_ns

    def row(name: str, ns: float, calls: object = "", rate: str = "") -> str:
        return f"  {name:<22}{calls:>6}{ns / runs / 1e6:>10.3f}{100 * ns / whole:>7.1f} %  {rate}".rstrip()

    lines = [f"  {'operation':<22}{'calls':>6}{'ms':>10}{'share':>9}  weights read; computed"]
    lines += [row(part.name, part.ns, part.calls, _rate(part, runs, copied)) for part in profile.by_operation()]
    lines.append(row("no kernel", whole - profile.kernel_ns))
    return [*lines, "", *(row(part.name, part.ns, part.calls) for part in profile.by_layer())]


def _rate(part: Part, runs: int, copied: float) -> str:
    """The rates at which products read their weights and compute; empty of all else."""
    if not part.weight_bytes:
        return ""
    read, computed = (count / max(part.ns, 1) for count in (part.weight_bytes * runs, part.flops))
    return f"{read:.1f} GB/s, {read * 1e9 / copied:.2f} of a copy; {computed:.1f} GFLOP/s"
