"""An inspection on a terminal: tables and small bars. Nothing from the data can move the cursor or become markup."""

import io
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from moesaic.analysis.inspection import Inspection, level_name
from moesaic.analysis.summary import bucket_names, distinctness, domain_experts

_COLOURS = {"healthy": "green", "skewed": "yellow", "collapsed": "red"}
_SHORT = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
_MOST_DOMAINS = 8
_MOST_CLUSTERS = 40
_BAR = 10


@dataclass(frozen=True, kw_only=True)
class Screen:
    """Where it is shown."""

    width: int = 100
    colour: bool = False
    unicode: bool = True
    """Otherwise bars are made of #, and other characters are escaped."""


def render(inspection: Inspection, screen: Screen) -> str:
    """The whole summary as text."""
    console = Console(
        file=io.StringIO(),
        width=screen.width,
        force_terminal=screen.colour,
        color_system="standard" if screen.colour else None,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )
    models = [inspection] if inspection.against is None else [inspection, inspection.against]
    for one in models:
        for part in _parts(one, screen):
            console.print(part)
    if inspection.against is not None:
        console.print(_side_by_side(inspection, inspection.against, screen))
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


def _parts(inspection: Inspection, screen: Screen) -> Iterator[RenderableType]:
    model, data, verdict = inspection.model, inspection.data, inspection.verdict
    shared = f" and {model.num_shared_experts} shared" if model.num_shared_experts else ""
    yield _title(
        f"{visible(model.name, 80)}: {model.model_type}, {len(model.layers)} MoE layers of {model.num_experts} experts"
        f"{shared}, {model.top_k} per token"
    )
    yield Text(
        f"{data.tokens:,} tokens of {data.documents:,} documents ({data.records:,} records read), the first "
        f"{data.document_tokens} of each, {data.min_length} to {data.max_length} long, seed {data.seed}"
    )
    yield Text.assemble("Verdict: ", (verdict.level, _style(screen, _COLOURS[verdict.level])), f": {verdict.sentence}")
    yield _health(inspection, screen)
    yield _domains(inspection)
    yield _clusters(inspection, screen)
    yield _positions(inspection, screen)
    yield Text(f"First token: {inspection.first_token.sentence}.\n")


def _title(text: str) -> Text:
    return Text(text, style="bold")


def _style(screen: Screen, style: str) -> str:
    return style if screen.colour else ""


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """A table whose first column is on the left; columns named with a > are numbers on the right."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), title_style="bold", header_style="dim")
    for name in columns:
        number = name.startswith(">")
        table.add_column(name.lstrip(">"), justify="right" if number else "left", no_wrap=number)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def _health(inspection: Inspection, screen: Screen) -> Table:
    numbers = inspection.statistics
    grouped = inspection.model.groups is not None
    columns = ["layer", "verdict", "evenness", ">entropy", ">like n", ">largest", ">two", ">dead", ">confidence"]
    rows = []
    for row, layer in enumerate(inspection.model.layers):
        level = level_name(numbers.level_SL[0, row])
        cells: list[str | Text] = [
            str(layer),
            Text(level, style=_style(screen, _COLOURS[level])),
            bar(float(numbers.entropy_SL[0, row]), screen),
            f"{numbers.entropy_SL[0, row]:.3f}",
            f"{numbers.effective_SL[0, row]:.1f}",
            f"{numbers.largest_SL[0, row]:.1%}",
            f"{numbers.two_busiest_SL[0, row]:.1%}",
            str(numbers.dead_SL[0, row]),
            f"{numbers.confidence_SL[0, row]:.2f}",
        ]
        rows.append([*cells, f"{numbers.coselection_SL[0, row]:.1%}"] if grouped else cells)
    return _table("\nLoad of the experts", [*columns, ">in group"] if grouped else columns, rows)


def _domains(inspection: Inspection) -> Table:
    domains = inspection.data.domains[:_MOST_DOMAINS]
    used = {row["domain"]: row["experts"] for row in domain_experts(inspection)}
    columns = ["domain", ">documents", ">tokens", ">like n", *(f">{visible(one.name, 10)}" for one in domains)]
    rows = []
    for index, domain in enumerate(domains):
        similar = [f"{inspection.statistics.similarity_NN[index, other]:.2f}" for other in range(len(domains))]
        best = ", ".join(f"{one['layer']}/{one['expert']} {one['load']:.0%}" for one in used[domain.name][:2])
        effective = inspection.statistics.effective_SL[1 + index].mean()
        counts = [f"{domain.documents:,}", f"{domain.tokens:,}", f"{effective:.1f}"]
        rows.append([visible(domain.name, 20), *counts, *similar, best])
    more = len(inspection.data.domains) - len(domains)
    title = "\nDomains: cosine of their mean probabilities" + (f" (the first {len(domains)})" if more else "")
    return _table(title, [*columns, "uses (layer/expert)"], rows)


def _clusters(inspection: Inspection, screen: Screen) -> RenderableType:
    found = inspection.clustering
    if found is None:
        return Text(f"\nNo token clusters: {inspection.why_no_clusters}.")
    figures = [f"purity {found.purity:.2f}"]
    figures += [] if found.nmi is None else [f"mutual information with domains {found.nmi:.2f}"]
    figures += [] if found.silhouette is None else [f"silhouette {found.silhouette:.2f}"]
    figures.append(
        f"{found.concentration:.0%} of a document in its main cluster ({found.concentration_by_chance:.0%} by chance)"
    )
    rows = []
    for index, cluster in enumerate(found.clusters[:_MOST_CLUSTERS]):
        main = int(np.argmax(cluster.domains))
        strings = "  ".join(visible(one.name.strip(" ") or "␣", 12) for one in cluster.frequent[:5])
        share = cluster.tokens / inspection.data.tokens
        name = visible(inspection.data.domains[main].name, 16)
        size = [str(index), f"{cluster.tokens:,}", bar(share * len(found.clusters) / 4, screen, 8)]
        rows.append([*size, f"{cluster.purity:.0%}", name, strings])
    title = f"\nToken clusters ({found.components} of {found.features} dimensions): {', '.join(figures)}"
    return _table(title, [">cluster", ">tokens", "", ">purity", "domain", "strings"], rows)


def _positions(inspection: Inspection, screen: Screen) -> Table:
    numbers = inspection.statistics
    rows = []
    for index, name in enumerate(bucket_names(numbers.bucket_start_B, inspection.data.document_tokens)):
        if numbers.bucket_tokens_B[index]:
            alike = float(numbers.position_to_document_BL[index].mean())
            before = f"{numbers.position_to_previous_BL[index].mean():.2f}" if index else ""
            confidence = f"{numbers.position_confidence_BL[index].mean():.2f}"
            rows.append([name, confidence, bar(alike, screen), f"{alike:.2f}", before])
    columns = [">position", ">confidence", "like document", ">cosine", ">like previous"]
    return _table("\nRouting over a document (mean over layers)", columns, rows)


def _side_by_side(first: Inspection, second: Inspection, screen: Screen) -> Table:
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
    return _table("Side by side", columns, rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
