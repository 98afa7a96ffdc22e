"""The CPU target: chosen by flags, never claiming what the CPU lacks, applied once."""

import subprocess
import sys
from pathlib import Path

import pytest

from paged_kv.runtime.cpu_target import REQUIRED_FLAGS, CpuInfo, apply_cpu_target, choose_cpu_target

# From /proc/cpuinfo of a virtual machine on Sapphire Rapids that calls itself Rocket Lake (family 6, model 167).
MASKED_SAPPHIRE_RAPIDS = frozenset(
    """fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush mmx fxsr sse sse2 ss ht syscall
    nx pdpe1gb rdtscp lm constant_tsc rep_good nopl xtopology nonstop_tsc cpuid tsc_known_freq pni pclmulqdq ssse3 fma
    cx16 pcid sse4_1 sse4_2 x2apic movbe popcnt tsc_deadline_timer aes xsave avx f16c rdrand hypervisor lahf_lm abm
    3dnowprefetch cpuid_fault fsgsbase tsc_adjust bmi1 hle avx2 smep bmi2 erms invpcid rtm avx512f avx512dq rdseed adx
    smap avx512ifma clflushopt clwb avx512cd sha_ni avx512bw avx512vl xsaveopt xsavec xgetbv1 xsaves avx_vnni
    avx512_bf16 arat avx512vbmi umip avx512_vbmi2 gfni vaes vpclmulqdq avx512_vnni avx512_bitalg avx512_vpopcntdq rdpid
    cldemote movdiri movdir64b fsrm serialize tsxldtrk amx_bf16 avx512_fp16 amx_tile amx_int8 arch_capabilities
    """.split()
)
AMX = {"amx_tile", "amx_bf16", "amx_int8"}
SINCE_SAPPHIRE_RAPIDS = AMX | {"avx512_fp16", "avx512_bf16", "avx_vnni"}
SINCE_ICE_LAKE = {"avx512ifma", "avx512vbmi", "avx512_vbmi2", "avx512_bitalg", "avx512_vpopcntdq"}
AVX512 = {flag for flag in MASKED_SAPPHIRE_RAPIDS if flag.startswith("avx512")}
ZEN4 = MASKED_SAPPHIRE_RAPIDS - AMX - {"avx512_fp16", "avx_vnni"} | {"sse4a"}


def x86(flags: set[str] | frozenset[str]) -> CpuInfo:
    return CpuInfo("x86_64", "a CPU", frozenset(flags))


@pytest.mark.parametrize(
    ("flags", "target"),
    [
        (MASKED_SAPPHIRE_RAPIDS, "sapphirerapids"),
        (MASKED_SAPPHIRE_RAPIDS | {"amx_fp16"}, "graniterapids"),
        (MASKED_SAPPHIRE_RAPIDS - AMX, "cooperlake"),
        (MASKED_SAPPHIRE_RAPIDS - {"amx_int8"}, "cooperlake"),
        (MASKED_SAPPHIRE_RAPIDS - SINCE_SAPPHIRE_RAPIDS, "icelake-server"),
        (MASKED_SAPPHIRE_RAPIDS - SINCE_SAPPHIRE_RAPIDS - SINCE_ICE_LAKE, "cascadelake"),
        (MASKED_SAPPHIRE_RAPIDS - SINCE_SAPPHIRE_RAPIDS - SINCE_ICE_LAKE - {"avx512_vnni"}, "skylake-avx512"),
        (MASKED_SAPPHIRE_RAPIDS - AVX512, "haswell"),
        (MASKED_SAPPHIRE_RAPIDS - AVX512 - {"avx2"}, None),
        (ZEN4, "znver4"),
        (ZEN4 | {"avx_vnni", "avx512_vp2intersect"}, "znver5"),
        (ZEN4 - AVX512, "znver3"),
        (ZEN4 - AVX512 - {"vaes"}, "znver2"),
        (frozenset(), None),
    ],
)
def test_flags_choose_the_target(flags, target):
    assert choose_cpu_target(x86(flags)) == target


@pytest.mark.parametrize("machine", ["aarch64", "arm64", "riscv64"])
def test_other_architectures_are_left_to_max(machine):
    assert choose_cpu_target(CpuInfo(machine, "", MASKED_SAPPHIRE_RAPIDS)) is None


@pytest.mark.parametrize("target", REQUIRED_FLAGS)
def test_one_missing_flag_refuses_a_target(target):
    required = REQUIRED_FLAGS[target]
    assert choose_cpu_target(x86(required)) == target
    for flag in required:
        assert choose_cpu_target(x86(required - {flag})) != target, flag


def test_cpuinfo_keeps_what_all_cores_share():
    text = "model name\t: Some CPU\nflags\t\t: sse avx avx2\n\nmodel name\t: Some CPU\nflags\t\t: sse avx\n"
    assert CpuInfo.parse("x86_64", text) == CpuInfo("x86_64", "Some CPU", frozenset({"sse", "avx"}))


def test_arm_lists_features():
    assert CpuInfo.parse("aarch64", "Features\t: fp asimd bf16\n").flags == {"fp", "asimd", "bf16"}


def test_a_system_without_cpuinfo_has_no_flags(tmp_path):
    assert CpuInfo.read(tmp_path / "none").flags == frozenset()


@pytest.fixture
def driver(monkeypatch):
    """MAX's setting, replaced: the list of targets set, the last one in force."""
    calls: list[str] = []
    monkeypatch.setattr("max.driver.get_virtual_cpu_target", lambda: calls[-1] if calls else "")
    monkeypatch.setattr("max.driver.set_virtual_cpu_target", calls.append)
    return calls


@pytest.mark.parametrize(
    ("flags", "before", "target"),
    [
        (MASKED_SAPPHIRE_RAPIDS, [], "sapphirerapids"),
        (MASKED_SAPPHIRE_RAPIDS, ["x86-64-v3"], "x86-64-v3"),  # the user's
        (frozenset(), [], None),  # left to MAX
    ],
)
def test_apply_sets_the_target_once(driver, monkeypatch, flags, before, target):
    monkeypatch.setattr(CpuInfo, "read", lambda: x86(flags))
    driver += before
    assert apply_cpu_target() == target
    assert apply_cpu_target() == target
    assert driver == ([] if target is None else [target])


def test_max_takes_the_target_of_this_machine():
    code = (
        "from max.driver import get_virtual_cpu_target\n"
        "from paged_kv.runtime.cpu_target import apply_cpu_target\n"
        "assert get_virtual_cpu_target() == ''\n"
        "print(apply_cpu_target() or '', get_virtual_cpu_target(), sep=',')\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    expected = choose_cpu_target(CpuInfo.read(Path("/proc/cpuinfo"))) or ""
    assert output.strip() == f"{expected},{expected}"
