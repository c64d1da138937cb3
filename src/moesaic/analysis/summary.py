"""An inspection in short: one JSON document, and tables and small bars on a terminal. Torch-free.

Nothing from the data can move the cursor or become markup.
"""

import io
import shutil
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from moesaic.analysis.inspection import Inspection, level_name
from moesaic.common.recipe import recipe_values

LAYER_FIGURES = ("entropy", "effective", "largest", "two_busiest", "dead", "coselection", "confidence", "uncertainty")
"""Fields of `Statistics` without their suffix that there is one number of per scope and layer."""
_COLOURS = {"healthy": "green", "skewed": "yellow", "collapsed": "red"}
_SHORT = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
_MOST_LAYERS = _MOST_DOMAINS = _MOST_CLUSTERS = 3
_BAR = 8


def layer_rows(inspection: Inspection, scope: int = 0) -> list[dict[str, Any]]:
    """The health of every MoE layer, on all data or one domain."""
    statistics = inspection.statistics
    return [
        {
            "layer": layer,
            "level": level_name(statistics.level_SL[scope, row]),
            **{name: getattr(statistics, f"{name}_SL")[scope, row].item() for name in LAYER_FIGURES},
        }
        for row, layer in enumerate(inspection.model.layers)
    ]


def domain_experts(inspection: Inspection) -> list[dict[str, Any]]:
    """For each domain, the experts that are used most above what they are used on all data, best first."""
    load_SLE = inspection.statistics.load_SLE
    rows = []
    for index, domain in enumerate(inspection.data.domains):
        excess_LE = load_SLE[1 + index] - load_SLE[0]
        best = np.argsort(-excess_LE, axis=None, kind="stable")[:5]
        experts = [tuple(map(int, np.unravel_index(place, excess_LE.shape))) for place in best]
        rows.append(
            {
                "domain": domain.name,
                "experts": [
                    {
                        "layer": inspection.model.layers[layer],
                        "expert": expert,
                        "load": float(load_SLE[1 + index, layer, expert]),
                        "load_on_all": float(load_SLE[0, layer, expert]),
                    }
                    for layer, expert in experts
                    if excess_LE[layer, expert] > 0
                ],
            }
        )
    return rows


def distinctness(inspection: Inspection) -> dict[str, float | None]:
    """Mean cosine between different domains in the first and the last MoE layer and over all; None for one domain."""
    statistics = inspection.statistics
    different = ~np.eye(len(inspection.data.domains), dtype=bool)
    if not different.any():
        return {"first_layer": None, "last_layer": None, "all_layers": None}
    return {
        "first_layer": float(statistics.similarity_LNN[0][different].mean()),
        "last_layer": float(statistics.similarity_LNN[-1][different].mean()),
        "all_layers": float(statistics.similarity_NN[different].mean()),
    }


def summarise(inspection: Inspection) -> dict[str, Any]:
    """Everything that fits on a page, as plain values; `against` is the second model's."""
    clustering = inspection.clustering
    figures = None
    if clustering is not None:
        figures = {key: value for key, value in recipe_values(clustering).items() if key != "clusters"}
        figures["sizes"] = [cluster.tokens for cluster in clustering.clusters]
    return {
        "model": recipe_values(inspection.model),
        "data": recipe_values(inspection.data),
        "verdict": recipe_values(inspection.verdict),
        "rule": inspection.rule,
        "layers": layer_rows(inspection),
        "domains": {
            "similarity": inspection.statistics.similarity_NN.tolist(),
            "mean_similarity": distinctness(inspection),
            "experts": domain_experts(inspection),
        },
        "clustering": figures,
        "why_no_clusters": inspection.why_no_clusters,
        "first_token": recipe_values(inspection.first_token),
        "against": None if inspection.against is None else summarise(inspection.against),
    }


@dataclass(frozen=True, kw_only=True)
class Screen:
    """Where it is shown."""

    width: int = 100
    colour: bool = False
    unicode: bool = True
    """Otherwise bars are made of #, and other characters are escaped."""


def terminal_lines(inspection: Inspection) -> list[str]:
    """The summary for the terminal that this process writes to: one screen of 24 lines of 80 characters."""
    screen = Screen(
        width=max(80, shutil.get_terminal_size((80, 24)).columns),
        colour=sys.stdout.isatty(),
        unicode=(sys.stdout.encoding or "").lower().replace("-", "") == "utf8",
    )
    return render(inspection, screen).splitlines()


def render(inspection: Inspection, screen: Screen) -> str:
    """The summary as text: of one model its parts, of two models their figures side by side."""
    console = Console(
        file=io.StringIO(),
        width=screen.width,
        force_terminal=screen.colour,
        force_jupyter=False,  # else rich shows it in the notebook itself, and nothing comes back
        color_system="standard" if screen.colour else None,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )
    models = [inspection] if inspection.against is None else [inspection, inspection.against]
    for one in models:
        for part in _head(one, screen):
            console.print(part)
    tables = _tables(inspection, screen)
    for part in tables if inspection.against is None else [_side_by_side(inspection, inspection.against, screen)]:
        console.print(part)
    file = console.file
    assert isinstance(file, io.StringIO)
    text = file.getvalue()
    return text if screen.unicode else text.encode("ascii", "backslashreplace").decode()


def visible(text: str, most: int = 40) -> str:
    """Text from data as one harmless piece: control, format and unpaired characters are named, not printed."""
    shown = "".join(
        _SHORT.get(character, character) if character in _SHORT or not _hidden(character) else _escaped(character)
        for character in text[: most + 1]
    )
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def bar(share: float, screen: Screen, width: int = _BAR) -> str:
    """A bar that is full at 1."""
    full = round(max(0.0, min(1.0, share)) * width) if share == share else 0
    return ("█" if screen.unicode else "#") * full + ("·" if screen.unicode else ".") * (width - full)


def _hidden(character: str) -> bool:
    return unicodedata.category(character)[0] == "C" or character in "\u2028\u2029"


def _escaped(character: str) -> str:
    return f"\\x{ord(character):02x}" if ord(character) < 256 else f"\\u{ord(character):04x}"


def _head(inspection: Inspection, screen: Screen) -> Iterator[RenderableType]:
    model, data, verdict = inspection.model, inspection.data, inspection.verdict
    shared = f" and {model.num_shared_experts} shared" if model.num_shared_experts else ""
    yield _title(
        f"{visible(model.name, 80)}: {model.model_type}, {len(model.layers)} MoE layers of {model.num_experts} experts"
        f"{shared}, {model.top_k} per token"
    )
    yield Text(
        f"{data.tokens:,} tokens: the first {data.document_tokens} of {data.documents:,} documents, "
        f"{data.min_length} to {data.max_length} long; seed {data.seed}"
    )
    yield Text.assemble("Verdict: ", (verdict.level, _style(screen, _COLOURS[verdict.level])), f": {verdict.sentence}")


def _tables(inspection: Inspection, screen: Screen) -> Iterator[RenderableType]:
    yield _health(inspection, screen)
    yield _domains(inspection, screen)
    yield from _clusters(inspection, screen)
    yield Text(f"First token: {inspection.first_token.sentence.partition(';')[0]}.")


def _title(text: str) -> Text:
    return Text(text, style="bold")


def _style(screen: Screen, style: str) -> str:
    return style if screen.colour else ""


def _table(title: str, screen: Screen, columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Group:
    """A table of the first columns, as many as the screen has room for; those named with a > stand on the right."""
    table = Table(box=None, padding=(0, 1), header_style="dim")
    widths = [max(cell_len(str(cell)) for cell in column) for column in zip(columns, *rows, strict=True)]
    fitting = sum(end <= screen.width for end in accumulate(width + 2 for width in widths))
    for name in columns[:fitting]:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row[:fitting]))
    return Group(_title(title), table)


def _some(what: str, shown: int, of: int, which: str) -> str:
    return what if shown == of else f"{what} (of {of}, the {shown} {which})"


def _health(inspection: Inspection, screen: Screen) -> Group:
    """The layers whose load is least even, the worst first."""
    numbers, layers = inspection.statistics, inspection.model.layers
    columns = ["layer", "verdict", "evenness", ">largest", ">two", ">dead", ">like n", ">entropy", ">confidence"]
    grouped = inspection.model.groups is not None
    rows = []
    for row in np.lexsort((numbers.entropy_SL[0], -numbers.level_SL[0]))[:_MOST_LAYERS]:
        level = level_name(numbers.level_SL[0, row])
        cells: list[str | Text] = [
            str(layers[row]),
            Text(level, style=_style(screen, _COLOURS[level])),
            bar(float(numbers.entropy_SL[0, row]), screen),
            f"{numbers.largest_SL[0, row]:.1%}",
            f"{numbers.two_busiest_SL[0, row]:.1%}",
            str(numbers.dead_SL[0, row]),
            f"{numbers.effective_SL[0, row]:.1f}",
            f"{numbers.entropy_SL[0, row]:.3f}",
            f"{numbers.confidence_SL[0, row]:.2f}",
        ]
        rows.append([*cells, f"{numbers.coselection_SL[0, row]:.1%}"] if grouped else cells)
    title = _some("Load of the experts", len(rows), len(layers), "least even")
    return _table(title, screen, [*columns, ">in group"] if grouped else columns, rows)


def _domains(inspection: Inspection, screen: Screen) -> Group:
    """The domains of most tokens; `alike` is the mean cosine of a domain's mean probabilities with the others'."""
    domains, numbers = inspection.data.domains, inspection.statistics
    used = {row["domain"]: row["experts"] for row in domain_experts(inspection)}
    rows = []
    for index in sorted(range(len(domains)), key=lambda index: -domains[index].tokens)[:_MOST_DOMAINS]:
        domain = domains[index]
        others = np.delete(numbers.similarity_NN[index], index)
        best = ", ".join(f"{one['layer']}/{one['expert']} {one['load']:.0%}" for one in used[domain.name][:2])
        counts = [f"{domain.tokens:,}", f"{numbers.effective_SL[1 + index].mean():.1f}"]
        alike = _number(float(others.mean()) if len(others) else None)
        rows.append([visible(domain.name, 20), *counts, alike, best, f"{domain.documents:,}"])
    title = _some("Domains", len(rows), len(domains), "with the most tokens")
    return _table(title, screen, ["domain", ">tokens", ">like n", ">alike", "uses (layer/expert)", ">documents"], rows)


def _clusters(inspection: Inspection, screen: Screen) -> Iterator[RenderableType]:
    found = inspection.clustering
    if found is None:
        yield Text(f"No token clusters: {inspection.why_no_clusters}.")
        return
    figures = [f"purity {found.purity:.2f}"]
    figures += [] if found.nmi is None else [f"information {found.nmi:.2f}"]
    figures.append(f"{found.concentration:.0%} of a document in one")
    rows = []
    for index, cluster in enumerate(found.clusters[:_MOST_CLUSTERS]):
        main = int(np.argmax(cluster.domains))
        strings = "  ".join(visible(one.name.strip(" ") or "␣", 9) for one in cluster.frequent[:3])
        name = visible(inspection.data.domains[main].name, 16)
        rows.append([str(index), f"{cluster.tokens:,}", f"{cluster.purity:.0%}", name, strings])
    title = f"{len(found.clusters)} token clusters: {', '.join(figures)}"
    yield _table(title, screen, [">cluster", ">tokens", ">purity", "domain", "strings"], rows)


def _side_by_side(first: Inspection, second: Inspection, screen: Screen) -> Group:
    def figures(one: Inspection) -> list[tuple[str, str]]:
        numbers, found, alike = one.statistics, one.clustering, distinctness(one)
        return [
            ("verdict", one.verdict.level),
            ("load entropy, mean", f"{numbers.entropy_SL[0].mean():.3f}"),
            ("load entropy, lowest", f"{numbers.entropy_SL[0].min():.3f}"),
            ("two busiest, highest", f"{numbers.two_busiest_SL[0].max():.1%}"),
            ("dead experts", str(int(numbers.dead_SL[0].sum()))),
            ("confidence", f"{numbers.confidence_SL[0].mean():.2f}"),
            ("domains alike, first layer", _number(alike["first_layer"])),
            ("domains alike, last layer", _number(alike["last_layer"])),
            ("cluster purity", _number(found and found.purity)),
            ("information on domains", _number(found and found.nmi)),
            ("document in one cluster", _number(found and found.concentration)),
        ]

    rows = [[name, ours, theirs] for (name, ours), (_, theirs) in zip(figures(first), figures(second), strict=True)]
    half = max(10, screen.width // 2 - 16)
    columns = ["", f">{visible(first.model.name, half)}", f">{visible(second.model.name, half)}"]
    return _table("Side by side", screen, columns, rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
