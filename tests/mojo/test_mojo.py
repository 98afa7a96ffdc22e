"""Runs the Mojo tests."""

import pytest

from support.mojo_programs import mojo_tests, outcomes, run_program, words_of_the_compiler


@pytest.mark.slow
@pytest.mark.parametrize(("file", "function"), mojo_tests())
def test_in_mojo(file, function):
    found, output = outcomes()
    assert found.get((file, function)) == "PASS", output


def test_the_package_compiles_without_a_warning():
    assert "warning:" not in words_of_the_compiler()


@pytest.mark.slow
def test_the_loops_of_the_bound_run():
    result = run_program("../../benchmarks/loops.mojo", "1")
    assert result.returncode == 0, result.stderr
    header, *lines = result.stdout[result.stdout.index("loop |") :].splitlines()
    assert header.count("|") == 3
    assert all(line.count("|") == 3 and float(line.split("|")[1].split()[0]) > 0 for line in lines)
    assert len(lines) >= 3 * 5 + 2
