"""Verdicts: what an interval says about a claim, and figures against arithmetic done by hand."""

import json
from pathlib import Path

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.common.intervals import Interval
from moesaic_lab.claims import (
    NotMeasuredError,
    Numbers,
    claims_table,
    interval,
    premises_table,
    smallest,
    verdict,
)
from moesaic_lab.experiments import EXPERIMENTS
from moesaic_lab.plan import Plan, Step, read_plan, write_plan
from moesaic_lab.results import all_rows, show

CLAIMS = {name: experiment.claims for name, experiment in EXPERIMENTS.items()}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Interval(value=1.0, low=0.5, high=1.5), "seen"),
        (Interval(value=1.0, low=-0.5, high=2.5), "undecided"),
        (Interval(value=-1.0, low=-1.5, high=-0.5), "opposite"),
        (Interval(value=1.0, low=None, high=None), "undecided"),
        (None, "not measured"),
    ],
)
def test_verdicts(found, expected):
    assert verdict(found) == expected
    assert verdict(found, otherwise="not seen") == expected.replace("opposite", "not seen")
    assert verdict(found, testable=False) == ("not measured" if found is None else "not testable here")


_JOINT = {"measure": "loss", "stage": "joint"}


def _premises(bigram, without_ffns):
    """Losses of bigrams by seed, of a model that has 3 nats, and of it without its FFNs."""
    return [
        *_labelled(*bigram, measure="bigram_loss"),
        *_labelled(*[3.0 for _ in bigram], measure="premise_loss"),
        *_labelled(*[without_ffns for _ in bigram], measure="without_ffns_loss"),
    ]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "more than bigrams ? (fails), FFNs worth something ? (fails)"),
        (
            [(3.5, 3.5, 3.5), 6.0],
            "more than bigrams 0.200 ± 0.000 (holds), FFNs worth something 0.500 ± 0.000 (holds)",
        ),
        (
            [(3.2, 3.2, 3.2), 6.0],
            "more than bigrams -0.100 ± 0.000 (fails), FFNs worth something 0.500 ± 0.000 (holds)",
        ),
        # Above on average, but the interval has 0.
        (
            [(3.2, 3.4, 3.6), 6.0],
            "more than bigrams 0.100 ± 0.497 (fails), FFNs worth something 0.500 ± 0.000 (holds)",
        ),
        (
            [(3.5, 3.5, 3.5), 5.4],
            "more than bigrams 0.200 ± 0.000 (holds), FFNs worth something -0.100 ± 0.000 (fails)",
        ),
        # One seed: its value decides.
        ([(3.5,), 6.0], "more than bigrams 0.200 (holds), FFNs worth something 0.500 (holds)"),
    ],
)
def test_a_claim_whose_premise_fails_is_not_testable(rows, said):
    measured = [*_labelled(3.0, 3.0, 3.0, **_JOINT, model="divmoe"), *_labelled(3.1, 3.1, 3.1, **_JOINT, model="dense")]
    premises = _premises(*rows) if rows else []
    row = next(
        row for row in claims_table(CLAIMS["divmoe"], [*measured, *premises]).rows if "the dense model" in row[0]
    )
    assert row[2] == said
    assert row[4] == ("not testable here" if "fails" in said else "seen")
    held = {row[0]: row[2] for row in premises_table(CLAIMS["divmoe"], premises).rows}
    parts = dict(zip(held, said.split(", "), strict=True))
    assert held == {name: "no" if "fails" in part else "yes" for name, part in parts.items()}


def test_figures():
    """Means within a seed, intervals over the seeds that have every number."""
    rows = [*_labelled(1.0, 2.0, 3.0, measure="loss", model="a"), *_labelled(1.5, 2.5, measure="loss", model="b")]
    rows += [{**row, "domain": "b", "value": row["value"] + 1.0} for row in rows if row["model"] == "b"]

    def mean(n: Numbers) -> float:
        return n("loss", model="b") - n("loss", model="a")

    assert interval(mean, rows) == Interval(value=1.0, low=1.0, high=1.0)  # 1.5 and 2.5 are 2 on average
    assert interval(lambda n: n("loss", model="b", domain="b") - n("loss", model="a"), rows[:5]) is None
    both = interval(lambda n: [n("loss", model="b", domain=one) - n("loss", model="a") for one in "ba"], rows)
    assert both == Interval(value=0.5, low=0.5, high=0.5)
    assert interval(lambda n: n("loss", model="c"), rows) is None
    with pytest.raises(NotMeasuredError):
        Numbers(rows=rows)("loss", model="c")
    assert smallest([]) is None


@pytest.mark.parametrize(
    ("parts", "figure", "expected"),
    [
        ([(0.01, 0.005, 0.015), (0.02, -0.03, 0.07)], "0.010 (-0.030 to 0.015)", "undecided"),
        ([(0.01, 0.005, 0.015), (0.02, 0.01, 0.03)], "0.010 ± 0.005", "seen"),
        ([(-0.02, -0.05, 0.01), (-0.01, -0.015, -0.005)], "-0.020 (-0.050 to -0.005)", "opposite"),
        ([(0.02, 0.01, 0.03), (0.01, None, None)], "0.010", "undecided"),
        ([(-0.02, -0.03, -0.01), (-0.05, None, None)], "-0.020 ± 0.010", "opposite"),
    ],
)
def test_a_claim_over_several_models_needs_every_one_of_them(parts, figure, expected):
    effect = smallest([Interval(value=value, low=low, high=high) for value, low, high in parts])
    assert (show(effect), verdict(effect)) == (figure, expected)


def test_one_undecided_baseline_leaves_the_claim_over_all_undecided():
    def end(model, *values):
        return _labelled(*values, measure="loss", stage="joint", model=model)

    near = [*end("divmoe", 3.0, 3.1, 3.2), *end("btx", 3.01, 3.112, 3.209)]
    rows = [*near, *end("sparse", 3.0, 3.13, 3.23), *end("virtual_group", 4, 4, 4), *end("drop", 4, 4, 4)]
    assert _said("divmoe", rows, "without fine-grained experts (BTX)")[1] == "seen"
    figure, said = _said("divmoe", rows, "DivMoE is better than every other")
    assert (figure, said) == ("0.0103 (-0.0230 to 0.0141)", "undecided")


@pytest.mark.parametrize("experiment", CLAIMS)
def test_without_numbers_every_claim_is_there_and_not_measured(experiment):
    table = claims_table(CLAIMS[experiment], [])
    assert len(table.rows) == len(CLAIMS[experiment])
    assert {row[4] for row in table.rows} <= {"not measured"}


def test_the_page_of_claims_has_every_claim_in_its_words():
    page = (Path(__file__).parents[3] / "docs" / "claims.md").read_text()
    for claim in (claim for claims in CLAIMS.values() for claim in claims):
        assert f"\n| {claim.says} | {claim.figure} |" in page


def _said(experiment, rows, says):
    """Figure and verdict of a claim, in the regime of the papers."""
    moe_beats_dense = [
        *_labelled(3.0, 3.1, 3.2, measure="loss", stage="trained", model="standard"),
        *_labelled(3.1, 3.2, 3.3, measure="loss", stage="trained", model="dense"),
    ]
    table = claims_table(CLAIMS[experiment], [*rows, *_premises((3.5, 3.5, 3.5), 6.0), *moe_beats_dense])
    return next(row[3:] for row in table.rows if row[0].startswith(says))


def _labelled(*values, **labels):
    return [{"domain": "a", "seed": seed, "value": value, **labels} for seed, value in enumerate(values)]


def test_a_gap_is_closed_only_where_there_is_one():
    small, large = {"measure": "loss", "model": "fixed", "experts": 8}, {"measure": "loss", "model": "fixed"}
    grown = {"measure": "loss", "model": "grown", "treatment": "gradient_norm", "share": 0.5, "from": 8}
    start = [*_labelled(3.0, 3.1, 3.2, **small), *_labelled(2.81, 2.92, 3.01, **grown)]
    says = "at 100% CPT the gap"
    figure, said = _said("expand", [*start, *_labelled(2.8, 2.9, 3.0, **large, experts=16)], says)
    assert (figure, said) == ("0.0067 ± 0.0143", "undecided")  # 0.01, 0 and 0.01
    figure, said = _said("expand", [*start, *_labelled(2.82, 2.93, 3.02, **large, experts=16)], says)
    assert (figure, said) == ("0.0277 ± 0.0014", "seen")  # 0.028, 0.027 and 0.028
    figure, said = _said("expand", [*start, *_labelled(2.6, 2.7, 2.8, **large, experts=16)], says)
    assert said == "not seen"
    figure, said = _said("expand", [*start, *_labelled(3.1, 3.0, 3.2, **large, experts=16)], says)
    assert (figure, said) == ("0.1867 ± 0.2361", "not testable here")  # the grown model beats both


def test_copies_and_the_choice_of_copies_are_compared_apart():
    grown = {"measure": "loss", "model": "grown", "share": 0.8, "from": 8}
    rows = [
        *_labelled(3.0, 3.1, 3.2, **grown, treatment="random"),
        *_labelled(2.9, 3.0, 3.1, **grown, treatment="uniform"),
        *_labelled(2.8, 2.9, 3.0, **grown, treatment="gradient_norm"),
    ]
    assert _said("expand", rows, "copies chosen by utility")[0] == "0.2000 ± 0.0000"
    assert _said("expand", rows, "(ours) uniform copies")[0] == "0.1000 ± 0.0000"


def test_a_match_of_a_quarter_of_emo_may_lose_a_little():
    part = {"measure": "subset_loss", "model": "emo", "share": 0.25, "method": "router", "documents": 5}
    scratch = {"measure": "loss", "model": "few_experts", "stage": "trained"}
    rows = [*_labelled(3.02, 3.12, 3.22, **part), *_labelled(3.0, 3.1, 3.2, **scratch)]
    figure, said = _said("emo", rows, "25% of EMO matches")
    assert (figure, said) == ("0.0300 ± 0.0000", "seen")


def test_concentration_counts_above_chance():
    measured = {
        "emo": {"cluster_concentration": (0.6, 0.7, 0.8), "cluster_concentration_by_chance": (0.5, 0.6, 0.7)},
        "standard": {"cluster_concentration": (0.4, 0.5, 0.6), "cluster_concentration_by_chance": (0.1, 0.2, 0.3)},
    }
    rows = [
        row
        for model, measures in measured.items()
        for measure, values in measures.items()
        for row in _labelled(*values, model=model, measure=measure)
    ]
    figure, said = _said("emo", rows, "a document's tokens")
    assert (figure, said) == ("-0.2000 ± 0.0000", "opposite")


def test_gradients_of_the_first_steps_are_no_spikes(tmp_path):
    norms = [90.0, 50.0, *[1.0] * 16, 2.0, 6.0]
    place = {"step": 1, "tokens": 5}
    common = {"kind": "step", "loss": 3.0, "lr": 0.1, "domain_loss": {}, **place}
    common["timing"] = {"seconds": 1.0, "tokens_per_second": 5.0}
    lines = [{**common, "grad_norm": norm} for norm in norms]
    held_out = {"loss": 3.0, "standard_error": 0.1, "documents": 1, "tokens": 5}
    lines.append({"kind": "validation", "validation": {"a": held_out}, **place})
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "s.done").touch()
    step = Step(name="s", commands=(), runs={"runs/r": {"model": "emo", "seed": 0}})
    plan = Plan(experiment="emo", data=None, domains=("a",), seeds=1, scale={}, steps=(step,))
    values = {row["measure"]: row["value"] for row in all_rows(plan, tmp_path)}
    assert (values["spikes"], values["largest_gradient"]) == (1, 6.0)


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("rows/a.jsonl", '{"measure": "loss", "value": "low", "seed": 0}', r"a\.jsonl:1: value: expected a number"),
        ("rows/a.jsonl", '{"measure": "loss", "value": 1.0}', r"a\.jsonl:1: seed: this key is required"),
        ("rows/a.jsonl", "[1]", r"a\.jsonl:1: expected a JSON object"),
        ("runs/r/metrics.jsonl", '{"kind": "step", "step": 1}', r"metrics\.jsonl:1: tokens: this key is required"),
        ("runs/r/metrics.jsonl", "", r"metrics\.jsonl: has no step and validation"),
    ],
)
def test_numbers_that_were_edited_are_refused(tmp_path, file, line, message):
    step = Step(name="s", commands=(), runs={"runs/r": {"model": "emo", "seed": 0}} if "runs" in file else {})
    plan = Plan(experiment="emo", data=None, domains=("a",), seeds=1, scale={}, steps=(step,))
    for folder in ("runs/r", "rows", "steps"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "steps" / "s.done").touch()
    (tmp_path / file).write_text(line and f"{line}\n")
    with pytest.raises(MoesaicError, match=message):
        all_rows(plan, tmp_path)


@pytest.mark.parametrize("change", [{"seeds": "3"}, {"steps": [{"name": 1}]}, {"domains": None}, {"other": 1}])
def test_a_plan_that_was_edited_is_refused(tmp_path, change):
    plan = Plan(experiment="emo", data=None, domains=("a",), seeds=1, scale={}, steps=())
    write_plan(plan, tmp_path / "out")
    assert read_plan(tmp_path / "out") == plan
    file = tmp_path / "out" / "plan.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(MoesaicError, match=rf"plan\.json: {next(iter(change))}"):
        read_plan(tmp_path / "out")


def test_a_collapse_is_a_place_between_coarse_and_scratch():
    def end(model, *values):
        return [
            {"measure": "loss", "stage": "joint", "model": model, "domain": "a", "seed": seed, "value": value}
            for seed, value in enumerate(values)
        ]

    rows = [*end("drop", 3.0, 3.1, 3.0), *end("scratch", 5.0, 5.1, 5.0), *end("drop_fine", 4.9, 5.0, 4.8)]
    figure, said = _said("divmoe", rows, "fine-grained Drop")
    assert figure == "0.4333 ± 0.0717"  # 0.45, 0.45 and 0.4
    assert said == "seen"
