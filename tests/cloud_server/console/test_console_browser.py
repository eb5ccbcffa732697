"""The console's page in a browser: click paths, live updates, keyboard, accessibility, and that it is offline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from benchmarks.console.browser import chromium, complaints, emulate
from benchmarks.console.made_fleet import MadeFleet
from cloud_server.identity import audit_log
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Round
from cloud_server.records import update_record
from tests.support.paths import ROOT
from tests.support.programs import Programs, metafleet, programs_in
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium", "chromedriver")]
VIEWS = ("fleet", "rounds", "rounds/6", "learning", "cost", "log", "flash", "devices/attic-01")
AXE = ROOT / "tests" / "support" / "axe" / "axe.min.js"


def address(programs: Programs, *arguments: object) -> str:
    program = programs.start(*metafleet("console", *arguments, "--port", 0))
    program.wait_for("Ctrl-C ends the console")
    return next(line for line in program.text().splitlines() if line.startswith("http"))


class Page:
    """The console of a generated fleet in a browser."""

    def __init__(self, driver: Chrome, fleet: MadeFleet, url: str):
        self.driver, self.fleet, self.url = driver, fleet, url

    def open(self, view: str) -> None:
        self.driver.get("about:blank")
        self.driver.get(f"{self.url}#/{view}")
        self.until(lambda: self.all("#main h1"))

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def one(self, css: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def of(self, css: str, *asked: Callable[[WebElement], Any]) -> tuple[Any, ...]:
        """What is ``asked`` of an element, of one and the same: the page may replace it at any time."""
        def found() -> tuple[Any, ...]:
            one = self.one(css)
            return tuple(each(one) for each in asked)

        return tuple(self.until(found))

    def click(self, css: str) -> None:
        self.of(css, lambda one: one.click())

    def until(self, condition: Callable[[], Any]) -> Any:
        return WebDriverWait(self.driver, PATIENCE_S, 0.05, [Exception]).until(lambda _: condition())

    def text_of(self, css: str) -> str:
        return str(self.of(css, lambda one: one.text)[0])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    fleet = MadeFleet(tmp_path_factory.mktemp("browser") / "fleet", devices=40, closed=6, rounds=12)
    with programs_in(fleet.folder.parent) as programs, chromium() as driver:
        yield Page(driver, fleet, address(programs, fleet.folder))


@pytest.fixture(autouse=True)
def no_complaint(page: Page) -> Iterator[None]:
    """The browser's console must stay empty. A test that starts a console leaves its page before it ends."""
    emulate(page.driver, 1280, 900)
    yield
    assert complaints(page.driver) == []


def test_from_the_fleet_to_a_device_and_through_every_view(page: Page) -> None:
    page.open("fleet")
    page.until(lambda: len(page.all(".tile")) == 40)
    assert page.text_of("#fleet-name") == "greenhouse"
    page.one("#search").send_keys("attic")
    page.until(lambda: page.text_of(".count") == "3 of 40 devices")
    assert page.text_of(".tile .board") == "Raspberry Pi Zero 2 W Rev 1.0, onnx"
    page.click(".tile a")
    page.until(lambda: page.text_of("#main h1") == "attic-01")
    page.until(lambda: len(page.all("canvas")) >= 2)
    assert "Raspberry Pi Zero 2 W Rev 1.0" in page.text_of(".facts")
    assert "None: this device uses a broker that asks for none." in page.text_of("#main")
    page.click("nav a[href='#/rounds']")
    page.until(lambda: len(page.all("tbody tr")) >= 6)
    page.click("a[href='#/rounds/6']:not([tabindex])")
    page.until(lambda: "asked 40 devices of 40 enrolled" in page.text_of(".words"))
    assert len(page.all("tbody tr")) == 40
    page.click("nav a[href='#/learning']")
    page.until(lambda: len(page.all("canvas")) == 3)
    assert "target: 0.900" in str(page.one(".plot").get_attribute("aria-label"))
    page.one("#compare").send_keys("barn-01", Keys.ENTER)
    page.until(lambda: "barn-01" in page.text_of("figure .legend"))
    page.click("nav a[href='#/cost']")
    page.until(lambda: "of the budget of" in page.text_of(".cards"))
    assert "—" in page.text_of("tbody")
    page.click("nav a[href='#/log']")
    page.until(lambda: "round 6 closed" in page.text_of(".log"))
    page.driver.back()
    page.until(lambda: page.text_of("#main h1") == "Cost")


def test_a_round_that_closes_appears_by_itself(page: Page) -> None:
    page.open("rounds")
    before = page.fleet.round
    page.until(lambda: page.text_of("tbody a") == str(before))
    page.fleet.play()
    page.until(lambda: page.text_of("tbody a") == str(before + 1))


def test_a_device_that_is_awaited_looks_other_than_one_that_gave_no_answer(page: Page) -> None:
    closed, opened = page.fleet.round + 1, page.fleet.round + 2
    page.fleet.ledger.put(Round(round=closed, opened_at=1e9, cohort=("attic-01",), status="closed"),
                          Round(round=opened, opened_at=1e9, cohort=("attic-01",), status="open"))

    def shown(view: str, css: str) -> tuple[str, ...]:
        page.open(view)
        return page.of(css, lambda one: one.text, lambda one: one.value_of_css_property("color"),
                       lambda one: one.value_of_css_property("background"))

    silent, awaited = shown(f"rounds/{closed}", ".became"), shown(f"rounds/{opened}", ".became")
    assert (silent[0], awaited[0]) == ("no answer", "awaited")
    assert silent[1] != awaited[1]
    assert shown("rounds", ".patch.silent")[2] != shown("rounds", ".patch.awaited")[2]
    page.fleet.play()
    page.fleet.play()  # in their place come rounds with all devices


def test_pausing_by_keyboard_asks_first_and_is_in_the_log(page: Page) -> None:
    page.open("log")
    page.until(lambda: page.one("#pause").text == "Pause")
    page.one("#pause").send_keys(Keys.ENTER)
    page.until(lambda: page.all("dialog[open]"))
    assert page.driver.switch_to.active_element.text == "Cancel"
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.until(lambda: not page.all("dialog"))
    assert {entry["action"] for entry in audit_log.read(page.fleet.folder)} <= {"serve console"}
    page.one("#pause").send_keys(Keys.ENTER)
    page.until(lambda: page.driver.switch_to.active_element.text == "Cancel")
    page.driver.switch_to.active_element.send_keys(Keys.TAB)
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    page.until(lambda: "paused: the aggregator is not running" in page.text_of("dialog .outcome"))
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    page.until(lambda: page.one("#pause").text == "Resume")
    page.until(lambda: "pause: paused" in page.text_of(".log"))
    with Ledger(page.fleet.folder / "ledger.sqlite") as ledger:
        assert ledger.requests()["paused"] == "yes"


def test_a_device_is_added_with_a_token_or_told_why_not(page: Page) -> None:
    page.open("fleet")
    page.click(".toolbar button")
    page.until(lambda: page.driver.switch_to.active_element.get_attribute("id") == "device-name")
    page.one("#device-name").send_keys("attic 99", Keys.ENTER)
    assert page.driver.execute_script("return document.querySelector('#device-name').validity.patternMismatch")
    page.one("#device-name").clear()
    page.one("#device-name").send_keys("attic-99", Keys.ENTER)
    page.until(lambda: "the fleet has no certificates yet" in page.text_of("dialog .outcome"))
    page.click("dialog [type=button]")
    page.until(lambda: not page.all("dialog"))
    assert all("409" in said for said in complaints(page.driver))
    assert audit_log.read(page.fleet.folder)[-1]["outcome"] == "failed"


def test_what_is_missing_for_flashing_is_said_instead_of_asked(page: Page) -> None:
    page.open("fleet")
    page.click("#flash")
    page.until(lambda: "which lists the devices with their addresses" in page.text_of("dialog .note"))
    assert page.all("dialog [type=submit]") == []
    page.click("dialog [type=button]")
    page.until(lambda: not page.all("dialog"))


def test_a_halted_update_is_on_the_page_and_ended_after_a_question(page: Page) -> None:
    update = update_record.begun(update_record.Plan(1, "0.2.0", "aarch64 3.13", ("attic-01", "attic-02"), (1,)))
    halted = replace(update.moved("attic-01", update_record.FAILED, "no room"), st=update_record.HALTED,
                     why="1 failed:\nattic-01: no room")
    update_record.write(page.fleet.folder, halted)
    page.open("fleet")
    page.until(lambda: page.all("#abort-update"))
    assert "Update to 0.2.0 is halted: 1 failed:\nattic-01: no room; 1 waiting, 1 failed." in page.text_of(".notes")
    page.click("#abort-update")
    page.until(lambda: page.text_of("dialog h2") == "End the update?")
    assert page.driver.switch_to.active_element.text == "Cancel"
    page.click("dialog [type=submit]")
    page.until(lambda: "0.2.0: abort requested" in page.text_of("dialog .outcome"))
    page.click("dialog [type=button]")
    page.until(lambda: not page.all("dialog"))
    update_record.path_in(page.fleet.folder).unlink()


@pytest.mark.needs("ssh")
def test_waves_are_asked_for_followed_and_halt_with_the_reason(
    page: Page, programs: Programs, tmp_path: Path
) -> None:
    for k, name in enumerate(("attic", "barn", "cellar")):
        (tmp_path / f"{name}.toml").write_text("")
        with open(tmp_path / "boards.toml", "a", encoding="utf-8") as file:
            file.write(f'[[devices]]\nfile = "{name}.toml"\nto = "ssh://root@127.0.0.1:{k + 1}"\n')
    url = address(programs, page.fleet.folder, "--inventory", tmp_path / "boards.toml")
    page.driver.get(f"{url}#/fleet")
    page.until(lambda: page.all(".tile"))
    page.click("#flash")
    page.until(lambda: page.text_of("dialog h2") == "Flash 3 devices in waves?")
    assert page.driver.switch_to.active_element.text == "Cancel"
    page.one("#waves").clear()
    page.one("#waves").send_keys("1", Keys.ENTER)
    page.until(lambda: page.text_of("#main h1") == "Flash in waves")
    page.until(lambda: "halted, because more than 0 had failed: 2 were not begun" in page.text_of(".words"))
    assert "0 of 3 devices run it; 1 failed: attic: " in page.text_of(".words")
    assert [row.text.split()[:3] for row in page.all("tbody tr")] == [
        ["attic", "1", "failed"], ["barn", "2", "failed"], ["cellar", "3", "failed"]]
    entry = audit_log.read(page.fleet.folder)[-1]
    assert (entry["action"], entry["outcome"]) == ("flash", "failed")
    assert "2 were not begun" in entry["text"]
    page.driver.get("about:blank")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_view_has_a_serious_barrier(page: Page, dark: bool) -> None:
    found = {}
    for view in VIEWS:
        emulate(page.driver, 1280, 900, dark=dark)
        page.open(view)
        page.until(lambda: page.all("#main table, .tile, canvas, .log li, .words"))
        page.driver.execute_script(AXE.read_text(encoding="utf-8"))
        results = page.driver.execute_async_script("axe.run().then(arguments[0])")
        found[view] = [f"{one['id']}: {one['nodes'][0]['html'][:120]} {one['nodes'][0]['failureSummary'][:200]}"
                       for one in results["violations"] if one["impact"] in ("serious", "critical")]
    assert {view: said for view, said in found.items() if said} == {}


def test_a_phone_shows_every_view_without_scrolling_sideways(page: Page) -> None:
    emulate(page.driver, 360, 740)
    for view in VIEWS:
        page.open(view)
        page.until(lambda: page.all("#main table, .tile, canvas, .log li, .words"))
        assert page.driver.execute_script("return document.documentElement.scrollWidth") <= 360, view


def test_nothing_comes_from_elsewhere(page: Page) -> None:
    page.open("learning")
    page.until(lambda: page.all("canvas"))
    names = page.driver.execute_script("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert len(names) > 10
    assert [name for name in names if not name.startswith(page.url)] == []


def test_a_token_is_asked_for_and_taken_out_of_the_address(page: Page, programs: Programs, tmp_path: Path) -> None:
    token = tmp_path / "token"
    url = address(programs, page.fleet.folder, "--token-file", token).partition("#")[0]
    page.driver.get(url)
    page.until(lambda: page.all("dialog[open]"))
    page.one("#token").send_keys("wrong", Keys.ENTER)
    page.until(lambda: "is not this console's token" in page.text_of("dialog .outcome"))
    page.one("#token").clear()
    page.one("#token").send_keys(token.read_text().strip(), Keys.ENTER)
    page.until(lambda: len(page.all(".tile")) == 40)
    page.driver.delete_all_cookies()
    page.driver.get("about:blank")
    page.driver.get(f"{url}#token={token.read_text().strip()}")
    page.until(lambda: len(page.all(".tile")) == 40)
    assert page.driver.current_url == f"{url}#/fleet"
    page.driver.get("about:blank")
    assert all("401" in said for said in complaints(page.driver))
