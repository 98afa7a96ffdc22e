"""The table of `paged-kv generate --profile`: where the time of steps went."""

from __future__ import annotations

from collections.abc import Sequence

from paged_kv.output import say
from paged_kv.runtime.step_profile import StepProfile, copied_bytes_per_second

KINDS = ("steps of one token a request", "other steps")


def print_profiles(profiles: Sequence[StepProfile], seconds: float) -> None:
    """Prints the table of each kind of step that there was, on stderr.

    Args:
        profiles: One for each of `KINDS`.
        seconds: All that the engine took.
    """
    copied = copied_bytes_per_second(profiles[0].dtype)
    for kind, profile in zip(KINDS, profiles, strict=True):
        if profile.runs:
            say(f"{kind}: {profile.runs}, {profile.run_ns / profile.runs / 1e6:.3f} ms each")
            for line in table(profile, copied):
                say(line)
    of_steps = sum(profile.run_ns for profile in profiles) / 1e9
    say(f"outside of steps (plans, sampling, text): {seconds - of_steps:.3f} s of {seconds:.3f} s")


def table(profile: StepProfile, copied: float) -> list[str]:
    """The lines of a profile: milliseconds of a step by operation and by layer.

    Args:
        profile: It has a run.
        copied: What a copy reads and writes a second.
    """
    runs, whole = profile.runs, profile.run_ns

    def row(name: str, ns: float, calls: object = "", weights: str = "") -> str:
        return f"  {name:<22}{calls:>6}{ns / runs / 1e6:>10.3f}{100 * ns / whole:>7.1f} %  {weights}".rstrip()

    lines = [f"  {'operation':<22}{'calls':>6}{'ms':>10}{'share':>9}  weights read"]
    for part in profile.by_operation():
        rate = part.weight_bytes * runs / max(part.ns, 1) * 1e9
        read = f"{rate / 1e9:.1f} GB/s, {rate / copied:.2f} of a copy" if part.weight_bytes else ""
        lines.append(row(part.name, part.ns, part.calls, read))
    lines.append(row("no kernel", whole - profile.kernel_ns))
    return [*lines, "", *(row(part.name, part.ns, part.calls) for part in profile.by_layer())]
