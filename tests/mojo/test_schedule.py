"""The cut of calls keeps threads busy, by a simulated clock: 4 to 64, larger prompts up to 128, decoding up to 192.

Linear layers up to 192 too: all threads, or as many as a small one has sections for.
"""

import functools

import pytest

from paged_kv.bench.case_kinds import AppendCase, AttentionCase
from paged_kv.bench.cases import CASES
from paged_kv.bench.weight_cases import LinearCase, QuantisedCase
from support.mojo_programs import run_program
from support.schedule import Schedule, Segment, run_plan, run_tasks

THREADS = (4, 8, 16, 32, 64)
MANY_THREADS = (96, 128, 192)
"""For decoding, whose segments are cut by their KV heads; blocks of prompts are one KV head each already."""
MOST_DECODING_TOKENS = 8
MOST_IDLE = 0.05
PREFILL_QUERIES = 256
"""Queries a KV head of a prefill block."""


def attention_call(case: AttentionCase, threads: int) -> str:
    requests = ",".join(f"1:{length}:{case.new_tokens}" for length in case.lengths)
    rows = PREFILL_QUERIES * case.kv_heads // case.heads
    return f"attention/{requests}/{rows}/{case.kv_heads}/{threads}"


CHUNK = "64 new tokens over 65536"
"""Not a case of the benchmark: one block of prefill rows, which are 8 KV heads."""
LARGE = {
    "16 x 8192": "attention/16:8192:1/64/8",
    "1 x 131072": "attention/1:131072:1/64/8",
    "1 x 262144 and 63 x 512": "attention/1:262144:1,63:512:1/64/8",
    "2048 new tokens over 32768": "attention/1:34816:2048/64/8",
}
"""Nor are these, which many threads share."""
LARGE_THREADS = (32, 64, 128)
MATRICES = (2048, 4096, 8192, 11008, 14336, 151936)
"""Rows of w: whole layers of models, the parts of them, and a vocabulary."""
SMALL = (128, 256, 512, 1024)
"""Rows of w that 192 threads cannot share in sections of 8, the shortest."""
SHORTEST = 8
MATRIX_THREADS = (8, 32, 48, 96, 128, 160, 192)


def calls() -> dict[tuple[str, int], str]:
    """The argument of `print_schedule.mojo` for each case and number of threads."""
    found: dict[tuple[str, int], str] = {}
    for case in CASES:
        if isinstance(case, AttentionCase) and case.new_tokens <= MOST_DECODING_TOKENS:
            found |= {(case.name, threads): attention_call(case, threads) for threads in MANY_THREADS}
        for threads in THREADS:
            if isinstance(case, AttentionCase):
                found[case.name, threads] = attention_call(case, threads)
            elif isinstance(case, LinearCase) and not isinstance(case, QuantisedCase):  # they are cut by tiles
                found[case.name, threads] = f"linear/{case.outer}/{threads}"
            elif isinstance(case, AppendCase) and case.tokens > 1:  # 8 tokens are copied by one thread
                rows = case.batch * case.tokens
                found[case.name, threads] = f"append/{rows}/{case.kv_heads}/{case.head_dim}"
    found |= {(CHUNK, threads): f"attention/1:65536:64/64/8/{threads}" for threads in THREADS}
    for threads in MATRIX_THREADS:
        found |= {(matrix(rows), threads): f"linear/{rows}/{threads}" for rows in (*MATRICES, *SMALL)}
    for name, call in LARGE.items():
        many = () if "new tokens" in name else (96, 160, 192)
        found |= {(name, threads): f"{call}/{threads}" for threads in sorted({*LARGE_THREADS, *many})}
    return found


def matrix(rows: int) -> str:
    return f"{rows} rows of w"


CALLS = calls()


@functools.cache
def printed() -> dict[str, list[list[int]]]:
    """The lines of each call."""
    arguments = list(dict.fromkeys(CALLS.values()))
    result = run_program("print_schedule.mojo", *arguments)
    assert result.returncode == 0, result.stderr
    lines: dict[str, list[list[int]]] = {argument: [] for argument in arguments}
    for line in result.stdout.splitlines():
        call, *numbers = map(int, line.split())
        lines[arguments[call]].append(numbers)
    return lines


def schedule(name: str, threads: int) -> Schedule:
    call = CALLS[name, threads]
    lines = printed()[call]
    if call.startswith("attention"):
        return run_plan([Segment(*numbers) for numbers in lines], threads, int(call.split("/")[3]))
    return run_tasks([rows for (rows,) in lines], threads)


@pytest.mark.parametrize(("name", "threads"), list(CALLS))
def test_threads_are_busy(name, threads):
    assert longest_over_mean(name, threads) < 1 / (1 - MOST_IDLE)


def longest_over_mean(name: str, threads: int) -> float:
    """The longest thread's time over the mean: of all threads, or of as many as can have a section."""
    found = schedule(name, threads)
    most = next((rows // SHORTEST for rows in SMALL if name == matrix(rows)), threads)
    return found.end * min(threads, most) / found.busy


def test_the_clock_sees_what_is_uneven():
    whole = [Segment(1000, 1, 8, -1, 0, 1, 1)] * 3
    assert run_plan(whole, 2, 8).idle_share == pytest.approx(1 / 4)
    assert run_plan(whole, 3, 8).idle_share == pytest.approx(0)
    assert run_tasks([1, 1, 2], 2).end == 3
    halves = [Segment(1000, 1, 8, 0, split, 1, 2) for split in range(2)]
    assert run_plan(halves, 2, 8).end > 1000  # the merge is counted once, at the end
    assert run_plan(halves, 2, 8).busy == pytest.approx(run_plan(halves, 1, 8).end)
