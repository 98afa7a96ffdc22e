"""The page of `paged-kv inspect --html` in a browser without a window; `.ci/run` runs this where Chromium is."""

import html as markup
import json
import re
import shutil
import subprocess

import pytest

from paged_kv.cli import _run

TRACE = [
    {"format": "paged-kv page events 1", "pages": 6, "page_size": 4},
    {"seconds": 0.0, "event": "allocated", "request": "0.0", "pages": [0, 1, 2]},
    {"seconds": 0.5, "event": "shared", "request": "</script><b>1", "pages": [0, 1]},
    {"seconds": 1.0, "event": "released", "request": "0.0", "pages": [0, 1, 2]},
]
PROBE = """
<script>
const canvas = document.getElementById("owners"), context = canvas.getContext("2d");
const at = (x, y) => Array.from(context.getImageData(x, y, 1, 1).data.slice(0, 3));
const box = canvas.getBoundingClientRect();
canvas.dispatchEvent(new MouseEvent("mousemove", {clientX: box.left + box.width * 0.75, clientY: box.top + 2}));
document.body.dataset.probe = JSON.stringify(
  {early: at(1, 0), late: at(canvas.width - 2, 0), free: at(1, 5), told: document.getElementById("told").textContent});
</script>
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The page's DOM after its script has run, and what a second script found in it."""
    folder = tmp_path_factory.mktemp("page")
    trace, page = folder / "trace", folder / "page.html"
    trace.write_text("".join(json.dumps(record) + "\n" for record in TRACE))
    assert _run(["inspect", str(trace), "--html", str(page)]) == 0
    page.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert browser is not None, "a browser is needed: apt-get install chromium"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, json.loads(markup.unescape(re.search(r'data-probe="([^"]*)"', done.stdout)[1]))


def test_the_script_runs_to_its_end(shown):
    assert 'data-ready="yes"' in shown[0]
    assert "<div>6 pages of 4 tokens, 2 samples in 1.00 s</div>" in shown[0]


def test_the_map_is_painted(shown):
    colours = shown[1]
    assert colours["early"] != colours["late"]  # one owner, then two
    assert colours["free"] == [0xE9, 0xEC, 0xEF]


def test_pointing_at_a_page_tells_of_it(shown):
    assert re.fullmatch(r"page 0, 0\.7\d\d s: owners: 2", shown[1]["told"])
