"""The report in a browser: every view, the keys, what must never happen, and how fast and large it is."""

import dataclasses
import json

import numpy as np
import pytest

import moesaic
from moesaic.analysis.format import write_inspection
from tests.large_inspection import large_inspection
from tests.tiny_inspection import NASTY, STRINGS, tiny_inspection
from tests.tiny_report import results_document, write_results, write_run

MOST_ELEMENTS = 20_000
"""Of one view, those in charts not counted."""

VIEWS = ["overview", "load", "similarity", "clusters", "reader", "experts", "position", "training", "results"]

# Each would set window.hacked, ask the network, or become an element, if text became markup anywhere.
HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>",
    "<svg onload='window.hacked = 3'>",
    "<a href='https://example.invalid/'>link</a>",
    "<b>bold</b>",
    "${window.hacked = 4}",
    "{{ 7 * 7 }}",
    "<!-- -->",
    "\u2028window.hacked = 5\u2029",
    "javascript:window.hacked=6",
    "\ud83d",
    "&lt;i&gt;",
)


def hostile_inspection(name, seed):
    """An inspection in which every text that comes from data or from a user is hostile."""
    made = tiny_inspection(name=f"/models/{name}</script><img src=x onerror='window.hacked=7'>", seed=seed)
    domains = [
        dataclasses.replace(domain, name=text)
        for domain, text in zip(made.data.domains, (HOSTILE[0], HOSTILE[3], HOSTILE[1]), strict=True)
    ]
    return dataclasses.replace(
        made,
        data=dataclasses.replace(made.data, domains=tuple(domains), sources=HOSTILE),
        verdict=dataclasses.replace(made.verdict, sentence=HOSTILE[1]),
        rule="".join(HOSTILE),
        versions=dict.fromkeys(HOSTILE, HOSTILE[2]),
        documents=tuple(
            dataclasses.replace(one, opening="".join(HOSTILE), source=f"{HOSTILE[0]}:{index}")
            for index, one in enumerate(made.documents)
        ),
        reader=dataclasses.replace(made.reader, strings=(*STRINGS[:-4], *HOSTILE[:4])),
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    (folder / "inspected").mkdir()
    first, second = hostile_inspection("one", 0), hostile_inspection("two", 1)
    write_inspection(dataclasses.replace(first, against=second), folder / "inspected")
    runs = [write_run(folder / f"<b>{name}", domains=(HOSTILE[3], "code")) for name in ("emo", "std")]
    results = [
        write_results(folder / "full.json", name=f"./{HOSTILE[4]}", score=0.6),
        write_results(folder / "half.json", name="./half", score=0.55, kept=4, weights="h" * 32),
        write_results(folder / "quarter.json", name="./quarter", score=0.4, kept=2, weights="q" * 32),
    ]
    out = folder / "report.html"
    moesaic.report([folder / "inspected", *runs, *results], out, title="".join(HOSTILE))
    return out


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_opens_without_a_complaint_or_a_request(visit, report, scheme):
    visit = visit(color_scheme=scheme).open(report)
    assert [
        name.removeprefix("tab-")
        for name in visit.page.eval_on_selector_all("#tabs button", "all => all.map((b) => b.id)")
    ] == VIEWS
    charts = 0
    for name in VIEWS:
        visit.view(name)
        assert visit.page.locator("#main h1").count() == 1, name
        charts += visit.page.locator("#main .plot.drawn svg.main-svg").count()
        visit.page.evaluate("() => document.querySelectorAll('#main details').forEach((one) => (one.open = true))")
        assert "object HTML" not in visit.page.inner_text("#main"), name
        assert "undefined" not in visit.page.inner_text("#main"), name
        assert "NaN" not in visit.page.inner_text("#main"), name
    assert charts > 20
    assert visit.said == []
    assert [url for url in visit.requests if not url.startswith("data:")] == [report.as_uri()]


def test_text_of_the_data_is_never_markup(visit, report):
    visit = visit().open(report)
    scripts = 4  # data, Plotly's source, ours, and Plotly once it runs
    for name in VIEWS:
        visit.view(name)
        found = visit.page.evaluate(
            "() => [window.hacked, document.scripts.length, document.querySelectorAll('a:not(.skip)').length,"
            " document.querySelectorAll('img, iframe, object, embed, base, main b, main i').length]"
        )
        assert found == [None, scripts, 0, 0], name
    visit.view("overview")
    assert visit.page.inner_text(".lede >> nth=0")
    assert visit.page.inner_text("h1").startswith("</script><script>window.hacked = 1</script><img")
    visit.view("reader")
    tokens = set(visit.texts(".token"))
    assert {HOSTILE[0], HOSTILE[1], HOSTILE[2], HOSTILE[3]} <= tokens
    assert visit.said == []


def test_what_cannot_be_seen_is_shown_as_something_that_can(visit, tmp_path):
    made = tiny_inspection(document_tokens=80)
    write_inspection(made, tmp_path)
    moesaic.report([tmp_path], tmp_path / "report.html")
    visit = visit().open(tmp_path / "report.html", "reader")
    visit.settle()
    tokens = set(visit.texts(".token"))
    assert NASTY.replace("\u202e", "⟨202E⟩").replace("\x00", "␀").replace("\x1b", "␛") in tokens
    assert "⏎" in tokens
    assert not {"\n", NASTY} & tokens
    assert visit.page.locator(".token.part").count() > 0


def test_the_policy_lets_nothing_else_run(visit, report):
    visit = visit().open(report)
    found = visit.page.evaluate(
        """async () => {
          const script = document.createElement('script');
          script.textContent = 'window.hacked = 1';
          document.body.append(script);
          let fetched = true;
          try { await fetch('https://example.invalid/'); } catch { fetched = false; }
          return [window.hacked, fetched];
        }"""
    )
    assert found == [None, False]
    assert not [url for url in visit.requests if url.startswith("http")]


def test_two_models_beside_each_other_or_one(visit, report):
    visit = visit().open(report, "load")
    visit.settle()
    assert visit.page.locator(".pane").count() == 2
    visit.page.select_option("#models label:nth-child(2) select", "")
    visit.settle()
    assert visit.page.locator(".pane").count() == 1
    visit.page.select_option("#models label:nth-child(1) select", "1")
    visit.settle()
    assert "two</script>" in visit.page.inner_text(".pane-name")


def test_the_slider_changes_the_matrix(visit, report):
    visit = visit().open(report, "similarity")
    visit.settle()
    cells = "() => document.querySelector('.plot').data[0].z.flat()"
    before = visit.page.evaluate(cells)
    visit.page.focus(".layer-slider")
    visit.page.keyboard.press("ArrowRight")
    visit.settle()
    after = visit.page.evaluate(cells)
    expected = hostile_inspection("one", 0).statistics
    np.testing.assert_allclose(before, expected.similarity_NN.flatten(), atol=1e-4)
    np.testing.assert_allclose(after, expected.similarity_LNN[1].flatten(), atol=1e-4)


def test_load_is_shown_against_an_even_share(visit, report):
    visit = visit().open(report, "load")
    visit.settle()
    shown = visit.page.evaluate("() => document.querySelector('.plot').data[0].z")
    load_LE = hostile_inspection("one", 0).statistics.load_SLE[0]
    np.testing.assert_allclose(shown, np.clip(np.log2(load_LE * load_LE.shape[-1]), -3, 3), atol=1e-3)
    visit.page.click(".thumb >> nth=2")
    visit.settle()
    shown = visit.page.evaluate("() => document.querySelector('.plot').data[0].z")
    load_LE = hostile_inspection("one", 0).statistics.load_SLE[2]
    np.testing.assert_allclose(shown, np.clip(np.log2(load_LE * load_LE.shape[-1]), -3, 3), atol=1e-3)


def test_clusters_are_explored(visit, report):
    visit = visit().open(report, "clusters")
    visit.settle()
    pane = visit.page.locator(".pane >> nth=0")
    assert pane.locator(".document").count() == 8
    pane.locator(".more").click()
    assert pane.locator(".document").count() == 12
    assert pane.locator(".more").is_hidden()
    pane.locator(".cluster >> nth=2").click()
    visit.settle()
    assert pane.locator("h3").first.inner_text().startswith("Cluster 2")
    labels = set(pane.locator(".document .tinted").evaluate_all("all => all.map((one) => one.dataset.label)"))
    assert labels == {"2"}
    visit.page.keyboard.press("j")
    visit.settle()
    assert pane.locator("h3").first.inner_text().startswith("Cluster 3")
    pane.locator(".document button.link").first.click()
    visit.settle()
    assert visit.page.locator("#main h1").inner_text() == "Reader"


def test_the_reader_tells_experts_and_weights(visit, report):
    visit = visit().open(report, "reader")
    visit.settle()
    reader = hostile_inspection("one", 0).reader
    visit.page.select_option("label:has-text('Colour by') select", "expert")
    visit.page.keyboard.press("]")
    visit.settle()
    labels = (
        visit.page.locator(".pane >> nth=0")
        .locator(".token")
        .evaluate_all("all => all.map((one) => Number(one.dataset.label))")
    )
    assert labels == reader.ids_RLK[:20, 1, 0].tolist()
    visit.page.locator(".tokens >> nth=0").focus()
    visit.page.keyboard.press("ArrowRight")
    visit.page.keyboard.press("ArrowRight")
    tip = visit.page.locator("#tip")
    assert tip.is_visible()
    assert tip.locator(".chip").all_inner_texts()[1:] == [f"expert {expert}" for expert in reader.ids_RLK[1, 1]]
    weights = [float(text) for text in tip.locator(".says").all_inner_texts()]
    np.testing.assert_allclose(weights, reader.weights_RLK[1, 1].astype(float), atol=3e-3)
    visit.page.keyboard.press("Escape")
    assert tip.is_hidden()
    chip = visit.page.locator(".legend .chip >> nth=0")
    chip.click()
    assert chip.get_attribute("aria-pressed") == "true"
    assert visit.page.locator(".pane >> nth=0").locator(".token.kept").count() > 0
    visit.page.keyboard.press("j")
    visit.settle()
    assert "2 of 6" in visit.page.inner_text("#main")


def test_everything_is_reached_with_the_keyboard(visit, report):
    visit = visit().open(report)
    visit.page.keyboard.press("3")
    assert visit.page.locator("#tab-similarity").get_attribute("aria-selected") == "true"
    visit.page.keyboard.press("ArrowDown")
    assert visit.page.locator("#tab-clusters").get_attribute("aria-selected") == "true"
    assert visit.page.evaluate("() => document.activeElement.id") == "tab-clusters"
    visit.page.keyboard.press("?")
    assert visit.page.locator("#help").is_visible()
    visit.page.keyboard.press("Escape")
    assert visit.page.locator("#help").is_hidden()
    for theme in ("light", "dark", "auto"):
        visit.page.keyboard.press("t")
        assert visit.page.evaluate("() => document.documentElement.dataset.theme") == theme
    for name in VIEWS:
        visit.view(name)
        nameless = visit.page.evaluate(
            """() => [...document.querySelectorAll('button, select, input, [tabindex="0"]')]
              .filter((one) => one.offsetParent)
              .filter((one) => !(one.textContent.trim() || one.ariaLabel || one.labels?.[0]?.textContent.trim()))
              .map((one) => one.outerHTML)"""
        )
        assert nameless == [], name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_every_colour(visit, report, scheme):
    """Contrast of 4.5 or more (WCAG AA): ink on 64 token colours, and every colour of text on what lies behind it."""
    visit = visit(color_scheme=scheme).open(report)
    pairs = visit.page.evaluate(
        """() => {
          const context = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
          const rgb = (colour) => {
            context.fillStyle = colour;
            context.fillRect(0, 0, 1, 1);
            return [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)];
          };
          const span = document.body.appendChild(document.createElement('span'));
          const get = (name) => { span.style.color = `var(--${name})`; return rgb(getComputedStyle(span).color); };
          const pairs = [];
          for (const behind of ['paper', 'panel', 'raised']) {
            for (const name of ['ink', 'soft']) pairs.push([`${name} on ${behind}`, get(name), get(behind)]);
          }
          for (const name of ['accent', 'healthy', 'skewed', 'collapsed']) pairs.push([name, get(name), get('panel')]);
          for (const name of ['fill', 'fill-warm']) pairs.push([name, get('ink'), get(name)]);
          pairs.push(['tip', get('tip-ink'), get('tip')]);
          span.className = 'tinted';
          for (let index = 0; index < 64; index++) {
            span.style.setProperty('--hue', ((index * 137.508 + 250) % 360).toFixed(1));
            span.style.setProperty('--step', [0, 1, -1][index % 3]);
            pairs.push([`token colour ${index}`, get('ink'), rgb(getComputedStyle(span).backgroundColor)]);
          }
          return pairs;
        }"""
    )

    def luminance(colour):
        linear = [value / 255 / 12.92 if value <= 10 else ((value / 255 + 0.055) / 1.055) ** 2.4 for value in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(first, second):
        low, high = sorted((luminance(first), luminance(second)))
        return (high + 0.05) / (low + 0.05)

    assert {name: round(contrast(a, b), 2) for name, a, b in pairs if contrast(a, b) < 4.5} == {}


def test_results_are_compared(visit, report):
    visit = visit().open(report, "results")
    visit.settle()
    rows = visit.page.locator("table[class=''], table:not([class])").first.locator("tbody tr")
    assert "60.0 ± 2.0" in rows.first.inner_text()
    assert rows.first.locator("strong").all_inner_texts() == ["60.0"]
    assert rows.nth(2).inner_text().count("missing") == 3
    visit.page.select_option("label:has-text('Differences to') select", "0")
    visit.settle()
    assert "−5.0" in rows.first.inner_text()
    points = visit.page.evaluate("() => document.querySelector('[aria-label^=Retention]').data.map(({x, y}) => [x, y])")
    np.testing.assert_allclose(points[0], [[25, 50, 100], [45, 60, 65]])
    bars = visit.page.evaluate("() => document.querySelector('[aria-label=\"Gap closure\"]').data[0].x")
    np.testing.assert_allclose([bar for bar in bars if bar is not None], 0.25, atol=1e-9)


def test_averages_of_one_name_are_those_of_their_suites(visit, tmp_path):
    files = []
    for number, (first, second) in enumerate([(0.31, 0.72), (0.33, 0.74)]):
        made = results_document(name=f"./{number}", score=0.5, kept=(8, 4)[number], weights=f"{number}" * 32)
        shown = {"about": "", "version": 1, "tasks": ["arc_easy", "piqa"]}
        made["suites"] = {"one": shown, "two": shown}
        (average,) = made["averages"]
        made["averages"] = [
            average | {"suite": suite, "name": "macro", "score": score}
            for suite, score in (("one", first), ("two", second))
        ]
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(made))
        files.append(file)
    moesaic.report(files, tmp_path / "report.html")
    visit = visit().open(tmp_path / "report.html", "results")
    visit.settle()
    for suite, scores in (("one", ("31.0", "33.0")), ("two", ("72.0", "74.0"))):
        text = visit.page.locator(f"div[aria-label='{suite}'] tr:has-text('macro')").inner_text()
        assert all(score in text for score in scores), text
    options = visit.page.locator("label:has-text('Score') select option").all_inner_texts()
    assert options[:2] == ["one: macro", "two: macro"]
    visit.page.select_option("label:has-text('Score') select", label="two: macro")
    visit.settle()
    points = visit.page.evaluate("() => document.querySelector('[aria-label^=Retention]').data.map(({y}) => y).flat()")
    np.testing.assert_allclose(sorted(points), [72, 74])
    visit.view("overview")
    text = visit.page.locator("div[aria-label='Averages']").inner_text()
    assert [line.split()[:3] for line in text.splitlines() if "macro" in line] == [
        ["one:", "macro", "31.0"],
        ["two:", "macro", "72.0"],
    ]
    assert visit.said == []


def test_a_run_alone_makes_a_page(visit, tmp_path):
    out = tmp_path / "report.html"
    moesaic.report([write_run(tmp_path / "run", moe=False)], out)
    visit = visit().open(out)
    assert visit.texts("#tabs button") == ["1Overview", "2Training"]
    visit.view("training")
    losses = visit.page.evaluate("() => document.querySelector('[aria-label=Loss]').data[0].y")
    np.testing.assert_allclose(losses, [3 - 0.01 * step for step in range(1, 41)])
    assert visit.said == []


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Two models, two runs and four results, with names and numbers as people have them."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "inspected").mkdir()
    first, second = (tiny_inspection(name=f"./models/{name}", layers=16, experts=16) for name in ("emo", "standard"))
    write_inspection(dataclasses.replace(first, against=second), folder / "inspected")
    runs = [write_run(folder / name) for name in ("emo", "standard")]
    results = [
        write_results(folder / f"{name}.json", name=f"./models/{name}", weights=name.ljust(32, "x"))
        for name in ("emo", "emo-half", "emo-quarter", "standard")
    ]
    moesaic.report([folder / "inspected", *runs, *results], folder / "report.html")
    return folder / "report.html"


def test_no_table_is_clipped_on_a_laptop(visit, plain):
    visit = visit().open(plain)
    visit.page.set_viewport_size({"width": 1280, "height": 800})
    for name in VIEWS:
        visit.view(name)
        wide = visit.page.evaluate(
            """() => [...document.querySelectorAll('#main .scroll')].filter((one) => one.offsetParent)
              .filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.ariaLabel)"""
        )
        assert wide == [], name


def test_the_navigation_leaves_a_phone_its_screen(visit, plain):
    visit = visit().open(plain)
    visit.page.set_viewport_size({"width": 390, "height": 844})
    for name in VIEWS:
        visit.view(name)
        assert visit.page.evaluate("() => document.querySelector('.side').offsetHeight") < 140
        tab = visit.page.locator(f"#tab-{name}").bounding_box()
        assert tab is not None
        assert tab["x"] >= 0
        assert tab["x"] + tab["width"] <= 390


def test_perplexity_is_called_so_and_bits_per_byte_too(visit, plain):
    visit = visit().open(plain, "results")
    visit.settle()
    assert "held-out text, bits per byte" in visit.page.inner_text("div[aria-label=small]")
    assert "20.10" in visit.page.inner_text("div[aria-label='Perplexity, perplexity']")
    assert "1.2500" in visit.page.inner_text("div[aria-label='Bits per byte, perplexity']")
    visit.view("overview")
    averages = visit.page.inner_text("div[aria-label=Averages]")
    assert "small average" in averages
    assert "held-out text, bits per byte" in averages
    assert visit.page.title() == "Report on emo, standard and 2 more"
    visit.view("training")
    assert "Held-out perplexity, all domains" in visit.texts("#main h2")
    visit.page.select_option("label:has-text('Held-out') select", "false")
    assert "Held-out loss, all domains" in visit.texts("#main h2")


def test_narrow_screens_do_not_scroll_sideways(visit, report):
    visit = visit().open(report)
    visit.page.set_viewport_size({"width": 420, "height": 800})
    for name in VIEWS:
        visit.view(name)
        # Charts follow the window's width in their own time: what is waited for is what is asked.
        visit.wait_for("() => document.documentElement.scrollWidth <= 420")


def test_a_million_tokens_are_small_and_shown_in_parts(visit, tmp_path):
    """How fast a page opens follows from how much it is made of; the clock of a busy machine says something else."""
    write_inspection(large_inspection(), tmp_path)
    out = tmp_path / "report.html"
    result = moesaic.report([tmp_path], out)
    assert result.bytes < 15_000_000
    assert result.tokens >= 1_000_000
    page = visit().open(out)
    elements = "() => document.querySelectorAll('#main *:not(svg *)').length"
    assert page.page.evaluate(elements) < MOST_ELEMENTS
    for name in ("load", "clusters", "reader", "experts"):
        page.view(name)
        assert page.page.evaluate(elements) < MOST_ELEMENTS, name
    page.view("overview")
    assert "26,000 of these tokens" in page.page.inner_text("body")
    assert page.said == []
