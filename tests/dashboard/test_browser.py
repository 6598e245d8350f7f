"""The pages in a real Chromium: every page and action, both themes, the keyboard alone, hostile texts.

The screenshots of the documentation are made here, by `PALIMPSEST_SCREENSHOTS=1`, so that they show what is.
"""

from __future__ import annotations

import os
import sqlite3
from functools import partial
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect

from proxy.store import METADATA, SUMS
from tests.dashboard.conftest import ADMIN, TEAM_A, watched
from tests.dashboard.test_pages import PAGES, STRANGE
from tests.support.server import Proxy
from tests.support.waiting import until

IMAGES = Path(__file__).parents[2] / "docs" / "images"
MAKES_IMAGES = bool(os.environ.get("PALIMPSEST_SCREENSHOTS"))  # noqa: TID251 - a setting of the tests, not of the program
SHORTER = "/ui/sessions/warehouse?request=12"  # a request that sent messages in every way, and is not the longest
ALL_PAGES = (
    *(SHORTER if path == "/ui/sessions/warehouse" else path for path in PAGES),
    *(f"/ui/sessions/{STRANGE}", "/ui/login", "/ui/sessions/warehouse/delete"),
)
COLOURFUL = {"/ui", "/ui/sessions", SHORTER, PAGES[-1]}
SERIOUS = {"serious", "critical"}
SCROLLED = ["scrollable-region-focusable"]


def fits(page: Page) -> bool:
    """Tell whether nothing of a page is wider than a phone; charts are drawn anew a moment after a change."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= 360"))


def test_every_page_is_sound_in_both_themes(context: BrowserContext, filled: Proxy) -> None:
    axe, only = Axe(), {"resultTypes": ["violations"]}
    with watched(context) as found:
        for path in ALL_PAGES:
            answer = found.page.goto(filled.url + path)
            assert answer is not None
            assert answer.status == 200
            found.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
            problems = axe.run(found.page, options=only).response["violations"]
            if path in COLOURFUL:
                found.page.emulate_media(color_scheme="dark")  # only colours change
                problems += axe.run(found.page, options=only | {"runOnly": ["color-contrast"]}).response["violations"]
                found.page.emulate_media(color_scheme="light")
            found.page.set_viewport_size({"width": 360, "height": 740})  # a phone
            until(partial(fits, found.page), f"{path} fits")
            problems += axe.run(found.page, options=only | {"runOnly": SCROLLED}).response["violations"]
            found.page.set_viewport_size({"width": 1280, "height": 800})
            serious = [(each["id"], each["nodes"][0]["html"]) for each in problems if each["impact"] in SERIOUS]
            assert serious == [], path


def test_the_theme_is_chosen_and_kept(context: BrowserContext, filled: Proxy) -> None:
    with watched(context) as found:
        page = found.page
        page.goto(filled.url + "/ui/sessions")
        page.get_by_role("button", name="Dark").click()
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.get_by_role("link", name="Policies").click()
        expect(page.get_by_role("button", name="Dark")).to_have_attribute("aria-pressed", "true")
        page.get_by_role("button", name="Light").click()
        expect(page.locator("html")).to_have_attribute("data-theme", "light")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark


def test_the_slider_moves_through_the_requests(context: BrowserContext, filled: Proxy) -> None:
    with watched(context) as found:
        page = found.page
        page.goto(filled.url + "/ui/sessions/warehouse")
        slider = page.get_by_role("slider", name="Request")
        expect(slider).to_have_value("17")
        slider.focus()
        page.keyboard.press("Home")
        expect(page.get_by_role("heading", name="Request 1 of 17")).to_be_visible()
        for _ in range(7):
            page.keyboard.press("ArrowRight")
        expect(page.get_by_role("heading", name="Request 8 of 17")).to_be_visible()
        expect(slider).to_be_focused()
        expect(page).to_have_url(filled.url + "/ui/sessions/warehouse?request=8")
        expect(page.get_by_role("link", name="CSV")).to_have_attribute("href", "/ui/sessions/warehouse.csv?request=8")
        page.get_by_role("button", name="Dark").click()
        expect(page).to_have_url(filled.url + "/ui/sessions/warehouse?request=8")
        page.get_by_text("Difference").first.click()
        expect(page.locator(".loaded ins").first).to_be_visible()
        assert page.locator(".chart canvas").count() == 1


def test_pages_can_be_read_without_scripts(browser: Browser, filled: Proxy) -> None:
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(filled.url + "/ui/sessions")
        page.get_by_role("link", name="warehouse").click()
        page.get_by_text("As a table").click()
        page.get_by_role("region", name="Requests").get_by_role("link", name="12", exact=True).click()
        expect(page.get_by_role("heading", name="Request 12 of 17")).to_be_visible()
        expect(page.locator(".state.dropped").first).to_be_visible()
        page.get_by_role("button", name="Show").click()
        expect(page.get_by_role("heading", name="Request 12 of 17")).to_be_visible()


def test_everything_is_reached_by_the_keyboard_alone(context: BrowserContext, filled: Proxy) -> None:
    with watched(context) as found:
        page = found.page
        press = page.keyboard.press

        def reach(name: str) -> None:
            """Go on with Tab until what has this name has the focus, which must be seen."""
            for _ in range(80):
                press("Tab")
                if (
                    page.evaluate("(document.activeElement.innerText || document.activeElement.id || '').trim()")
                    == name
                ):
                    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                    assert outline != "none"
                    return
            raise AssertionError(name)

        page.goto(filled.url + "/ui/sessions")
        press("Tab")
        assert page.evaluate("document.activeElement.innerText") == "Skip to the content"
        press("Enter")
        reach("warehouse")
        press("Enter")
        page.wait_for_url("**/ui/sessions/warehouse")
        reach("Try a policy")
        press("Enter")
        page.wait_for_url("**/ui/policies?session=warehouse#lab")
        reach("lab-typed")
        page.keyboard.type("trigger: {tokens: 2000}\ntarget: {tokens: 1000}\nedits: [{type: drop_oldest}]")
        reach("Try it")
        press("Enter")
        expect(page.get_by_role("heading", name="warehouse, replayed")).to_be_visible()


def test_a_session_is_deleted_after_a_question(context: BrowserContext, filled: Proxy) -> None:
    assert filled.chat("doomed", "hello").status_code == 200
    with watched(context) as found:
        page = found.page
        page.goto(filled.url + "/ui/sessions/doomed")
        page.get_by_role("link", name="Delete…").click()
        page.get_by_role("link", name="Keep it").click()
        page.get_by_role("link", name="Delete…").click()
        page.get_by_role("button", name="Delete for good").click()
        page.wait_for_url("**/ui/sessions?deleted=doomed")
        expect(page.get_by_role("link", name="doomed")).to_have_count(0)
    assert filled.client.get("/sessions/doomed").status_code == 404


def test_the_list_follows_what_is_typed(context: BrowserContext, filled: Proxy) -> None:
    with watched(context) as found:
        page = found.page
        page.goto(filled.url + "/ui/sessions")
        page.get_by_label("Id contains").fill("night")
        expect(page.get_by_role("link", name="warehouse")).to_have_count(0)
        expect(page.get_by_role("link", name="night shift")).to_be_visible()
        expect(page.get_by_role("link", name="CSV")).to_have_attribute("href", "/ui/sessions.csv?q=night&sort=newest")
        page.get_by_label("Id contains").fill("")
        page.get_by_label("Text").fill("shelves up to 11")
        page.get_by_role("link", name="Shelves up to 11 are read.").first.click()
        expect(page.get_by_role("heading", name="Message", exact=False)).to_be_visible()
        expect(page.locator(".text")).to_have_text("Shelves up to 11 are read.")


def test_a_field_that_cannot_be_read_is_told_what_is_allowed(context: BrowserContext, filled: Proxy) -> None:
    with watched(context) as found:
        page = found.page
        page.goto(filled.url + "/ui/sessions")
        page.get_by_label("Used since").fill("2026-13")
        expect(page.get_by_role("status")).to_contain_text("since can be a date (2026-11-01)")
        page.get_by_label("Used since").fill("7d")
        expect(page.get_by_role("status")).to_have_text("")
        found.problems.clear()  # the browser tells of the 400


def test_two_sessions_are_chosen_and_compared(context: BrowserContext, filled: Proxy) -> None:
    with watched(context) as found:
        page = found.page
        page.goto(filled.url + "/ui/sessions")
        page.get_by_label("First to compare: warehouse").check()
        page.get_by_label("Second to compare: night shift").check()
        page.get_by_role("button", name="Compare the two").click()
        expect(page.get_by_role("heading", name="Two sessions")).to_be_visible()
        expect(page.get_by_text("They begin with the same message.")).to_be_visible()


def test_a_session_is_exported(context: BrowserContext, filled: Proxy) -> None:
    with watched(context) as found:
        found.page.goto(filled.url + "/ui/sessions/desk-1")
        with found.page.expect_download() as download:
            found.page.get_by_role("link", name="Export").click()
        assert b'"desk-1"' in Path(download.value.path()).read_bytes()
        found.problems.clear()  # a download ends the navigation


def test_signing_in_and_out(context: BrowserContext, guarded: Proxy) -> None:
    with watched(context) as found:
        page = found.page
        page.goto(guarded.url + "/ui/sessions/alpha")
        page.get_by_label("Key").fill("not-the-key-0123456")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_have_text("This key is not known here.")
        found.problems.clear()  # the browser tells of the 401
        page.get_by_label("Key").fill(TEAM_A)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url("**/ui/sessions/alpha")
        page.get_by_role("button", name="Sign out").click()
        page.get_by_label("Key").fill(ADMIN)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_text("all tenants")).to_be_visible()
        page.goto(guarded.url + "/ui/sessions")  # every column is seen, the tenant's too, and those that choose two
        assert page.get_by_role("region", name="Sessions").evaluate(
            "region => region.scrollWidth <= region.clientWidth"
        )
        assert page.locator("td.whose").first.evaluate("cell => cell.getClientRects()[0].height") < 40


def test_hostile_texts_do_nothing(context: BrowserContext, filled: Proxy) -> None:
    with watched(context) as found:
        page = found.page
        page.goto(filled.url + "/ui/sessions")
        page.get_by_role("link", name='"><script>').click()
        expect(page.locator(".said").first).to_contain_text("<script>window.hacked = 1</script>")
        page.get_by_role("link", name="Try a policy").click()
        page.get_by_role("button", name="Try it").click()
        expect(page.get_by_role("heading", name="replayed")).to_be_visible()


def spread(proxy: Proxy) -> None:
    """Copy the sums of this hour to the days before, a little less each, so that the chart has a course."""
    columns = [column.name for column in METADATA.tables["rollups"].columns]
    values = ", ".join(f"{name} * (40 - n) / 40.0" if name in SUMS else name for name in columns)
    values = values.replace("hour", "hour - 24 * n", 1)
    numbers = "WITH RECURSIVE days(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM days WHERE n < 25)"
    with sqlite3.connect(proxy.settings.store.url.removeprefix("sqlite:///")) as connection:
        connection.execute(f"{numbers} INSERT INTO rollups ({', '.join(columns)}) SELECT {values} FROM rollups, days")  # noqa: S608
    connection.close()


SHOTS = {
    "overview": "/ui?since=30d",
    "sessions": "/ui/sessions",
    "session": "/ui/sessions/warehouse?request=12",
    "lab": "/ui/policies/lab?session=warehouse&policy=gentle#lab",
}


def test_the_documentation_shows_what_is(browser: Browser, filled: Proxy, tmp_path: Path) -> None:
    folder = IMAGES if MAKES_IMAGES else tmp_path
    folder.mkdir(exist_ok=True)
    spread(filled)
    with browser.new_context(viewport={"width": 1200, "height": 900}, reduced_motion="reduce") as context:
        page = context.new_page()
        for name, path in SHOTS.items():
            page.goto(filled.url + path)
            picture = page.screenshot(path=folder / f"{name}.png")
            assert len(picture) < 150_000, name
