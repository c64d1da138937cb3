"""What an experiment found: tables and pictures as Markdown, and as one HTML file; text from outside is escaped."""

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from moesaic.common.files import explained, write_file
from moesaic.common.yaml_text import dump_yaml
from moesaic_lab.claims import Claim, claims_table, interval, premises_table
from moesaic_lab.experiments import EXPERIMENTS
from moesaic_lab.experiments.emo_results import router_on_5
from moesaic_lab.plan import REPORT, Plan, Step, read_plan
from moesaic_lab.results import Row, Table, all_rows, curves, interval_of, label_values, show, where, write_rows
from moesaic_lab.workflow import cpu_seconds_file

RESULTS_FILE = "results.jsonl"
MARKDOWN_FILE = "report.md"
PICTURES = "pictures"
_NOTES = {
    "Loss against the share of experts kept": "Experts chosen by router on 5 documents of a domain; held-out loss, "
    "mean over domains and seeds.",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An experiment and its numbers so far."""

    out: Path
    plan: Plan
    rows: list[Row]
    tables: list[Table]
    pictures: Mapping[str, str]
    """Title -> SVG."""
    finished: int
    """Steps."""
    seconds: float
    """Processor time of all finished steps."""

    @property
    def heading(self) -> str:
        """Experiment, data and how far it is."""
        data = self.plan.data or "generated domains"
        missing = len(_counted(self.plan.steps)) - self.finished
        state = f", {missing} steps not finished" if missing else ""
        cost = f"{self.seconds / 60:.0f} minutes of one core"
        return f"{self.plan.experiment}: {data}, seeds {self.plan.seeds}, {cost}{state}"


def _counted(steps: Iterable[Step]) -> list[Step]:
    """All but the report itself."""
    return [step for step in steps if step.name != REPORT]


def find(out: Path) -> Finding:
    """Read an experiment's numbers and write results.jsonl and report.md into its folder."""
    plan = read_plan(out)
    experiment, rows = EXPERIMENTS[plan.experiment], all_rows(plan, out)
    claims = [table for make in (premises_table, claims_table) if (table := make(experiment.claims, rows)).rows]
    done = [step for step in plan.steps if (out / "steps" / f"{step.name}.done").exists()]
    finding = Finding(
        out=out,
        plan=plan,
        rows=rows,
        tables=[*experiment.tables(rows), *claims],
        pictures=_pictures(plan, out, rows),
        finished=len(_counted(done)),
        seconds=sum(_seconds(cpu_seconds_file(out, step.name)) for step in done),
    )
    with explained(out):
        write_rows(out / RESULTS_FILE, rows)
        (out / PICTURES).mkdir(exist_ok=True)
        for title, picture in finding.pictures.items():
            (out / _picture_file(title)).write_text(picture, encoding="utf-8")
        (out / MARKDOWN_FILE).write_text("\n".join(markdown(finding)) + "\n", encoding="utf-8")
    return finding


def _pictures(plan: Plan, out: Path, rows: Sequence[Row]) -> dict[str, str]:
    found = learning_curves(list(curves(plan, out)))
    pictures = {f"Learning curves {panel}".rstrip(): picture for panel, picture in found.items()}
    pictures |= {"Loss against the share of experts kept": retention(rows)}
    pictures |= {"Claims, right of 0 where they hold": claims_picture(EXPERIMENTS[plan.experiment].claims, rows)}
    return {title: picture for title, picture in pictures.items() if picture}


def _picture_file(title: str) -> str:
    return f"{PICTURES}/{re.sub('[^a-z0-9.]+', '-', title.lower())}.svg"


def _seconds(file: Path) -> float:
    """Processor time of a step: on a shared machine the clock says little."""
    return float(file.read_text(encoding="utf-8")) if file.exists() else 0.0


def markdown(finding: Finding) -> list[str]:
    """The lines of a report."""
    lines = [f"# {finding.heading}", ""]
    lines += [line for notice in finding.plan.notices for line in (f"{notice}.", "")]
    lines += ["Means over seeds with Student's 95% intervals.", ""]
    for table in finding.tables:
        lines += [f"## {table.title}", "", table.note, "", *_markdown_table(table), ""]
    for title in finding.pictures:
        lines += [f"## {title}", "", *([_NOTES[title], ""] if title in _NOTES else [])]
        lines += [f"![{title}]({_picture_file(title)})", ""]
    lines += ["## Scale", "", "```yaml", dump_yaml(dict(finding.plan.scale)).rstrip(), "```"]
    return lines


def _markdown_table(table: Table) -> Iterable[str]:
    for number, row in enumerate((table.header, *table.rows)):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        if number == 0:
            yield "|" + "---|" * len(row)


def write_html(findings: Sequence[Finding], file: Path) -> None:
    """One self-contained page: tables and plots of all experiments."""
    body = []
    for finding in findings:
        body.append(f"<h1>{html.escape(finding.heading)}</h1>")
        body += [f"<p>{html.escape(notice)}.</p>" for notice in finding.plan.notices]
        for table in finding.tables:
            body += [f"<h2>{html.escape(table.title)}</h2>", f"<p>{html.escape(table.note)}</p>", _html_table(table)]
        for title, picture in finding.pictures.items():
            body += [f"<h2>{html.escape(title)}</h2>", f"<p>{html.escape(_NOTES.get(title, ''))}</p>", picture]
        body += ["<h2>Scale</h2>", f"<pre>{html.escape(dump_yaml(dict(finding.plan.scale)))}</pre>"]
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>moesaic lab</title>{_STYLE}{''.join(body)}</html>\n"
    )
    write_file(file, page)


_STYLE = (
    "<style>body{font:16px system-ui;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}"
    "table{border-collapse:collapse;display:block;overflow-x:auto}"
    "td,th{padding:.2rem .7rem;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}"
    "td:first-child,th:first-child{text-align:left}svg{max-width:100%}</style>"
)


def _html_table(table: Table) -> str:
    rows = []
    for number, row in enumerate((table.header, *table.rows)):
        kind = "th" if number == 0 else "td"
        rows.append("<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in row) + "</tr>")
    return f"<table>{''.join(rows)}</table>"


_WIDTH, _HEIGHT, _MARGIN, _LEGEND = 720, 360, 50, 190
_COLOURS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
    *("#003f5c", "#a05195", "#f95d6a", "#665191", "#2f4b7c", "#ffa600", "#006d2c", "#54278f", "#969696", "#000000"),
)
_ROW = 22
_STRIP = 260
"""Width of the part of the claims' picture that has the intervals."""
_EDGE = 20
_SKIP = 0.05
"""Share of a learning curve that may leave the picture at the top: what a reader wants to see is its end."""
_NOT_IN_NAMES = {"seed", "stage", "tokens_before", "share"}

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a plot: at least two points, x rising from 0 or more."""

    name: str
    """In the legend, and where the pointer rests on the line."""
    points: Sequence[Point]
    band: Sequence[tuple[float, float]] = ()
    """Lowest and highest y at each point."""


def learning_curves(runs: Sequence[tuple[Row, Sequence[Point]]]) -> Mapping[str, str]:
    """Held-out loss against tokens: a mean line per model with a band from the lowest to the highest seed.

    One picture for every stage, and for every tau/T; runs that have neither (of fixed sizes) are in all of them.
    Fine-tunings are left out.

    Args:
        runs: labels of each run that has begun, and its tokens and losses.

    Returns:
        Title -> SVG; empty where no run has two points.
    """
    shown = [(labels, points) for labels, points in runs if len(points) > 1 and labels.get("stage") != "tuned"]
    panels = dict.fromkeys(name for labels, _ in shown if (name := _panel(labels)))
    pictures = {}
    for panel in panels or [""]:
        lines = _lines_of([(labels, points) for labels, points in shown if _panel(labels) in ("", panel)])
        if picture := _plot(
            lines, label=f"held-out loss {panel}".strip(), last="{:,.0f} to {:,.0f} tokens", skip=_SKIP
        ):
            pictures[panel] = picture
    return pictures


def _panel(labels: Row) -> str:
    if "stage" in labels:
        return str(labels["stage"])
    return f"tau/T = {labels['share']:g}" if "share" in labels else ""


def _lines_of(runs: Sequence[tuple[Row, Sequence[Point]]]) -> list[Line]:
    """Seeds of one model joined: at every number of tokens that all of them have."""
    models: dict[str, list[dict[float, float]]] = {}
    for labels, points in runs:
        name = " ".join(str(value) for label, value in labels.items() if label not in _NOT_IN_NAMES)
        models.setdefault(name, []).append(dict(points))
    lines = []
    for name, seeds in models.items():
        values = {x: [seed[x] for seed in seeds] for x in seeds[0] if all(x in seed for seed in seeds)}
        if len(values) > 1:
            band = [(min(found), max(found)) for found in values.values()]
            points = [(x, fmean(found)) for x, found in values.items()]
            lines.append(Line(name=name, points=points, band=band if len(seeds) > 1 else ()))
    return lines


def retention(rows: Sequence[Row]) -> str:
    """Held-out loss against the share of the experts kept, one line per model; empty where no part was measured.

    Experts are chosen by router on (about) 5 documents of a domain; losses are means over domains and seeds.
    """
    subsets = where(rows, measure="subset_loss")
    used = [*where(subsets, share=1.0), *router_on_5(subsets)]
    lines = []
    for model in label_values(used, "model"):
        mine = where(used, model=model)
        means = {share: interval_of(where(mine, share=share)) for share in sorted(label_values(mine, "share"))}
        points = [(share, mean.value) for share, mean in means.items() if mean is not None]
        lines += [Line(name=str(model), points=points)] if len(points) > 1 else []
    return _plot(lines, label="held-out loss by share of experts kept", last="{:.0%} to {:.0%} of the experts")


def _plot(lines: Sequence[Line], *, label: str, last: str, skip: float = 0.0) -> str:
    """An SVG; empty without lines.

    x goes from the first to the last, both said by `last`, y from the lowest to the highest that a line has after the
    share `skip` of the way.
    """
    if not lines:
        return ""
    first, most = (end(x for line in lines for x, _ in line.points) for end in (min, max))
    early = first + (most - first) * skip
    values = [y for line in lines for x, y in line.points if x >= early]
    low, high = min(values), max(values)

    def place(x: float, y: float) -> str:
        across = _MARGIN + (x - first) / ((most - first) or 1) * (_WIDTH - 2 * _MARGIN - _LEGEND)
        down = _MARGIN + (high - min(y, high)) / ((high - low) or 1) * (_HEIGHT - 2 * _MARGIN)
        return f"{across:.1f},{down:.1f}"

    drawn = []
    ordered = sorted(lines, key=lambda line: line.points[-1][1], reverse=True)
    for number, line in enumerate(ordered):
        colour = _COLOURS[number % len(_COLOURS)]
        xs = [x for x, _ in line.points]
        if line.band:
            edge = [*zip(xs, (low for low, _ in line.band), strict=True)]
            edge += reversed([*zip(xs, (high for _, high in line.band), strict=True)])
            drawn.append(f'<polygon fill="{colour}" opacity="0.2" points="{" ".join(place(*one) for one in edge)}"/>')
        points = " ".join(place(*one) for one in line.points)
        name = html.escape(line.name)
        title = f"<title>{name}</title>"
        drawn.append(f'<polyline fill="none" stroke="{colour}" points="{points}">{title}</polyline>')
        at = f'x="{_WIDTH - _LEGEND - 40}" y="{_MARGIN + 14 * number}"'
        drawn.append(f'<text {at} font-size="12" fill="{colour}">{name} {line.points[-1][1]:.3f}</text>')
    drawn.append(f'<text x="4" y="{_MARGIN}" font-size="12">{high:.2f}</text>')
    drawn.append(f'<text x="4" y="{_HEIGHT - _MARGIN}" font-size="12">{low:.2f}</text>')
    drawn.append(f'<text x="{_MARGIN}" y="{_HEIGHT - 20}" font-size="12">{html.escape(label)}</text>')
    end = f'x="{_WIDTH - _LEGEND - _MARGIN}" y="{_HEIGHT - 20}" text-anchor="end"'
    drawn.append(f'<text {end} font-size="12">{last.format(first, most)}</text>')
    return _svg(drawn, _WIDTH, max(_HEIGHT, _MARGIN + 14 * len(lines)), label)


def _svg(drawn: Sequence[str], width: int, height: int, label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" role="img" '
        f'aria-label="{html.escape(label)}"><rect width="100%" height="100%" fill="#fff"/>{"".join(drawn)}</svg>'
    )


def claims_picture(claims: Sequence[Claim], rows: Sequence[Row]) -> str:
    """Every claim's figure with its interval, left or right of 0, and the verdict; empty without a measured claim.

    Figures differ by a factor of a thousand, so the axis is the root of the figure, cut at 1.
    """

    def across(value: float) -> float:
        return _EDGE + (1 + math.copysign(math.sqrt(min(1.0, abs(value))), value)) * _STRIP / 2

    drawn, number = [], 0
    for claim in claims:
        effect = interval(claim.effect, rows)
        if effect is None:
            continue
        number += 1
        y, said = _ROW * number, claim.verdict(rows)
        colour = {"seen": "#1a7f37", "opposite": "#b42318", "not seen": "#b42318"}.get(said, "#777")
        low, high = (effect.value if end is None else end for end in (effect.low, effect.high))
        drawn.append(f'<line x1="{across(low):.1f}" x2="{across(high):.1f}" y1="{y}" y2="{y}" stroke="{colour}"/>')
        drawn.append(f'<circle cx="{across(effect.value):.1f}" cy="{y}" r="4" fill="{colour}"/>')
        text = html.escape(f"{said}, {show(effect)}: {claim.says}")
        drawn.append(f'<text x="{_STRIP + 2 * _EDGE}" y="{y + 4}" font-size="12" fill="{colour}">{text}</text>')
    if not drawn:
        return ""
    height = _ROW * (number + 2)
    drawn.append(f'<line x1="{across(0)}" x2="{across(0)}" y1="8" y2="{height - _ROW}" stroke="#000"/>')
    for value in (-1.0, -0.1, 0.0, 0.1, 1.0):
        at = f'x="{across(value):.1f}" y="{height - 6}" text-anchor="middle"'
        drawn.append(f'<text {at} font-size="11">{value:g}</text>')
    return _svg(drawn, 1160, height, "claims: right of 0 where a claim holds")
