"""The HTML views in a real browser: opening, filtering, drilling down, the keyboard, colours, printing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.report import checklist, document, page
from conformance.report.values import Report
from tests import reports
from tests.report import browser

pytestmark = pytest.mark.skipif(browser.PROGRAM is None, reason=browser.WHY_NOT)

_SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def window() -> Iterator[browser.Page]:
    with browser.started() as page:
        yield page


@pytest.fixture(autouse=True)
def _forget(window: browser.Page) -> None:
    window.errors.clear()
    window.requests.clear()


def _open(window: browser.Page, folder: Path, report: Report) -> Path:
    file = folder / "report.html"
    file.write_text(page.render(report), encoding="utf-8")
    window.open(file)
    window.ask(browser.READY)
    return file


def many(cases: int, failing: int = 0) -> Report:
    """Return a report of so many cases over all of its contracts, of which `failing` contracts fail."""
    return document.parse(many_raw(cases, failing))


def many_raw(cases: int, failing: int = 0) -> dict[str, Any]:
    """Return the JSON of that report."""
    whole = reports.raw("improved")
    whole["footer"] = None
    contract = whole["header"]["contracts"][0]
    model = whole["cases"][0]
    number = max(100, failing)
    whole["header"]["contracts"] = [
        {**contract, "id": f"{contract['id']}{place:03}", "title": f"{contract['title']}, {place}"}
        for place in range(number)
    ]
    whole["cases"] = [_case(model, f"{contract['id']}{place % number:03}", place, failing) for place in range(cases)]
    return whole


def _case(model: dict[str, Any], contract: str, place: int, failing: int) -> dict[str, Any]:
    fails = int(contract[-3:]) < failing
    evidence = [
        {**found, "name": f"{found['name']}, {place % 97}.{row}"} for row in range(4) for found in model["evidence"]
    ]
    if fails:
        evidence[0] = {**evidence[0], "measured": "torch.float16", "holds": False}
    return {
        **model,
        "contract": contract,
        "id": f"{contract}[check:device-{place}]",
        "verdict": "FAIL" if fails else "PASS",
        "evidence": evidence,
    }


def test_ten_thousand_cases_can_be_filtered(window: browser.Page, tmp_path: Path) -> None:
    _open(window, tmp_path, many(10_000, failing=40))
    window.ask(browser.READY)

    assert window.ask("document.getElementById('found').textContent") == "100 contracts, 10000 cases"
    assert window.errors == []


def test_nothing_but_the_file_is_asked_for(window: browser.Page, tmp_path: Path) -> None:
    file = _open(window, tmp_path, reports.sample("failing"))

    assert window.requests == [file.as_uri()]
    assert window.errors == []


def test_texts_of_a_report_run_nothing(window: browser.Page, tmp_path: Path) -> None:
    hostile = "</script><script>window.hit = 1</script><img src=x onerror='window.hit = 1'>"
    whole = reports.raw("failing")
    for where in ("header/contracts/2/title", "header/environment/cpu", "cases/5/reason", "cases/5/evidence/1/name"):
        reports.put(whole, where, hostile)
    _open(window, tmp_path, document.parse(whole))
    window.ask("document.querySelectorAll('details').forEach(box => { box.open = true })")
    window.ask("new Promise(done => setTimeout(done, 200))")
    window.ask("document.querySelectorAll('details').forEach(box => { box.open = true })")
    window.ask("new Promise(done => setTimeout(done, 200))")

    assert window.ask("typeof window.hit") == "undefined"
    assert window.ask("document.body.textContent.includes('onerror')")
    assert window.errors == []
    # What a hole in the escaping would let in is refused by the policy.
    window.ask("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hit = 2'}))")
    assert window.ask("typeof window.hit") == "undefined"


_SET = """(values => {
    for (const [id, value] of Object.entries(values)) document.getElementById(id).value = value;
    document.getElementById('filter').dispatchEvent(new Event('input'));
    return new Promise(done => setTimeout(done, 400));
})"""


def test_filters_choose_contracts_and_cases(window: browser.Page, tmp_path: Path) -> None:
    _open(window, tmp_path, many(1000, failing=3))

    window.ask(f"{_SET}({{verdict: 'FAIL'}})")
    assert window.ask("document.getElementById('found').textContent") == "3 contracts, 30 cases"
    window.ask(f"{_SET}({{search: 'device-1 float16', verdict: 'not PASS'}})")
    shown = window.ask("[...document.querySelectorAll('details.contract')].filter(box => !box.hidden).length")
    assert 0 < shown <= 3
    window.ask(f"{_SET}({{search: 'no such words', verdict: ''}})")
    assert window.ask("document.getElementById('found').textContent") == "0 contracts, 0 cases"


def test_a_contract_opens_to_its_cases_and_their_evidence(window: browser.Page, tmp_path: Path) -> None:
    report = many(20_200, failing=1)
    file = _open(window, tmp_path, report)
    id = next(iter(report.contracts))

    window.ask(f"location.hash = '{id}'")
    window.ask("new Promise(done => setTimeout(done, 300))")
    cases = f"document.querySelectorAll('#{id} .cases > details')"
    assert window.ask(f"{cases}.length") == 100
    window.ask(f"document.querySelector('#{id} .cases > button').click()")
    assert window.ask(f"{cases}.length") == 200
    window.ask(f"{cases}[0].open = true")
    window.ask("new Promise(done => setTimeout(done, 300))")
    assert "DOES NOT HOLD" in window.ask(f"{cases}[0].textContent")
    assert file.is_file()


def test_the_keyboard_reaches_the_search_and_opens_a_chapter(window: browser.Page, tmp_path: Path) -> None:
    _open(window, tmp_path, reports.sample("failing"))

    def press(key: str, code: str, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            window.call("Input.dispatchKeyEvent", type=kind, key=key, code=code, **more)

    window.call("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
    assert window.ask("document.activeElement.className") == "skip"
    press("/", "Slash", "/")
    assert window.ask("document.activeElement.id") == "search"
    assert window.ask("document.activeElement.value") == ""
    window.ask("document.querySelector('details.chapter > summary').focus()")
    press("Enter", "Enter", "\r")
    assert window.ask("document.querySelector('details.chapter').open")


_CONTRAST = """(() => {
    const numbers = color => color.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(one => one / 255)
        .map(one => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
        .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
    const behind = element => {
        for (let one = element; one; one = one.parentElement) {
            const found = numbers(getComputedStyle(one).backgroundColor);
            if (found.length === 3 || found[3] > 0) return found;
        }
    };
    const low = [];
    for (const element of document.querySelectorAll('body *')) {
        const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
        if (!own || !element.checkVisibility()) continue;
        const style = getComputedStyle(element);
        const text = numbers(element.closest('svg') ? style.fill : style.color);
        const [one, two] = [light(text), light(behind(element))].sort((a, b) => b - a);
        const ratio = (one + 0.05) / (two + 0.05);
        if (ratio < 4.5) low.push(`${element.tagName}.${element.className} ${ratio.toFixed(2)}`);
    }
    return low;
})()"""


@pytest.mark.parametrize("scheme", _SCHEMES)
@pytest.mark.parametrize("name", ["conformant", "failing"])
def test_every_text_has_contrast(window: browser.Page, tmp_path: Path, scheme: str, name: str) -> None:
    window.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    _open(window, tmp_path, reports.sample(name))
    window.ask("document.querySelectorAll('details').forEach(box => { box.open = true })")
    window.ask("new Promise(done => setTimeout(done, 200))")

    low = window.ask(_CONTRAST)
    window.call("Emulation.setEmulatedMedia", features=[])

    assert low == []


def test_a_narrow_window_needs_no_sideways_scrolling(window: browser.Page, tmp_path: Path) -> None:
    size = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    window.call("Emulation.setDeviceMetricsOverride", **size)
    _open(window, tmp_path, many(500, failing=5))

    wide = window.ask("document.documentElement.scrollWidth")
    window.call("Emulation.clearDeviceMetricsOverride")

    assert wide <= 400


@pytest.mark.parametrize("failing", [0, 5, 40, 100, 690])
def test_the_checklist_is_two_pages(window: browser.Page, tmp_path: Path, failing: int) -> None:
    file = tmp_path / "checklist.html"
    file.write_text(checklist.render(many(2000, failing), digest="0" * 64, form="html"), encoding="utf-8")
    window.open(file)

    assert window.pdf(tmp_path / "checklist.pdf") <= 2


def test_the_annex_of_the_checklist_begins_on_a_page_of_its_own(window: browser.Page, tmp_path: Path) -> None:
    pages = []
    for with_annex in (False, True):
        file = tmp_path / "checklist.html"
        report = reports.sample("failing")
        file.write_text(checklist.render(report, form="html", with_annex=with_annex), encoding="utf-8")
        window.open(file)
        pages.append(window.pdf(tmp_path / "checklist.pdf"))

    assert pages[0] <= 2
    assert pages[1] > pages[0]
    assert window.errors == []
