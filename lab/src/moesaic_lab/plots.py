"""Plots of an experiment as SVG, for the HTML report; text from outside is escaped. No torch."""

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass

from moesaic_lab.experiments.emo_tables import router_on_5
from moesaic_lab.rows import Row
from moesaic_lab.tables import interval_of, label_values, where

_WIDTH, _HEIGHT, _MARGIN, _POINTS = 720, 300, 50, 200
_COLOURS = (
    "#1f77b4",
    "#ff7f0e",
    "#2ca02c",
    "#d62728",
    "#9467bd",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
    "#17becf",
)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a plot: at least two points, x rising from 0 or more."""

    name: str
    """In the legend; lines of one name have one colour."""
    title: str
    """Shown where the pointer rests on the line."""
    points: Sequence[tuple[float, float]]


def learning_curves(runs: Sequence[tuple[Row, Sequence[tuple[int, float]]]]) -> str:
    """Training loss against tokens, one line per run; fine-tunings are left out. Empty where no run has begun.

    Args:
        runs: labels of each run, and its tokens and losses.
    """
    lines = [
        Line(name=str(labels.get("model")), title=json.dumps(dict(labels)), points=points)
        for labels, points in runs
        if len(points) > 1 and labels.get("stage") != "tuned"
    ]
    return _plot(lines, label="training loss", last="{:,} tokens")


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
        title = ", ".join(f"{share:.1%}: {loss:.3f}" for share, loss in points)
        lines += [Line(name=str(model), title=f"{model}: {title}", points=points)] if len(points) > 1 else []
    return _plot(lines, label="held-out loss by share of experts kept", last="{:.0%} of the experts")


def _plot(lines: Sequence[Line], *, label: str, last: str) -> str:
    """An SVG: x from 0 to the largest, which `last` says, y from the lowest to the highest; empty without lines."""
    if not lines:
        return ""
    most = max(line.points[-1][0] for line in lines)
    values = [y for line in lines for _, y in line.points]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    names = list(dict.fromkeys(line.name for line in lines))
    colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}
    drawn = []
    for line in lines:
        every = max(1, len(line.points) // _POINTS)
        places = " ".join(
            f"{_MARGIN + x / most * (_WIDTH - 2 * _MARGIN):.1f},"
            f"{_MARGIN + (high - y) / span * (_HEIGHT - 2 * _MARGIN):.1f}"
            for x, y in line.points[::every]
        )
        title = f"<title>{html.escape(line.title)}</title>"
        drawn.append(f'<polyline fill="none" stroke="{colours[line.name]}" points="{places}">{title}</polyline>')
    for number, name in enumerate(names):
        place = f'x="{_WIDTH - 150}" y="{_MARGIN + 14 * number}"'
        drawn.append(f'<text {place} font-size="12" fill="{colours[name]}">{html.escape(name)}</text>')
    drawn.append(f'<text x="4" y="{_MARGIN}" font-size="12">{high:.2f}</text>')
    drawn.append(f'<text x="4" y="{_HEIGHT - _MARGIN}" font-size="12">{low:.2f}</text>')
    drawn.append(f'<text x="{_WIDTH - 2 * _MARGIN}" y="{_HEIGHT - 20}" font-size="12">{last.format(most)}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(drawn)}</svg>'
