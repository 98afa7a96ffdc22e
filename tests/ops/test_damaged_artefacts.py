"""A real library, damaged: a process that loads it would crash. Compiled packages: unit/test_kernel_library.py."""

import os
import subprocess
import sys

import pytest

CALL = """
import numpy as np
import paged_kv
v, s = np.ones((3, 2, 8), np.float32), np.zeros((3, 2), np.float32)
merged, lse = paged_kv.merge_state(v, s, v, s)
assert (np.asarray(merged) == 1).all() and (np.asarray(lse) == 1).all()
"""


@pytest.mark.slow
def test_damaged_artefacts_are_made_again(tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}

    def call():
        command = [sys.executable, "-W", "error", "-c", CALL]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stderr[-2000:]
        files = [path for path in (tmp_path / "paged-kv").rglob("*") if path.is_file()]
        return {path: path.read_bytes() for path in files}

    whole = call()
    assert sorted({path.suffix for path in whole}) == [".library", ".so"]
    written = {path: path.stat().st_ino for path in whole}
    assert call() == whole
    assert {path: path.stat().st_ino for path in whole} == written  # read, not made again
    damaged = {}
    for path, content in whole.items():
        half = len(content) // 2
        damaged[path] = content[:half] + bytes(byte ^ 255 for byte in content[half : half + 64]) + content[half + 64 :]
        path.write_bytes(damaged[path])
    made = call()
    assert made.keys() == whole.keys()
    assert all(made[path] != damaged[path] for path in made)
    assert call() == made
