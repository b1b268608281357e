"""The page in Debian's Chromium: a chat, the stop button, moving charts, nothing unsafe, nothing from elsewhere."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import sync_playwright
from server_process import Server, started

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None and os.environ.get("KAIROX_REQUIRE_CHROMIUM") != "1":
    pytest.skip("there is no Chromium: apt-get install chromium", allow_module_level=True)

pytestmark = pytest.mark.slow
WIDTHS = {"wide": (1280, 800), "narrow": (390, 844)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as api:
        browser = api.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=WIDTHS)
def page(request: pytest.FixtureRequest, browser: Any, server: Server) -> Iterator[Any]:
    """The page once the server is known; fails where it wrote an error or asked another host."""
    width, height = WIDTHS[request.param]
    context = browser.new_context(viewport={"width": width, "height": height})
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: message.type in ("error", "warning") and problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: (problems.append("a dialog"), dialog.dismiss()))
    hosts: set[str] = set()
    page.on("request", lambda sent: hosts.add(urlsplit(sent.url).netloc))
    page.set_default_timeout(30_000)
    page.goto(server.url)
    page.wait_for_selector("#status[data-state=ready]")
    yield page
    sideways = page.evaluate("document.documentElement.scrollWidth > innerWidth")
    context.close()
    server.idle()
    assert problems == [] and hosts == {f"127.0.0.1:{server.port}"}
    assert not sideways


def ask(page: Any, text: str) -> None:
    """Type a message and send it, with the keyboard alone."""
    page.focus("#input")
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def settings(page: Any, **values: str) -> None:
    page.click("#open-settings")
    for name, value in values.items():
        page.fill(f"#settings [name={name}]", value)
    page.click("#close-settings")


def test_a_chat_there_and_back(page: Any):
    settings(page, temperature="0", system="be kind", max_tokens="100")
    sent: list[dict] = []
    page.on(
        "request", lambda r: r.url.endswith("/v1/chat/completions") and sent.append(json.loads(r.post_data))
    )
    ask(page, "hi")
    page.wait_for_selector(".foot")
    assert page.inner_text("#messages .text") == "Hello, world!"
    assert "4 tokens" in page.inner_text(".foot") and "cut off" not in page.inner_text(".foot")
    assert [m["role"] for m in sent[0]["messages"]] == ["system", "user"]
    assert sent[0]["temperature"] == 0 and sent[0]["max_tokens"] == 100 and "seed" not in sent[0]
    ask(page, "again")
    page.wait_for_selector("#messages li:nth-child(4) .foot")
    assert [m["content"] for m in sent[1]["messages"]] == ["be kind", "hi", "Hello, world!", "again"]
    page.click("#new-chat")
    assert page.inner_text("#messages") == "" and page.is_visible("#empty")


def test_the_stop_button_and_escape_end_the_work(page: Any, server: Server):
    settings(page, temperature="0")
    for how in ("button", "key"):
        ask(page, "loop")
        page.wait_for_selector("#messages li:last-child .text:has-text('x')")
        server.process.send_signal(signal.SIGSTOP)  # the tiny model would fill its context before the click
        try:
            assert not page.is_visible("#send")
            page.click("#stop") if how == "button" else page.keyboard.press("Escape")
            page.wait_for_selector("#messages li:last-child .foot")
        finally:
            server.process.send_signal(signal.SIGCONT)
        assert "stopped" in page.inner_text("#messages li:last-child .foot")
        server.idle()
    assert page.is_visible("#send") and page.evaluate("document.activeElement.id") == "input"


def test_markdown_is_shown_and_markup_is_not(page: Any):
    settings(page, temperature="0")
    ask(page, "markdown")
    page.wait_for_selector(".foot")
    assert page.inner_text(".text h3") == "Title"
    assert page.inner_text(".text li strong") == "bold" and page.inner_text(".text li code") == "code"
    assert page.locator(".text img, .text a, .text script").count() == 0
    assert "<img src=x onerror=alert(1)>" in page.inner_text(".text")
    assert "[a](javascript:alert(1))" in page.inner_text(".text")


def test_the_renderer_takes_everything_as_text(page: Any):
    source = (
        "1. one\n2. two\n\n> *q*\n\n```html\n<b>x</b>\n```\n\n---\n[safe](https://example.org) `<i>` \\<u>"
    )
    html = page.evaluate(
        """async (source) => {
            const { render } = await import('/static/markdown.js');
            const box = document.createElement('div');
            box.append(...render(source));
            return box.innerHTML;
        }""",
        source,
    )
    assert "<ol><li>one</li><li>two</li></ol><blockquote><em>q</em></blockquote>" in html
    assert "<code>&lt;b&gt;x&lt;/b&gt;</code>" in html and "<hr>" in html
    assert '<a href="https://example.org" target="_blank" rel="noopener noreferrer">safe</a>' in html
    assert "<b>" not in html and "<u>" not in html and "<i>" not in html


def test_the_live_view_moves(page: Any):
    settings(page, temperature="0")
    ask(page, "loop")
    page.wait_for_selector("#stop:visible")
    if page.is_visible("#show-live"):
        page.click("#show-live")
    pictures = []
    for _ in range(2):
        page.wait_for_timeout(900)
        pictures.append(
            [
                page.evaluate(f"document.getElementById('{name}').toDataURL()")
                for name in ("c-times", "c-hits")
            ]
        )
        assert float(page.inner_text("#n-speed")) > 0 and page.inner_text("#n-hits").endswith("%")
    assert all(before != after for before, after in zip(*pictures, strict=True))
    assert page.inner_text("#n-queue") == "1 + 0"
    assert "2 layers" in page.inner_text("#heat-note")
    assert page.locator("#budget-bar span").count() >= 4
    page.keyboard.press("Escape")
    page.hover("#c-heat")
    assert "% resident" in page.inner_text("#heat-note") and "layer" in page.inner_text("#heat-note")


def test_the_theme_follows_the_system_until_it_is_chosen(page: Any):
    ground = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="light")
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(ground)
    assert light != dark
    page.click("#theme")
    assert page.evaluate(ground) == light
    page.reload()
    page.wait_for_selector("#status[data-state=ready]")
    assert page.evaluate(ground) == light
    page.click("#theme")
    page.emulate_media(color_scheme="light")
    assert page.evaluate(ground) == dark


def test_it_asks_for_a_key_and_waits_for_the_model(browser: Any, scripted_model: Path, tmp_path: Path):
    flags = ("--gpu-cache-neurons", "8", "-c", "256")
    with started(scripted_model, tmp_path / "log", *flags, ready=False, KAIROX_API_KEY="sesame") as server:
        page = browser.new_page()
        page.goto(server.url)
        page.wait_for_selector("#settings[open] [name=key]:focus")
        page.keyboard.type("sesame")
        page.keyboard.press("Enter")
        page.wait_for_selector("#status[data-state=ready]", timeout=60_000)
        ask(page, "hi")
        page.wait_for_selector(".foot")
        page.close()
