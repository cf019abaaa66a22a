"""Both pages in a real browser: what people see and can do, on a desk and on a telephone."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bot_kit import ADVICE, ANALYSIS, BOOTS, HUMAN, STAFF_TOKEN, TENT, YES, Bot, wait_until
from upstream import Upstream

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium and chromedriver on this machine"),
]

MARKUP = "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script><b>bold</b>"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1200,850",
)  # fmt: skip


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


class Page:
    """The browser, in words of the pages."""

    def __init__(self, driver: Any, pictures: Path) -> None:
        self.driver, self._pictures = driver, pictures

    def open(self, url: str, width: int = 1200, height: int = 850) -> None:
        """A fresh visit, as somebody nobody knows yet."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get("about:blank")
        self.driver.get(url)
        self.driver.execute_script("sessionStorage.clear()")
        self.driver.get("about:blank")
        self.driver.get(url)

    def all(self, selector: str) -> list[Any]:
        return [one for one in self.driver.find_elements("css selector", selector) if one.is_displayed()]

    def one(self, selector: str) -> Any:
        wait_until(lambda: self.all(selector), selector)
        return self.all(selector)[0]

    def texts(self, selector: str) -> list[str]:
        return self.driver.execute_script(  # type: ignore[no-any-return]
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)", selector
        )

    def until(self, selector: str, words: str) -> None:
        wait_until(lambda: any(words in text for text in self.texts(selector)), f"{words!r} in {selector}")

    def button(self, text: str) -> Any:
        wait_until(lambda: [one for one in self.all("button") if one.text == text], f"button {text}")
        return next(one for one in self.all("button") if one.text == text)

    def say(self, text: str) -> None:
        """Type it and press Enter."""
        self.one("#say").send_keys(text + "\n")

    def sign_in(self, name: str) -> None:
        self.one("#samples summary").click()
        self.button(name).click()
        self.one("#say")

    def picture(self, name: str) -> None:
        self.driver.save_screenshot(str(self._pictures / f"{name}.png"))

    def check(self) -> None:
        """Nothing sticks out, nothing is without a name, and no script failed or was refused."""
        wide, inner = self.driver.execute_script("return [document.scrollingElement.scrollWidth, innerWidth]")
        assert wide <= inner, f"the page is {wide} wide in a window of {inner}"
        nameless = self.driver.execute_script(
            "return [...document.querySelectorAll('input, textarea, button, summary')]"
            ".filter((one) => !(one.labels?.length || one.innerText || one.hidden || !one.checkVisibility()))"
            ".map((one) => one.outerHTML)"
        )
        assert nameless == []
        errors = [one["message"] for one in self.driver.get_log("browser") if one["level"] == "SEVERE"]
        assert errors == []


@pytest.fixture
def page(chromium: Any, tmp_path: Path) -> Page:
    pictures = Path(os.environ.get("SUPPORT_PICTURES", tmp_path))
    pictures.mkdir(exist_ok=True)
    chromium.get_log("browser")
    return Page(chromium, pictures)


def test_a_return_and_what_staff_sees_of_it(page: Page, start: Callable[..., Bot]) -> None:
    bot = start()
    page.open(bot.url)
    page.one("#samples")
    page.picture("sign-in")
    page.sign_in("Nadia Okafor")
    page.say(BOOTS)
    page.until("#log .bot", "89.00 EUR")
    page.say(YES)
    page.until("#log .bot", "'return': 'R1'")
    page.picture("customer")
    page.check()
    source = page.driver.page_source
    assert ADVICE not in source
    assert ANALYSIS not in source
    assert page.texts("#log .from") == ["You", "Assistant", "You", "Assistant"]
    # Come back: the conversation is there, and typing goes on where it left off.
    page.driver.refresh()
    page.until("#log .bot", "'return': 'R1'")

    page.open(f"{bot.url}/staff#{STAFF_TOKEN}")
    page.until("#threads", "Nadia Okafor")
    assert STAFF_TOKEN not in page.driver.current_url
    page.one("#threads button").click()
    page.until("#log .call", "start_return")
    page.until("#log .held", "Not run yet")
    assert ADVICE not in page.driver.page_source
    page.picture("staff")
    page.one("#log .advice summary").click()
    page.until("#log .advice", ADVICE)
    assert ANALYSIS in page.one("#log .advice").text
    page.picture("staff-advice")
    page.check()


def test_a_hand_over_in_two_pages(page: Page, start: Callable[..., Bot]) -> None:
    bot = start()
    page.open(bot.url)
    page.sign_in("Tomas Lindqvist")
    customer = page.driver.current_window_handle
    page.say(TENT)
    page.until("#state", "A colleague is looking at this.")
    page.picture("customer-waiting")
    page.driver.switch_to.new_window("tab")
    page.open(f"{bot.url}/staff#{STAFF_TOKEN}")
    page.until("#threads .badge", "1 waiting")
    page.one("#threads button").click()
    page.until(".handover", "Approve a refund of 399.00 EUR?")
    page.one(".handover textarea").send_keys("Enjoy the next trip.")
    page.picture("staff-handover")
    page.button("Approve").click()
    page.until(".handover.done", "Approved: Enjoy the next trip.")
    page.until("#log .bot", "'return': 'R1'")
    page.until("#thread-state", "Nothing to do.")
    assert page.texts("#threads .badge") == []
    page.check()
    page.driver.close()
    page.driver.switch_to.window(customer)
    page.until("#log .bot", "'return': 'R1'")
    page.until("#log .staff", "Enjoy the next trip.")
    page.picture("customer-answered")


def test_markup_is_text_wherever_it_comes_from(page: Page, start: Callable[..., Bot], monkeypatch: Any) -> None:
    from bot_kit import SCRIPT

    from caddie_sdk.testing import calls, tool_call

    cancel = calls(tool_call("cancel_order", {"order_id": MARKUP, "reason": MARKUP}))
    ask = calls(tool_call("hand_over", {"summary": MARKUP}), text=MARKUP)
    monkeypatch.setitem(SCRIPT, HUMAN, [cancel, cancel, ask, f"Answer {MARKUP}"])
    with Upstream(lambda body: f"Analysis: {MARKUP}\nAdvices for next steps: {MARKUP}") as critic:
        bot = start(critic=critic.url)
        page.open(bot.url)
        page.sign_in("Nadia Okafor")
        page.say(f"Hello {MARKUP}")
        page.until("#log .bot", f"You said: Hello {MARKUP}")
        page.say(HUMAN)
        page.until("#state", "A colleague is looking at this.")
        bot.answers("C1", "reply", f"Words {MARKUP}")
        page.until("#log .staff", f"Words {MARKUP}")
        page.until("#log .bot", f"Answer {MARKUP}")
        assert page.driver.title == "Support"
        page.open(f"{bot.url}/staff#{STAFF_TOKEN}")
        page.one("#threads button").click()
        page.until(".handover", f"Answered: Words {MARKUP}")
        page.one("#log .advice summary").click()
        page.until("#log .advice", MARKUP)
        assert page.driver.title == "Support, staff"
        found = page.driver.execute_script("return document.querySelectorAll('main img, main script, main b').length")
        assert found == 0
        page.picture("staff-markup")
        page.check()


def test_on_a_telephone(page: Page, start: Callable[..., Bot]) -> None:
    bot = start()
    page.open(bot.url, 360, 740)
    page.one("#samples")
    page.picture("narrow-sign-in")
    page.check()
    page.sign_in("Nadia Okafor")
    page.say(BOOTS)
    page.until("#log .bot", "89.00 EUR")
    page.say("Averylongwordwithoutanyplacetobreakit" * 4)
    page.until("#log .bot", "You said: Averylong")
    page.picture("narrow-customer")
    page.check()
    box = page.one("#say").rect
    send = page.button("Send").rect
    assert box["y"] + box["height"] <= 740
    assert send["x"] + send["width"] <= 360
    assert send["height"] >= 40
    page.open(f"{bot.url}/staff#{STAFF_TOKEN}", 360, 740)
    page.one("#threads button").click()
    page.until("#log .bot", "89.00 EUR")
    page.picture("narrow-staff")
    page.check()


def test_the_server_is_killed_before_an_open_page(page: Page, start: Callable[..., Bot]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    bot = start(options=["--port", port])
    page.open(bot.url)
    page.sign_in("Nadia Okafor")
    page.say(BOOTS)
    page.until("#log .bot", "89.00 EUR")
    bot.kill()
    page.until("#state", "The connection is lost.")
    page.say(YES)
    page.until("#say-error", "Not sent: the server cannot be reached.")
    assert page.one("#say").get_attribute("value") == YES
    page.picture("customer-offline")
    start(options=["--port", port])
    page.one("#say-form button").click()
    page.until("#log .bot", "'return': 'R1'")
    assert page.texts("#log .customer .text") == [BOOTS, YES]
    assert page.texts("#say-error") == [""]


def test_wrong_words_at_the_door(page: Page, start: Callable[..., Bot]) -> None:
    bot = start()
    page.open(bot.url)
    page.one("#email").send_keys("nadia@shop.example")
    page.one("#postcode").send_keys("1\n")
    page.until("#sign-in-error", "We know no customer with this e-mail address and postcode.")
    page.picture("sign-in-refused")
    page.open(f"{bot.url}/staff")
    page.one("#token").send_keys("wrong\n")
    page.until("#sign-in-error", "The staff token is missing or wrong.")
    assert page.all("#desk") == []
    page.picture("staff-refused")
