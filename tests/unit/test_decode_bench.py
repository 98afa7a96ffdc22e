"""The results of `paged-kv bench --all`: targets by CPU family, the page's sections, the pictures."""

import pytest

from benchmarks import pages
from paged_kv.bench import goals, peaks, report
from paged_kv.bench.cases import AMX, CASES, cases_of
from paged_kv.bench.goals import Goal, goals_of, met, with_goal
from paged_kv.bench.peers.vllm_cpu import library
from paged_kv.bench.results import read_results, row_of
from paged_kv.bench.run import Run
from paged_kv.cli import _run
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS
from support.bench_jobs import FACTS, fake_job

BY_NAME = {case.name: case for case in CASES}
BEGIN, END = "<!-- decode_cpu: begin -->", "<!-- decode_cpu: end -->"


def test_families_have_the_targets_of_their_instructions():
    assert goals_of("znver5") is goals_of("cooperlake") is goals.WITHOUT_AMX
    assert goals_of("sapphirerapids") is goals.WITH_AMX
    assert goals_of("haswell") is goals_of("skylake-avx512") is goals.WITHOUT_BF16
    assert goals_of("aarch64") == {}


@pytest.mark.parametrize("family", ["znver5", "sapphirerapids", "haswell"])
def test_goals_name_cases_and_comparisons_that_exist(family):
    cases = {case.name: case for case in cases_of(family, every=True)}
    assert any(AMX in case.versus for case in cases.values()) == (family == "sapphirerapids")
    for name, goal in goals_of(family).items():
        assert goal != Goal()
        assert set(goal.factors) <= {versus.label for versus in cases[name].versus}, name


def test_one_of_several_targets_may_be_enough():
    case, wanted = BY_NAME["bf16"], goals_of("znver5")
    time = case.bytes / 20e9  # at 20 of 25 GB/s: the share is reached
    for factor, read, expected in ((2, 25, True), (3, 40, True), (2, 40, False)):
        jobs = {"-": fake_job(time, read), "vllm-16": fake_job(time, read, factor * time)}
        row = with_goal(row_of(case, jobs, FACTS), wanted)
        assert met(row) is expected
        assert met({**row, "either": False}) is False
        assert not met({**row, "right": False})
    assert report.share_cell(row) == "0.50 (0.8 or a factor)"
    assert met(with_goal(row, {})) is None


def test_the_list_shows_the_targets_of_a_family(capsys):
    assert _run(["bench", "--list", "--target", "znver5"]) == 0
    assert "0.8 of the bandwidth or 2.5x vLLM CPU, page 16" in capsys.readouterr().out
    assert _run(["bench", "--list", "--target", "sapphirerapids"]) == 0
    assert "0.85 of the bandwidth, 2.5x vLLM CPU, page 16" in capsys.readouterr().out


def test_vllm_is_loaded_as_its_own_start_would_load_it_on_that_cpu():
    builds = {family: library(family) for family in REQUIRED_FLAGS}
    assert builds["znver5"] == builds["sapphirerapids"] == "_C.abi3.so"
    assert builds["skylake-avx512"] == builds["icelake-server"] == "_C_AVX512.abi3.so"
    assert builds["haswell"] == builds["znver3"] == library(None) == "_C_AVX2.abi3.so"


def results_of(family, jobs, **facts):
    """A family's file."""
    wanted = goals_of(family)
    rows = [with_goal(row_of(BY_NAME[name], found, FACTS), wanted) | facts for name, found in jobs.items()]
    return {"family": family, "versions": {"max": "26.7.0"}, "peaks": {"float32": 3e11}, "rows": rows}


def test_a_page_gets_the_families_side_by_side(tmp_path):
    slow, fast = (BY_NAME["bf16"].bytes / speed for speed in (20e9, 60e9))
    dead = {"note": "crashed: SIGSEGV"}
    first = {
        "bf16": {
            "-": fake_job(slow, 25),
            "vllm-16": fake_job(slow, 25, 2 * slow),
            "torch": fake_job(slow, 25, 3 * slow),
            "gather": dead,
        },
        "hnd": {"-": {"note": "crashed: SIGABRT"}},
        "append-4096": {"-": fake_job(2e-3, 25)},
    }
    second = {
        "bf16": {"-": fake_job(fast, 80), "vllm-16": fake_job(fast, 80, 2.6 * fast)},
        "linear-1": {"-": fake_job(1e-3, 80), "torch-linear": fake_job(1e-3, 80, 0.5e-3)},
    }
    other = {"machine": "another machine", "date": "2026-11-22", "commit": "def"}
    families = [results_of("sapphirerapids", first, commit="abc"), results_of("znver5", second, **other)]
    families[1]["rows"][0]["other_work"] = 0.4
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    pages.update_page(page, pages.markdown(families, "[Roofline](results/{family}.png)."))
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"\n{END}\nafter\n")
    assert "old" not in text
    one, another = text.split("**znver5**")
    assert "**sapphirerapids**: a machine; 2026-11-21; 25 GB/s read; max 26.7.0. [Roofline](results/sapphire" in one
    assert "| case | paged-kv | share of read bandwidth (target) | vLLM | torch |\n" in one
    assert "| bf16, NHD, page 16, B 8, 32/8, L 4096 | 6.71 ms, 20.0 GB/s | 0.80 (0.85) | 2x | 3x |" in one
    assert "another machine; 2026-11-22; 80 GB/s read" in another
    assert "\\* Other processes used more than 0.05 of the cores' time: bf16 0.40." in another
    assert "\\* Other processes" not in one
    assert "| bf16, NHD, page 16, B 8, 32/8, L 4096 * | 2.24 ms, 60.0 GB/s | 0.75 (0.8 or a factor) | 2.6x |" in another
    assert "Slower than another system: linear bf16, 8192 x 4096, 1 row (torch 0.5x)." in another
    assert not any(word in text for word in ("SIGABRT", "append 1 x 4096"))
    page.write_text("nothing")
    with pytest.raises(ValueError, match="no lines"):
        pages.update_page(page, "x")


# --- the command


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """A checkout of its own, whose jobs do not run."""
    for folder in (pages.RESULTS, "docs/pictures"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "docs/performance.md").write_text(f"{BEGIN}\n{END}\n")
    monkeypatch.setattr(Run, "job", lambda self, case, peer: fake_job(1e-3, 25, None if peer == "-" else 2e-3))  # noqa: ARG005
    monkeypatch.setattr(Run, "peaks", lambda _: {"float32": 3e11})
    monkeypatch.setattr(pages, "CHECKOUT", tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_pages_have_the_families_side_by_side(checkout, capsys):
    out = checkout / pages.RESULTS
    for family in ("sapphirerapids", "znver5"):
        assert _run(["bench", "--all", "--cases", "f16", "--target", family, "--out", str(out)]) == 0
        assert ("below their targets: f16" in capsys.readouterr().err) == (family == "sapphirerapids")
    written = read_results(out / "sapphirerapids.csv")
    assert (written["family"], written["peaks"]) == ("sapphirerapids", {"float32": 3e11})
    pages.write()
    assert {path.name for path in out.iterdir()} == {
        f"{family}{end}" for family in ("sapphirerapids", "znver5") for end in (".csv", ".png", "_bars.png")
    }
    performance = (checkout / "docs/performance.md").read_text()
    for family in ("sapphirerapids", "znver5"):
        for end in ("", "_bars"):
            assert f"(../benchmarks/results/decode_cpu/{family}{end}.png)" in performance
    assert not (checkout / pages.BARS).exists()  # f16 is none of the six


def test_the_six_bars_are_of_the_family_with_most_of_them(tmp_path):
    """One with a case that other work disturbed has fewer; the least factor of a case is that of the fastest system."""
    names = ("bf16", "step-1", "step-prefill", "e4m3")
    jobs = {
        name: {"-": fake_job(1e-2, 25)} | {peer: fake_job(1e-2, 25, 2e-2) for peer in BY_NAME[name].peers}
        for name in names
    }
    jobs["step-1"]["llama.cpp"] = fake_job(1e-2, 25, 1.5e-2)
    jobs["step-1"]["vllm-step"] = fake_job(1e-2, 25, 0.1e-2, peer_right=False)
    families = [
        results_of(family, jobs, date=date) for family, date in (("znver4", "2026-11-21"), ("znver5", "2026-11-22"))
    ]
    rows = pages.six_rows(families[0])
    assert list(rows) == list(names)
    bars = {name: pages.six_bar(row) for name, row in rows.items()}
    assert bars["step-1"] == (pytest.approx(1.5), "llama.cpp")
    assert bars["bf16"] == (rows["bf16"]["share"], "reading memory")
    assert bars["e4m3"] == (pytest.approx(2), "a bfloat16 cache")
    assert pages.with_most_bars(families) is families[1]
    families[1]["rows"][1]["other_work"] = 0.3
    assert pages.with_most_bars(families) is families[0]
    pages.draw_six(families, tmp_path / "six.png")
    assert (tmp_path / "six.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_arithmetic_has_no_picture(checkout):
    results = results_of("znver5", {"append-4096": {"-": fake_job(2e-3, 25)}})
    pages.draw_roofline(results, checkout / "out.png")
    assert not (checkout / "out.png").exists()


def test_a_slow_product_is_not_repeated_for_the_roof(monkeypatch):
    """Kept to AVX2, torch takes half a minute for one of bfloat16."""
    monkeypatch.setattr(peaks, "_SLOW_PRODUCT", 0)
    monkeypatch.setattr(peaks, "take_turns", lambda *_: pytest.fail("it was repeated"))
    measured = peaks.measure_peaks(9, size=64)["peaks"]
    assert set(measured) == {"float32", "bfloat16"}
    assert min(measured.values()) > 0
