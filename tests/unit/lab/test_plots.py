"""Plots: what is on the lines, by the numbers, and nothing from outside as markup."""

import re

from moesaic_lab.plots import learning_curves, retention


def _subset(model, share, losses, documents: int | None = 5, method="router"):
    labels = {"measure": "subset_loss", "model": model, "share": share}
    chosen = {} if share == 1.0 else {"method": method, "documents": documents}
    return [
        {**labels, **chosen, "domain": domain, "seed": seed, "value": loss + extra}
        for seed, loss in enumerate(losses)
        for domain, extra in (("a", -0.5), ("b", 0.5))
    ]


def _lines(svg):
    """Colour, points and title of each line."""
    found = re.findall(r'stroke="(.*?)" points="(.*?)"><title>(.*?)</title>', svg)
    return [(colour, [tuple(map(float, one.split(","))) for one in points.split()], t) for colour, points, t in found]


def test_the_loss_by_share_is_a_line_per_model():
    rows = [
        *_subset("standard", 1.0, (2.0, 3.0)),
        *_subset("emo", 1.0, (2.0, 3.0)),
        *_subset("standard", 0.25, (4.0, 5.0)),
        *_subset("emo", 0.25, (2.5, 3.5)),
        *_subset("emo", 0.5, (2.1, 3.1)),
        *_subset("emo", 0.25, (9.0, 9.0), documents=1),
        *_subset("emo", 0.25, (9.0, 9.0), documents=None, method="random"),
        {"measure": "mass_kept", "model": "emo", "share": 0.25, "method": "router", "documents": 5, "value": 9.0},
    ]
    svg = retention(rows)
    standard, emo = _lines(svg)
    # x: 50 is none, 670 all experts; y: 50 is the highest loss (4.5), 250 the lowest (2.5), the mean over both seeds.
    assert standard[1:] == ([(205.0, 50.0), (670.0, 250.0)], "standard: 25.0%: 4.500, 100.0%: 2.500")
    assert emo[1] == [(205.0, 200.0), (360.0, 240.0), (670.0, 250.0)]
    assert standard[0] != emo[0]
    assert ">100% of the experts</text>" in svg
    assert ">standard</text>" in svg


def test_there_is_no_plot_without_a_part():
    assert retention([]) == ""
    assert retention(_subset("emo", 1.0, (2.0,))) == ""


def test_learning_curves_leave_out_fine_tuning_and_escape_names():
    points = [(0, 4.0), (50, 3.0), (100, 2.0)]
    runs = [({"model": "<b>", "seed": 0}, points), ({"model": "emo", "stage": "tuned"}, points), ({}, points[:1])]
    svg = learning_curves(runs)
    assert [line[1] for line in _lines(svg)] == [[(50.0, 50.0), (360.0, 150.0), (670.0, 250.0)]]
    assert "<b>" not in svg
    assert ">100 tokens</text>" in svg
    assert learning_curves(runs[1:]) == ""
