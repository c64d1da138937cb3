"""What an experiment found, as Markdown and as one HTML file; text from outside is escaped."""

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moesaic.checkpoint.pio import explained, write_file
from moesaic.common.yaml_text import dump_yaml
from moesaic_lab.claims import claims_table
from moesaic_lab.experiments import EXPERIMENTS
from moesaic_lab.plan import REPORT, Plan, Step, read_plan
from moesaic_lab.plots import learning_curves, retention
from moesaic_lab.rows import Row, all_rows, curves, write_rows
from moesaic_lab.step import cpu_seconds_file
from moesaic_lab.tables import Table

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
        seconds=sum(_seconds(cpu_seconds_file(out, step.name)) for step in done),
    )
    with explained(out):
        write_rows(out / RESULTS_FILE, rows)
        (out / MARKDOWN_FILE).write_text("\n".join(markdown(finding)) + "\n", encoding="utf-8")
    return finding


def _claims(experiment: str, rows: Sequence[Row]) -> list[Table]:
    table = claims_table(experiment, rows)
    return [table] if table.rows else []


def _seconds(file: Path) -> float:
    """Processor time of a step: on a shared machine the clock says little."""
    return float(file.read_text(encoding="utf-8")) if file.exists() else 0.0


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
    """One self-contained page: tables and plots of all experiments."""
    body = []
    for finding in findings:
        body.append(f"<h1>{html.escape(finding.heading)}</h1>")
        body += [f"<p>{html.escape(notice)}.</p>" for notice in finding.plan.notices]
        for table in finding.tables:
            body += [f"<h2>{html.escape(table.title)}</h2>", f"<p>{html.escape(table.note)}</p>", _html_table(table)]
        body += _plots(finding)
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


_KEPT = "Experts chosen by router on 5 documents of a domain; held-out loss, mean over domains and seeds."


def _plots(finding: Finding) -> list[str]:
    """Learning curves, and what a part of the experts costs where the experiment measured it."""
    curve = learning_curves(list(curves(finding.plan, finding.out))) or "<p>No run has begun.</p>"
    parts = ["<h2>Learning curves</h2>", curve]
    if kept := retention(finding.rows):
        parts += ["<h2>Loss against the share of experts kept</h2>", f"<p>{_KEPT}</p>", kept]
    return parts
