"""Pictures of an experiment as SVG, for report.md and the HTML page; text from outside is escaped. No torch."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from moesaic_lab.claims import CLAIMS
from moesaic_lab.claims.claim import verdict
from moesaic_lab.experiments.emo_tables import router_on_5
from moesaic_lab.rows import Row
from moesaic_lab.tables import interval_of, label_values, show, where

_WIDTH, _HEIGHT, _MARGIN, _LEGEND = 720, 360, 50, 190
_COLOURS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
    *("#003f5c", "#a05195", "#f95d6a", "#665191", "#2f4b7c", "#ffa600", "#006d2c", "#54278f", "#969696", "#000000"),
)
_ROW = 22
_STRIP = 260
"""Width of the part of the claims' picture that has the intervals."""
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
        if picture := _plot(lines, label=f"held-out loss {panel}".strip(), last="{:,.0f} tokens", skip=_SKIP):
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
    return _plot(lines, label="held-out loss by share of experts kept", last="{:.0%} of the experts")


def _plot(lines: Sequence[Line], *, label: str, last: str, skip: float = 0.0) -> str:
    """An SVG; empty without lines.

    x goes from the first to the last, which `last` says, y from the lowest to the highest that a line has after the
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
    drawn.append(f'<text {end} font-size="12">{last.format(most)}</text>')
    return _svg(drawn, _WIDTH, max(_HEIGHT, _MARGIN + 14 * len(lines)), label)


def _svg(drawn: Sequence[str], width: int, height: int, label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" role="img" '
        f'aria-label="{html.escape(label)}"><rect width="100%" height="100%" fill="#fff"/>{"".join(drawn)}</svg>'
    )


def claims_picture(experiment: str, rows: Sequence[Row]) -> str:
    """Every claim's figure with its interval, left or right of 0, and the verdict; empty without a measured claim.

    Figures differ by a factor of a thousand, so the axis is the root of the figure, cut at 1.
    """

    def across(value: float) -> float:
        return (1 + math.copysign(math.sqrt(min(1.0, abs(value))), value)) * _STRIP / 2

    drawn, number = [], 0
    for claim in CLAIMS[experiment]:
        effect = claim.effect(rows)
        if effect is None:
            continue
        number += 1
        y, said = _ROW * number, verdict(claim, rows)
        colour = {"seen": "#1a7f37", "opposite": "#b42318", "not seen": "#b42318"}.get(said, "#777")
        low, high = (effect.value if end is None else end for end in (effect.low, effect.high))
        drawn.append(f'<line x1="{across(low):.1f}" x2="{across(high):.1f}" y1="{y}" y2="{y}" stroke="{colour}"/>')
        drawn.append(f'<circle cx="{across(effect.value):.1f}" cy="{y}" r="4" fill="{colour}"/>')
        text = html.escape(f"{said}: {claim.says} ({show(effect)})")
        drawn.append(f'<text x="{_STRIP + 10}" y="{y + 4}" font-size="12" fill="{colour}">{text}</text>')
    if not drawn:
        return ""
    height = _ROW * (number + 2)
    drawn.append(f'<line x1="{_STRIP / 2}" x2="{_STRIP / 2}" y1="8" y2="{height - _ROW}" stroke="#000"/>')
    for value in (-1.0, -0.1, 0.0, 0.1, 1.0):
        at = f'x="{across(value):.1f}" y="{height - 6}" text-anchor="middle"'
        drawn.append(f'<text {at} font-size="11">{value:g}</text>')
    return _svg(drawn, 1000, height, "claims: right of 0 where a claim holds")
