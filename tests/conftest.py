"""Options of every test run: tiers by folder, workers, the order of files, Hypothesis profiles."""

import os
import signal
from pathlib import Path

import pytest

from support import background, isa, properties, tiers

TESTS = Path(__file__).parent

FOLDERS = {
    "unit": "needs no compiler",
    "agents": "coding agents themselves; needs what npm installs",
    "ops": "each op against the oracle",
    "api": "the array API against the oracle",
    "engine": "models from a checkpoint to text, and the command",
    "hostile": "generated hostile calls, in processes of their own",
    "mojo": "the Mojo package's own tests",
    "isa": "the ops compiled for other CPU targets",
    "browser": "pages that a browser shows",
    "gpu": "needs a GPU that MAX can use; `gpu/model`: GPU kernels without one, compiled and run on a model of it",
    "serve": "the server",
    "real_models": "two real models; needs what `.ci/real-models.txt` installs",
    "max_serve": "MAX Serve with these kernels; needs an environment of its own",
    "ray": "replicas and offline batches on a local cluster of Ray; needs an environment of its own",
    "vllm": "vLLM's engine with the plugin; needs an environment of its own",
}
"""Each folder is a marker: `-m ops`."""
ONE_PROCESS = ("isa", "gpu", "max_serve", "ray", "vllm", "real_models")
"""Not spread over workers by itself: jobs of `background.py` keep the other cores busy, a GPU has one owner, a server
takes several GB."""

QUICK = "quick"
"""The marker of the tier that plain `pytest` runs (support/tiers.py)."""

LONGEST_FIRST = (
    *("ops/test_graph_ops.py", "engine/test_families.py", "engine/test_gguf.py", "mojo/test_mojo.py"),
    *("engine/test_shares.py", "engine/test_llama.py", "ops/test_append_op.py", "engine/test_transformers.py"),
    *("engine/test_cli.py", "ops/test_quantised.py", "ops/test_linear_op.py", "engine/test_memory.py"),
    *("api/test_examples.py", "api/test_pages.py"),
)
"""Files that compile before their first test start first. Two that compile the same family never stand side by side."""

GIB = 1 << 30
WORKER_BYTES = 3 * GIB
"""Memory of a worker that compiles: 1.2 GiB measured, 2 GiB with a model's weights."""
MAX_WORKERS = 8


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-target",
        choices=isa.CPU_TARGETS,
        help="build the libraries of kernels for this LLVM target instead of the best that this CPU can run",
    )
    parser.addoption(
        "--q-dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of tests/ops, the tests of queries of this dtype alone; they compile nothing for others",
    )
    parser.addoption(
        "--few-encodings",
        action="store_true",
        help="build kernels of weights in the quick tier's encodings alone, and run no test of another one",
    )
    parser.addoption("--hostile-seed", type=int, default=0, help="what the cases of tests/hostile are drawn from")
    parser.addoption("--hostile-cases", type=int, help="how many cases of tests/hostile there are")
    parser.addoption("--all", action="store_true", help="without paths: every test, not the quick tier alone")
    parser.addoption("--every-value", action="store_true", help="of test_config_keys.py, all values of each key")
    parser.addoption(
        "--all-kernels",
        action="store_true",
        help="build all kernels of a dtype where one is missing, as a run of all tests does",
    )
    parser.addoption(
        "--emulate-amx",
        action="store_true",
        help="run the kernels for AMX without AMX, on tile registers in memory; of tests/ops, bfloat16's and quantised",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The workers of `-n auto`: one a core as memory allows; 0, this process alone, for one file or ONE_PROCESS."""
    paths = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    if all(TESTS in path.parents and path.relative_to(TESTS).parts[0] in ONE_PROCESS for path in paths):
        return 0
    if len(paths) == 1 and paths[0].suffix == ".py":
        return 0
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = os.cpu_count() or 1
    workers = min(cores, memory // WORKER_BYTES, MAX_WORKERS)
    if workers < 2:
        return 0
    for library in ("OMP", "OPENBLAS", "MKL"):  # for the workers, which inherit it: idle threads of theirs spin
        os.environ.setdefault(f"{library}_NUM_THREADS", str(cores // workers))
    return workers


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's job in the background ignores it: tests send it
    for folder, meaning in FOLDERS.items():
        config.addinivalue_line("markers", f"{folder}: tests/{folder}: {meaning}")
    config.addinivalue_line("markers", f"quick: {', '.join(tiers.FOLDERS)}, in few cases and without what is `slow`")
    config.addinivalue_line("markers", "slow: takes more than a second, or compiles for one test alone; not in `quick`")
    config.addinivalue_line("markers", "waits_for(*jobs): jobs of background.py that the test wants the results of")
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.option.all_kernels = True  # of workers too
        if not (config.option.all or config.option.markexpr or config.option.keyword):
            config.option.markexpr = QUICK
    is_quick = tiers.IS_QUICK = config.option.markexpr == QUICK
    tiers.HAS_FEW_ENCODINGS = is_quick or config.option.few_encodings
    properties.load_profile(config.getoption("--hypothesis-profile"), quick=is_quick)
    if config.option.hostile_cases is None:
        config.option.hostile_cases = tiers.HOSTILE_CASES if is_quick else 1250
    target = config.getoption("--cpu-target")
    if target is not None:
        isa.use_libraries(target=target)
    if config.getoption("--emulate-amx"):
        from support import amx_emulation

        amx_emulation.install()
        config.option.q_dtype = "bfloat16"
    if (dtype := config.getoption("--q-dtype")) is not None:
        from support import narrowed

        narrowed.install(dtype)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (dtype := config.getoption("--q-dtype")) is not None:
        from support import narrowed

        narrowed.deselect_others(dtype, config, items)
    if config.option.few_encodings:
        of_others = [item for item in items if tiers.is_of_another_encoding(item)]
        config.hook.pytest_deselected(items=of_others)
        items[:] = [item for item in items if item not in of_others]
    for item in items:
        item.add_marker(item.path.relative_to(TESTS).parts[0])
    quick = tiers.quick_tests([item for item in items if item.path.relative_to(TESTS).parts[0] in tiers.FOLDERS])
    for item in quick:
        item.add_marker(QUICK)
    _COUNTS.append((len(quick), len(items)))
    items.sort(key=_start_order)


def _start_order(item: pytest.Item) -> tuple[bool, int, int]:
    """Tests that wait for background jobs come last, then by LONGEST_FIRST, then by folder."""
    file = item.path.relative_to(TESTS)
    waits = item.get_closest_marker("waits_for") is not None
    early = LONGEST_FIRST.index(file.as_posix()) if file.as_posix() in LONGEST_FIRST else len(LONGEST_FIRST)
    folders = ("engine", "ops", "mojo", "api", "unit")
    return waits, early, folders.index(file.parts[0]) if file.parts[0] in folders else len(folders)


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.items:  # not the process that only hands out tests to workers
        from support import compiles, kernels_once, mojo_package

        compiles.install()
        mojo_package.build_once()
        worker = os.environ.get("PYTEST_XDIST_WORKER")
        kernels_once.install(
            of_all_tests=session.config.option.all_kernels, worker=worker and int(worker.removeprefix("gw"))
        )
    if session.config.option.collectonly or session.config.option.dist != "no":  # workers start what they need
        return
    jobs = []
    for item in session.items:
        if any(marker.args and marker.args[0] for marker in item.iter_markers("skipif")):
            continue  # a skipped test needs no job
        jobs += [job for marker in item.iter_markers("waits_for") for job in marker.args]
    for job in sorted(jobs, key=lambda job: not job.is_long):
        job.start()


_COMPILED: list[dict[str, list[float]]] = []
"""By each worker, as `compiles.noted`."""
_COUNTS: list[tuple[int, int]] = []
"""By each worker, or this process: the tests of the quick tier among those that it collected, and the latter."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    from support import compiles

    background.stop()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput |= {"compiled": compiles.noted(), "counts": _COUNTS}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    output = getattr(node, "workeroutput", {})  # none of a worker that crashed
    if "compiled" in output:
        _COMPILED.append(output["compiled"])
        _COUNTS.extend(output["counts"])


def pytest_report_header(config: pytest.Config) -> str | None:
    return f"tier: {QUICK}; `pytest --all` runs every test" if config.option.markexpr == QUICK else None


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    from support import compiles

    terminalreporter.write_line(compiles.in_words([compiles.noted(), *_COMPILED]))
    if config.option.markexpr == QUICK and _COUNTS:
        quick, count = _COUNTS[-1]
        terminalreporter.write_line(f"tier: {QUICK}, {quick} of {count} tests; `pytest --all` runs every test")
