"""What an experiment found, as Markdown and as one HTML file; text from outside is escaped."""

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moesaic.checkpoint.pio import explained, write_file
from moesaic.lab.claims import claims_table
from moesaic.lab.experiments import EXPERIMENTS
from moesaic.lab.plan import REPORT, Plan, Step, read_plan
from moesaic.lab.rows import Row, all_rows, curves, write_rows
from moesaic.lab.tables import Table
from moesaic.recipe_yaml import dump_yaml

RESULTS_FILE = "results.jsonl"
MARKDOWN_FILE = "report.md"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An experiment and its numbers so far."""

    out: Path
    plan: Plan
    rows: list[Row]
    tables: list[Table]
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
    rows = all_rows(plan, out)
    done = [step for step in plan.steps if (out / "steps" / f"{step.name}.done").exists()]
    finding = Finding(
        out=out,
        plan=plan,
        rows=rows,
        tables=[*EXPERIMENTS[plan.experiment].tables(rows), *_claims(plan.experiment, rows)],
        finished=len(_counted(done)),
        seconds=sum(_seconds(out / "steps" / f"{step.name}.time.tsv") for step in done),
    )
    with explained(out):
        write_rows(out / RESULTS_FILE, rows)
        (out / MARKDOWN_FILE).write_text("\n".join(markdown(finding)) + "\n", encoding="utf-8")
    return finding


def _claims(experiment: str, rows: Sequence[Row]) -> list[Table]:
    table = claims_table(experiment, rows)
    return [table] if table.rows else []


def _seconds(file: Path) -> float:
    """Processor time of a step, from Snakemake's benchmark file: on a shared machine the clock says little."""
    if not file.exists():
        return 0.0
    names, values = (line.split("\t") for line in file.read_text(encoding="utf-8").splitlines()[:2])
    return float(dict(zip(names, values, strict=True))["cpu_time"])


def markdown(finding: Finding) -> list[str]:
    """The lines of a report."""
    lines = [f"# {finding.heading}", "", "Means over seeds with Student's 95% intervals.", ""]
    lines += [line for notice in finding.plan.notices for line in (f"{notice}.", "")]
    for table in finding.tables:
        lines += [f"## {table.title}", "", table.note, "", *_markdown_table(table), ""]
    lines += ["## Scale", "", "```yaml", dump_yaml(dict(finding.plan.scale)).rstrip(), "```"]
    return lines


def _markdown_table(table: Table) -> Iterable[str]:
    for number, row in enumerate((table.header, *table.rows)):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        if number == 0:
            yield "|" + "---|" * len(row)


def write_html(findings: Sequence[Finding], file: Path) -> None:
    """One self-contained page: tables and learning curves of all experiments."""
    body = []
    for finding in findings:
        body.append(f"<h1>{html.escape(finding.heading)}</h1>")
        body += [f"<p>{html.escape(notice)}.</p>" for notice in finding.plan.notices]
        for table in finding.tables:
            body += [f"<h2>{html.escape(table.title)}</h2>", f"<p>{html.escape(table.note)}</p>", _html_table(table)]
        body += ["<h2>Learning curves</h2>", _curves(finding)]
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


def _curves(finding: Finding) -> str:
    """Training loss against tokens, one line per run; fine-tunings are left out."""
    lines = [(labels, points) for labels, points in curves(finding.plan, finding.out) if len(points) > 1]
    lines = [line for line in lines if line[0].get("stage") != "tuned"]
    if not lines:
        return "<p>No run has begun.</p>"
    most = max(points[-1][0] for _, points in lines)
    losses = [loss for _, points in lines for _, loss in points]
    low, high = min(losses), max(losses)
    span = (high - low) or 1.0
    kinds = list(dict.fromkeys(str(labels.get("model")) for labels, _ in lines))
    drawn = []
    for labels, points in lines:
        every = max(1, len(points) // _POINTS)
        places = (
            f"{_MARGIN + tokens / most * (_WIDTH - 2 * _MARGIN):.1f},"
            f"{_MARGIN + (high - loss) / span * (_HEIGHT - 2 * _MARGIN):.1f}"
            for tokens, loss in points[::every]
        )
        colour = _COLOURS[kinds.index(str(labels.get("model"))) % len(_COLOURS)]
        title = html.escape(json.dumps(dict(labels)))
        drawn.append(
            f'<polyline fill="none" stroke="{colour}" points="{" ".join(places)}"><title>{title}</title></polyline>'
        )
    for number, kind in enumerate(kinds):
        colour = _COLOURS[number % len(_COLOURS)]
        place = _MARGIN + 14 * number
        drawn.append(f'<text x="{_WIDTH - 150}" y="{place}" font-size="12" fill="{colour}">{html.escape(kind)}</text>')
    drawn.append(f'<text x="4" y="{_MARGIN}" font-size="12">{high:.2f}</text>')
    drawn.append(f'<text x="4" y="{_HEIGHT - _MARGIN}" font-size="12">{low:.2f}</text>')
    drawn.append(f'<text x="{_WIDTH - 2 * _MARGIN}" y="{_HEIGHT - 20}" font-size="12">{most:,} tokens</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="training loss">{"".join(drawn)}</svg>'
