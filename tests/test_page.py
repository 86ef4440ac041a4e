"""The page at `/` in a headless Chromium against real servers; skipped where Chromium or its driver is missing."""

from __future__ import annotations

import json
import shutil
import time
from urllib.parse import urlsplit

import pytest
from serving import ServerProcess, save_scripted_pair

selenium = pytest.importorskip("selenium", reason="needs selenium")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs chromium and chromedriver")
KEY = "sesame-open"
HTML = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
INLINE = {"textContent": "document.title = 'owned'"}


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def server():
    """The bundled pair, which has no chat template."""
    with ServerProcess("--model", "demo", "--block-size", "16") as process:
        yield process


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """A pair with a chat template that reasons, answers with HTML and calls a tool; behind a key."""
    folder, draft = save_scripted_pair(tmp_path_factory.mktemp("scripted"))
    words = folder / "tokenizer.json"
    words.write_text(words.read_text().replace("It is 4.", HTML))
    with ServerProcess("--model", folder, "--draft-model", draft, env={"DFLASH_API_KEY": KEY}) as process:
        yield process


class Page:
    """What a person does and sees."""

    def __init__(self, browser, server):
        self.browser, self.server = browser, server
        for log in ("browser", "performance"):
            browser.get_log(log)
        browser.get(f"{server.url}/")
        self.until(lambda: "connecting" not in self.text("model"))

    def __getitem__(self, name):
        return self.browser.find_element(By.ID, name)

    def text(self, name):
        return self[name].get_property("textContent")

    def shown(self, kind):
        return [e.get_property("textContent") for e in self.browser.find_elements(By.CSS_SELECTOR, kind)]

    def until(self, condition, seconds=120):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"the page shows: {self.browser.find_element(By.TAG_NAME, 'body').text}"
            time.sleep(0.02)

    def set(self, name, value):
        self[name].clear()
        self[name].send_keys(value)

    def send(self, text, max_tokens=40):
        self.set("max-tokens", str(max_tokens))
        self["prompt"].send_keys(text.replace("\n", Keys.SHIFT + Keys.ENTER + Keys.NULL), Keys.ENTER)

    @property
    def idle(self):
        return self["send"].is_enabled()

    def requests(self):
        entries = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        return [e["params"]["request"]["url"] for e in entries if e["method"] == "Network.requestWillBeSent"]

    def complaints(self):
        return [
            entry["message"] for entry in self.browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")
        ]


def test_a_message_is_answered_with_figures_and_a_chart(browser, server):
    page = Page(browser, server)
    assert page.text("model") == "demo"
    assert page.text("draft") == "draft demo"
    assert "no chat template" in page.text("note")
    page.send("def read(path):\n", max_tokens=60)
    page.until(lambda: page.idle and page.text("draft").startswith("draft used, block 16"))
    (answer,) = page.shown("article.assistant pre")
    assert answer == server.complete("def read(path):\n", max_tokens=60)["choices"][0]["text"]
    figures = server.complete("def read(path):\n", max_tokens=60)["dflash"]
    assert float(page.text("tau")) == pytest.approx(figures["tau"], abs=0.006)
    assert float(page.text("speed")) > 0
    assert (int(page.text("rounds")), int(page.text("kept"))) == (figures["rounds"], figures["accepted"])
    heights = [float(bar.get_attribute("height")) for bar in browser.find_elements(By.CSS_SELECTOR, "#chart .accepted")]
    assert (len(heights), sum(heights)) == (figures["rounds"], figures["accepted"])
    assert page["chart"].get_attribute("aria-label").count("/15") > 0
    assert page.complaints() == []
    hosts = {urlsplit(url).netloc for url in page.requests() if not url.startswith("data:")}
    assert hosts == {f"127.0.0.1:{server.port}"}


def test_text_streams_in_and_stop_ends_it(browser, server):
    page = Page(browser, server)
    page.send("class Node:\n", max_tokens=2000)
    page.until(lambda: page.shown("article.assistant pre")[:1] > [""])
    assert not page.idle
    seen = len(page.shown("article.assistant pre")[0])
    page.until(lambda: len(page.shown("article.assistant pre")[0]) > seen)
    page["stop"].click()
    page.until(lambda: page.idle)
    assert "stopped" in page.shown("article.assistant")[0]
    server.until_idle()
    page.send("x", max_tokens=3)
    page.until(lambda: page.idle and len(page.shown("article.assistant")) == 2)
    page["new"].click()
    assert page.shown("article") == []


def test_a_wrong_key_then_reasoning_and_an_answer_of_html(browser, chatty):
    page = Page(browser, chatty)
    assert page.text("error") == "This server needs an API key."
    page.set("key", "guess")
    page.send("2+2?")
    page.until(lambda: page.text("error") == "This server does not take that API key.")
    page.until(lambda: page.idle)
    assert page["prompt"].get_property("value") == "2+2?", "what could not be sent is given back"
    page.set("key", KEY + Keys.TAB)
    page.until(lambda: page.text("model") == "target")
    assert not page["error"].is_displayed()
    assert not page["note"].is_displayed()
    page["prompt"].send_keys(Keys.ENTER)
    page.until(lambda: page.idle and page.shown("article.assistant"))
    thoughts, answer = page.shown("article.assistant pre")
    assert thoughts == "Two and two."
    assert answer.startswith(HTML)
    assert "add(" in answer
    assert browser.find_elements(By.CSS_SELECTOR, "main img, main script") == []
    assert browser.title == "dflash-mlx"


def test_what_is_written_stays_text_and_no_inline_script_runs(browser, server):
    page = Page(browser, server)
    page.send(HTML, max_tokens=2)
    page.until(lambda: page.idle and page.shown("article.assistant"))
    assert page.shown("article.user pre") == [HTML]
    assert browser.find_elements(By.CSS_SELECTOR, "main img, main script") == []
    browser.execute_script(
        "document.body.append(Object.assign(document.createElement('script'), arguments[0]))", INLINE
    )
    assert browser.title == "dflash-mlx"
    assert "Content Security Policy" in page.complaints()[0]


def test_the_page_can_be_used_by_keyboard_and_on_a_narrow_screen(browser, server):
    page = Page(browser, server)
    assert browser.switch_to.active_element.get_attribute("id") == "prompt"
    order = []
    for _ in range(4):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        order.append(browser.switch_to.active_element.get_attribute("id"))
    assert order[:3] == ["temperature", "max-tokens", "send"]
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 340, "height": 640, "deviceScaleFactor": 1, "mobile": True}
    )
    assert browser.execute_script("return document.documentElement.scrollWidth <= 340")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert page.idle
