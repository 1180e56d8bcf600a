"""Each page of the built site in headless Chromium: it fits the window, formulas are typeset, nothing is missing.

`make docs` builds the site and runs this with SITE=site.
"""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

SITE = Path(os.environ.get("SITE", "no site")).resolve()
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
BROWSER, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
WIDTHS = WIDE, NARROW = 1300, 400
pytestmark = [
    pytest.mark.skipif(not PAGES, reason="SITE names no built site: make docs builds one and opens its pages"),
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="Chromium or its driver is missing (Debian: chromium-driver)"),
]
# Waits until everything is there.
SETTLE = """
const done = arguments[0];
const pause = () => new Promise(resume => setTimeout(resume, 20));
const still = document.createElement("style");
still.textContent = "* { animation: none !important; transition: none !important; }";
async function settle() {
  while (document.readyState !== "complete") await pause();
  document.head.append(still);
  if (document.querySelector(".arithmatex")) {
    while (!window.MathJax?.startup?.promise) await pause();
    await MathJax.startup.promise;
  }
  for (const picture of document.images) picture.loading = "eager";
  const found = await Promise.all([...document.images].map(e => e.decode().then(() => [], () => [e.src])));
  const text = document.querySelector("article").cloneNode(true);
  text.querySelectorAll("code, pre, .arithmatex").forEach(e => e.remove());
  return {
    missing: found.flat(),
    undescribed: [...document.images].filter(e => !e.alt && !e.closest("a")).map(e => e.src),
    dollars: text.textContent.match(/.{0,30}[$].{0,30}/g) || [],
    loaded: performance.getEntriesByType("resource").map(e => e.name),
    links: [...document.querySelectorAll("a[href]")].map(e => e.href),
    names: [...document.querySelectorAll("[id]")].map(e => e.id),
  };
}
settle().then(done, error => done({error: String(error)}));
"""
# What does not fit, unless it is inside something that scrolls; the formulas that cannot be read.
MEASURE = """
const sides = e => getComputedStyle(e).overflowX;
const scrolls = e => e !== document.body && (/auto|scroll/.test(sides(e)) || scrolls(e.parentElement));
const outside = e => e.checkVisibility() && (box => box.width && (box.left < -1 || box.right > innerWidth + 1))(
  e.getBoundingClientRect());
const isRead = e => e && e.getBoundingClientRect().width > 0.8 * e.width.baseVal.value
  && !e.querySelector("[data-mml-node=merror]");
const content = document.querySelector("article"), all = selector => [...content.querySelectorAll(selector)];
return {
  overflow: Math.max(0, document.documentElement.scrollWidth - innerWidth),
  beyond: all("*").filter(e => outside(e) && !scrolls(e.parentElement)).map(e => e.outerHTML.slice(0, 200)),
  unread: all(".arithmatex").filter(e => !isRead(e.querySelector("mjx-container > svg"))).map(e => e.textContent),
  tables: all(".md-typeset__scrollwrap").filter(e => e.scrollWidth > e.clientWidth + 1)
    .map(e => e.innerText.slice(0, 80)),
};
"""


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 64  # a page asks for all of its files at once


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    """The address of the site."""
    server = Server(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is missing: make docs installs it")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "SEVERE"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(120)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def opened(browser: Any, root: str) -> Any:
    """What Chromium finds on a page, and at each width of the window."""

    @functools.cache
    def look(page: str) -> dict[str, Any]:
        browser.get(root + page)
        found = browser.execute_async_script(SETTLE)
        assert "error" not in found, found
        for width in WIDTHS:
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            found[width] = browser.execute_script(MEASURE)
        return found | {"log": [entry["message"] for entry in browser.get_log("browser")]}

    return look


@pytest.mark.parametrize("page", PAGES)
def test_page(opened: Any, root: str, page: str) -> None:
    found = opened(page)
    for width in WIDTHS:
        assert found[width] == {"overflow": 0, "beyond": [], "unread": [], "tables": found[width]["tables"]}, width
    assert found[WIDE]["tables"] == []  # in a narrow window they scroll
    assert {kind: found[kind] for kind in ("missing", "undescribed", "dollars", "log") if found[kind]} == {}
    assert [address for address in found["loaded"] if not address.startswith(root)] == []


def test_links_have_targets(opened: Any, root: str) -> None:
    names = {page: set(opened(page)["names"]) for page in PAGES}
    broken = []
    for page in PAGES:
        for address in (link for link in opened(page)["links"] if link.startswith(root)):
            target, name = urldefrag(address)
            path = unquote(urlsplit(target).path).lstrip("/") or "index.html"
            if not (SITE / path).is_file() or (name and unquote(name) not in names.get(path, ())):
                broken.append((page, address))
    assert not broken
