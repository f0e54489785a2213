"""The report in a real Chromium: everything on it is drawn, nothing is fetched, light and dark and on a phone."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_runs import make_runs

from nestling.commands import paper, report

pytestmark = pytest.mark.browser
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: browser tests skipped")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def address(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("browser")
    written = report.command((str(make_runs(folder / "runs")),), out=str(folder / "report.html"))
    return Path(written["report"]).resolve().as_uri()


def test_the_papers_figures_show_every_stage_of_every_table(browser: Any, tmp_path: Path) -> None:
    """From the results that are stored, 1,280 pixels wide: no table is wider than its room, pictures of panels fill it."""
    results = Path(__file__).parent.parent / "results"
    shutil.copytree(results, tmp_path / "results")
    found = paper.command(
        "figures", out=str(tmp_path), results=str(tmp_path / "results"), page=str(tmp_path / "figures.html")
    )
    watched = Watched(browser, Path(found["report"]).resolve().as_uri())
    rooms = "[...document.querySelectorAll('.scroll')].map(room => [room.scrollWidth, room.clientWidth])"
    widths = watched.page.evaluate(rooms)
    assert len(widths) > 6 and all(inner <= room for inner, room in widths), widths
    pictures = watched.page.evaluate("[...document.querySelectorAll('.picture')].map(each => each.clientWidth)")
    assert len(pictures) == 3 and min(pictures) > 1000
    names = watched.page.evaluate("[...document.querySelectorAll('section')].map(each => each.id)")
    assert names == ["coverage", "claims", "tradeoff", "deadlines", "priorities", "tables", "tiny", "missing"]
    assert watched.complaints == []
    watched.context.close()
    narrow = Watched(browser, Path(found["report"]).resolve().as_uri(), width=400)
    widths = narrow.page.evaluate(rooms)
    assert all(inner <= room for inner, room in widths), "the last stages are the ones that matter, on a telephone, too"
    drawn = narrow.page.evaluate("[...document.querySelectorAll('.picture.wide svg')].map(each => each.clientWidth)")
    assert min(drawn) > 700, "three panels in the width of one cannot be read: they can be moved instead"
    narrow.context.close()


class Watched:
    """A page that remembers what it asked for and what it complained about."""

    def __init__(
        self, browser: Any, address: str, width: int = 1280, scheme: str = "light", script: bool = True
    ) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=script
        )
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(address)


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Any]:
    made: list[Watched] = []

    def open_page(width: int = 1280, scheme: str = "light", script: bool = True) -> Watched:
        made.append(Watched(browser, address, width, scheme, script))
        return made[-1]

    yield open_page
    for each in made:
        each.context.close()


def test_nothing_is_fetched_and_nothing_complains(opened: Any, address: str) -> None:
    watched = opened()
    watched.page.wait_for_load_state("networkidle")
    assert [url for url in watched.requests if url != address and not url.startswith("data:")] == []
    assert watched.complaints == []


def test_the_headline_table_has_a_row_for_each_way_of_training(opened: Any) -> None:
    page = opened().page
    assert page.title() == "Anytime networks on digits"
    table = page.locator('[data-name="headline"]').first
    heads = table.locator("tbody th").all_inner_texts()
    assert [text.split("\n")[0] for text in heads[:3]] == ["osgd", "sgd", "independent nets"]
    assert table.locator("tbody tr").first.locator("td").count() == 3
    assert page.locator(".steps li").count() == 3


def test_every_section_shows_something(opened: Any) -> None:
    page = opened().page
    names = [section.get_attribute("id") for section in page.locator("section").all()]
    expected = [
        "headline",
        "cost",
        "deadlines",
        "gallery",
        "repairs",
        "calibration",
        "training",
        "gradients",
        "provenance",
    ]
    assert names == expected
    for name in names:
        assert page.locator(f"#{name} :is(figure, svg, table, .gallery)").count() > 0


def test_every_picture_is_drawn(opened: Any) -> None:
    page = opened().page
    pictures = page.locator(".picture svg").all()
    assert len(pictures) >= 14
    for svg in pictures:
        box = svg.bounding_box()
        assert box["width"] > 250
        assert 150 < box["height"] < 900
        assert svg.locator("path").count() > 5
        assert svg.locator("text").count() > 3
    assert page.locator("svg title").count() > 50, "marks say what they are when pointed at"


def test_the_gallery_shows_real_images(opened: Any) -> None:
    page = opened().page
    images = page.locator(".card img")
    assert images.count() >= 5
    loaded = images.evaluate_all("all => all.map(i => i.complete && i.naturalWidth === 8 && i.clientWidth > 40)")
    assert all(loaded)
    assert page.locator(".card").first.locator("li").count() == 3


def test_a_deadline_hides_the_answers_that_come_later(opened: Any) -> None:
    page = opened().page
    slider = page.locator(".gallery input").first
    faded = page.locator(".gallery").first.locator("li.later")
    said = page.locator(".gallery").first.locator("li[data-stage]").count()
    assert faded.count() == 0
    slider.evaluate("e => { e.value = 0; e.dispatchEvent(new Event('input')) }")
    assert faded.count() == said
    assert "nothing is ready" in page.locator(".gallery output").first.inner_text()
    slider.evaluate("e => { e.value = e.max; e.dispatchEvent(new Event('input')) }")
    assert faded.count() == 0


def test_dark_mode_is_dark_in_pictures_too(opened: Any) -> None:
    def brightness(page: Any, selector: str, what: str) -> float:
        element = page.locator(selector).first
        text = element.evaluate(f"e => getComputedStyle(e).{what}")
        return sum(float(part) for part in text[text.index("(") + 1 : text.index(")")].split(",")[:3]) / 3

    light, dark = opened(scheme="light").page, opened(scheme="dark").page
    assert brightness(light, "body", "backgroundColor") > 200
    assert brightness(dark, "body", "backgroundColor") < 60
    assert brightness(light, ".picture svg text", "fill") < 140
    assert brightness(dark, ".picture svg text", "fill") > 140
    assert brightness(dark, ".picture svg path", "fill") < 60, "the picture's ground is dark"


@pytest.mark.parametrize("width", [360, 768, 1600])
def test_the_page_fits_the_screen(opened: Any, width: int) -> None:
    page = opened(width=width).page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for box in [svg.bounding_box() for svg in page.locator(".picture svg").all()]:
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width


def test_without_its_script_the_page_still_tells(opened: Any) -> None:
    page = opened(script=False).page
    assert "Error on all 360 images" in page.locator(".slider").first.inner_text()
    assert page.locator(".card img").count() >= 5
