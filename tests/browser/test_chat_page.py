"""The server's page in a browser without a window; `.ci/run` runs this where Chromium is."""

import pytest

from browser.browser_page import browser
from support.guarded_server import guarded

SEND = 'by("message").value = "In the beginning"; by("ask").requestSubmit();'
REPLY = 'document.querySelector(".assistant:last-child .text:last-child").textContent'


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page, which has been given the key."""
    folder = tmp_path_factory.mktemp("server")
    with guarded(folder) as server, browser(folder / "profile") as tab:
        tab.call("Page.navigate", url=f"http://127.0.0.1:{server.port}/")
        tab.wait('document.readyState === "complete" && !document.getElementById("login").hidden')
        tab.run(f'by("key").value = "{server.key}"; document.getElementById("login").requestSubmit()')
        tab.wait('by("login").hidden && model === "demo"')
        yield tab


def test_a_text_streams_and_stops_and_its_pages_are_shown(page):
    page.run('by("max_tokens").value = 3000; by("seed").value = 1;' + SEND)
    first = page.wait(REPLY)
    assert page.wait(f"{REPLY}.length > {len(first)} && {REPLY}").startswith(first)
    assert page.wait('by("requests").rows.length') == 1
    page.run('by("stop").click(); new Promise(resolve => setTimeout(resolve, 500))')
    assert page.run("running === null")  # all of it takes 20 s
    said = page.run(REPLY)
    page.wait('by("requests").rows.length === 0')
    assert page.run(REPLY) == said
    painted = "Array.from(by('owners').getContext('2d').getImageData(0, 0, 1, 1).data.slice(0, 3))"
    assert page.wait('by("counts").textContent.startsWith("0 used")')
    assert page.run(painted)


def test_an_earlier_message_is_edited_and_sent_again(page):
    page.run('by("clear").click(); by("max_tokens").value = 4;' + SEND)
    page.wait("running === null && messages.length === 2")
    page.run('document.querySelector(".user button").click(); by("message").value = "And"; by("ask").requestSubmit()')
    page.wait("running === null")
    assert page.run("messages.map(each => each.role).join()") == "user,assistant"
    assert page.run("messages[0].content") == "And"
