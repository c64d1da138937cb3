"""What an experiment found, as Markdown and as one HTML file; text from outside is escaped."""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moesaic.checkpoint.pio import explained, write_file
from moesaic.common.yaml_text import dump_yaml
from moesaic_lab.claims import claims_table, premises_table
from moesaic_lab.experiments import EXPERIMENTS
from moesaic_lab.plan import REPORT, Plan, Step, read_plan
from moesaic_lab.plots import claims_picture, learning_curves, retention
from moesaic_lab.rows import Row, all_rows, curves, write_rows
from moesaic_lab.step import cpu_seconds_file
from moesaic_lab.tables import Table

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
    rows = all_rows(plan, out)
    done = [step for step in plan.steps if (out / "steps" / f"{step.name}.done").exists()]
    finding = Finding(
        out=out,
        plan=plan,
        rows=rows,
        tables=[*EXPERIMENTS[plan.experiment].tables(rows), *_claims(plan.experiment, rows)],
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


def _claims(experiment: str, rows: Sequence[Row]) -> list[Table]:
    return [table for make in (premises_table, claims_table) if (table := make(experiment, rows)).rows]


def _pictures(plan: Plan, out: Path, rows: Sequence[Row]) -> dict[str, str]:
    found = learning_curves(list(curves(plan, out)))
    pictures = {f"Learning curves {panel}".rstrip(): picture for panel, picture in found.items()}
    pictures |= {"Loss against the share of experts kept": retention(rows)}
    pictures |= {"Claims, right of 0 where they hold": claims_picture(plan.experiment, rows)}
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
