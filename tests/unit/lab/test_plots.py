"""Plots: what is on the lines, by the numbers, and nothing from outside as markup."""

import re

from moesaic_lab.experiments.divmoe_results import CLAIMS
from moesaic_lab.report import claims_picture, learning_curves, retention


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
    standard, emo = sorted(_lines(svg), key=lambda line: line[2], reverse=True)
    # x: 50 is a quarter, 480 all experts; y: 50 is the highest loss (4.5), 310 the lowest (2.5), a mean over seeds.
    assert standard[1:] == ([(50.0, 50.0), (480.0, 310.0)], "standard")
    assert emo[1] == [(50.0, 245.0), (193.3, 297.0), (480.0, 310.0)]
    assert standard[0] != emo[0]
    assert ">25% to 100% of the experts</text>" in svg
    assert ">standard 2.500</text>" in svg


def test_there_is_no_plot_without_a_part():
    assert retention([]) == ""
    assert retention(_subset("emo", 1.0, (2.0,))) == ""


def test_learning_curves_have_a_mean_and_a_band_per_model_and_a_picture_per_stage():
    first, second = [(0, 4.0), (50, 3.0), (100, 2.0)], [(0, 4.0), (50, 2.0), (100, 1.0)]
    other = [(0, 4.0), (50, 3.0), (100, 3.0)]
    runs = [
        ({"model": "<b>", "seed": 0, "stage": "joint"}, first),
        ({"model": "<b>", "seed": 1, "stage": "joint"}, second),
        ({"model": "dense", "seed": 0, "stage": "joint"}, other),
        ({"model": "base", "seed": 0, "stage": "dense"}, first),
        ({"model": "emo", "stage": "tuned"}, first),
        ({"model": "begun", "stage": "joint"}, first[:1]),
    ]
    pictures = learning_curves(runs)
    assert list(pictures) == ["joint", "dense"]
    dense, both = _lines(pictures["joint"])  # y from 3.0, the highest from a twentieth on, to 1.5, the lowest mean
    assert both[1] == [(50.0, 50.0), (265.0, 136.7), (480.0, 310.0)]
    assert dense[1:] == ([(50.0, 50.0), (265.0, 50.0), (480.0, 50.0)], "dense")
    assert pictures["joint"].count("<polygon") == 1
    assert "<b>" not in pictures["joint"]
    assert ">0 to 100 tokens</text>" in pictures["joint"]
    assert ">&lt;b&gt; 1.500</text>" in pictures["joint"]
    assert learning_curves(runs[4:]) == {}


def test_models_of_fixed_size_are_in_the_picture_of_every_share():
    points = [(0, 4.0), (100, 2.0)]
    runs = [({"model": "fixed", "experts": 8}, points)]
    runs += [({"model": "grown", "experts": 8, "share": share}, points) for share in (0.5, 0.8)]
    pictures = learning_curves(runs)
    assert {title: len(_lines(svg)) for title, svg in pictures.items()} == {"tau/T = 0.5": 2, "tau/T = 0.8": 2}


def test_claims_are_right_of_0_where_they_hold():
    def end(model, *values):
        rows = enumerate(values)
        return [{"measure": "loss", "stage": "joint", "model": model, "seed": s, "value": v} for s, v in rows]

    def ablated(value):
        return [{"measure": "without_ffns_loss", "seed": seed, "value": value} for seed in range(2)]

    rows = [{"measure": m, "seed": s, "value": v} for m, v in (("bigram_loss", 4), ("premise_loss", 3)) for s in (0, 1)]
    rows += [*end("divmoe", 2.0, 2.0), *end("dense", 2.25, 2.25), *end("btx", 1.91, 1.91)]
    svg = claims_picture(CLAIMS, [*rows, *ablated(6.0)])
    places = [float(x) for x in re.findall(r'cx="(.*?)"', svg)]
    assert places == [215.0, 111.0]  # 150 and a half, or 0.3, of 130: roots of 0.25 and -0.09
    assert ">seen, 0.250 ± 0.000: DivMoE is better than the dense model" in svg
    assert ">opposite, -0.090 ± 0.000: without fine-grained experts" in svg
    assert ">not testable here, 0.250 ± 0.000: DivMoE" in claims_picture(CLAIMS, [*rows, *ablated(3.1)])
    assert claims_picture(CLAIMS, []) == ""
