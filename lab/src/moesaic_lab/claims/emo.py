"""Claims of EMO."""

from collections.abc import Sequence

from moesaic.common.intervals import Interval
from moesaic_lab.claims.claim import REGIME, Claim, Effect, Premise, combine, less, within
from moesaic_lab.experiments.emo_tables import nearest_to_5, router_on_5
from moesaic_lab.rows import Row
from moesaic_lab.tables import label_values, where

_NEAR = 0.05
"""Nats per token that still count as a match."""
_SAME = 0.02
"""The same for two ways of choosing."""


def _trained(rows: Sequence[Row], model: str) -> list[Row]:
    return where(rows, measure="loss", stage="trained", model=model)


_BEATS_DENSE = Premise(
    name="MoE beats dense",
    figure="loss of the dense model of the active size minus that of the standard MoE",
    effect=lambda rows: less(_trained(rows, "standard"), _trained(rows, "dense")),
)
_MOE = (*REGIME, _BEATS_DENSE)


def _tuned(rows: Sequence[Row], model: str, share: float) -> list[Row]:
    return where(rows, measure="loss", stage="tuned", model=model, share=share)


def _full(rows: Sequence[Row], model: str) -> list[Row]:
    return where(rows, measure="subset_loss", model=model, share=1.0)


def _part(rows: Sequence[Row], model: str, share: float) -> list[Row]:
    """With a share of the experts, chosen by router on about 5 documents."""
    return where(router_on_5(where(rows, measure="subset_loss")), model=model, share=share)


def _chosen(rows: Sequence[Row], share: float, method: str, documents: int | None, model: str = "emo") -> list[Row]:
    subsets = where(rows, measure="subset_loss", model=model, share=share)
    return where(subsets, method=method, documents=documents)


def _five(rows: Sequence[Row]) -> int:
    return nearest_to_5(label_values(rows, "documents"))


def _smaller_drop(share: float, *, better: str = "emo", worse: str = "standard") -> Effect:
    """How much less one model loses with a share of the experts than another."""

    def effect(rows: Sequence[Row]) -> Interval | None:
        parts = (_part(rows, worse, share), _full(rows, worse), _part(rows, better, share), _full(rows, better))
        return combine(lambda part, full, ours, our_full: (part - full) - (ours - our_full), *parts)

    return effect


def _small_drop(share: float, most: float) -> Effect:
    """A share of what the standard model loses, less what EMO loses."""

    def effect(rows: Sequence[Row]) -> Interval | None:
        parts = (_part(rows, "standard", share), _full(rows, "standard"), _part(rows, "emo", share), _full(rows, "emo"))
        return combine(lambda part, full, ours, our_full: most * (part - full) - (ours - our_full), *parts)

    return effect


def _smaller_drop_tuned(share: float) -> Effect:
    def effect(rows: Sequence[Row]) -> Interval | None:
        parts = (
            *(_tuned(rows, "standard", share), _tuned(rows, "standard", 1.0)),
            *(_tuned(rows, "emo", share), _tuned(rows, "emo", 1.0)),
        )
        return combine(lambda part, full, ours, our_full: (part - full) - (ours - our_full), *parts)

    return effect


def _method_matters_less(share: float) -> Effect:
    def effect(rows: Sequence[Row]) -> Interval | None:
        number = _five(rows)
        parts = (
            _chosen(rows, share, method, number, model)
            for model in ("standard", "emo")
            for method in ("router", "easy_ep")
        )
        return combine(lambda a, b, ours, our_other: abs(a - b) - abs(ours - our_other), *parts)

    return effect


def _few_documents(number: int) -> Effect:
    def effect(rows: Sequence[Row]) -> Interval | None:
        most = max(label_values(rows, "documents"), default=None)
        return within(_SAME, _chosen(rows, 0.25, "router", number), _chosen(rows, 0.25, "router", most))

    return effect


def _similarity(rows: Sequence[Row]) -> Interval | None:
    mine = where(rows, measure="domain_similarity")
    last = max(label_values(mine, "layer"), default=None)
    return less(where(mine, model="emo", layer=last), where(mine, model="standard", layer=last))


def _clearer_later(rows: Sequence[Row]) -> Interval | None:
    mine = where(rows, measure="domain_similarity", model="emo")
    layers = label_values(mine, "layer")
    return less(where(mine, layer=max(layers)), where(mine, layer=min(layers))) if layers else None


def _cluster(rows: Sequence[Row], measure: str, model: str) -> list[Row]:
    return where(rows, measure=f"cluster_{measure}", model=model)


def _topics(rows: Sequence[Row]) -> Interval | None:
    return less(_cluster(rows, "nmi", "standard"), _cluster(rows, "nmi", "emo"))


def _concentration(rows: Sequence[Row]) -> Interval | None:
    """Above chance, because a large cluster holds many tokens of every document."""
    parts = (
        _cluster(rows, measure, model)
        for model in ("emo", "standard")
        for measure in ("concentration", "concentration_by_chance")
    )
    return combine(lambda ours, our_chance, other, its_chance: (ours - our_chance) - (other - its_chance), *parts)


def _spikes(rows: Sequence[Row]) -> Interval | None:
    mine = where(rows, measure="largest_gradient", stage="trained")
    return less(where(mine, model="emo"), where(mine, model="local_balancing"))


CLAIMS = (
    Claim(
        says="as a full model EMO matches the standard MoE",
        place="section 5.1, table 1",
        figure=f"{_NEAR} minus EMO's excess over the standard MoE",
        effect=lambda rows: within(_NEAR, _trained(rows, "emo"), _trained(rows, "standard")),
        otherwise="not seen",
        premises=_MOE,
    ),
    Claim(
        says="both are better than a dense model of the active size: standard",
        place="section 5.1",
        figure="loss of dense minus standard",
        effect=lambda rows: less(_trained(rows, "standard"), _trained(rows, "dense")),
    ),
    Claim(
        says="both are better than a dense model of the active size: EMO",
        place="section 5.1",
        figure="loss of dense minus EMO",
        effect=lambda rows: less(_trained(rows, "emo"), _trained(rows, "dense")),
    ),
    Claim(
        says="with 25% of the experts the standard MoE breaks and EMO does not",
        place="section 5.2, figure 3",
        figure="rise of the standard MoE's loss minus EMO's rise, 25%",
        effect=_smaller_drop(0.25),
        premises=_MOE,
    ),
    Claim(
        says="the same with 12.5%",
        place="section 5.2, figure 3",
        figure="rise of the standard MoE's loss minus EMO's rise, 12.5%",
        effect=_smaller_drop(0.125),
        premises=_MOE,
    ),
    Claim(
        says="EMO's drop is a tenth of the standard MoE's at 25% (1 against 10 points)",
        place="section 5.2",
        figure="a tenth of the standard MoE's rise minus EMO's rise",
        effect=_small_drop(0.25, 0.1),
        otherwise="not seen",
        premises=_MOE,
    ),
    Claim(
        says="the same after fine-tuning",
        place="section 5.2, figure 3",
        figure="rise of the standard MoE's loss minus EMO's rise, 25%, both fine-tuned",
        effect=_smaller_drop_tuned(0.25),
        premises=_MOE,
    ),
    Claim(
        says="25% of EMO matches or beats a standard MoE of that size from scratch",
        place="figure 1, figure 11",
        figure=f"{_NEAR} minus the excess of 25% of EMO over the MoE from scratch",
        effect=lambda rows: within(_NEAR, _part(rows, "emo", 0.25), _trained(rows, "few_experts")),
        otherwise="not seen",
        premises=_MOE,
    ),
    Claim(
        says="a part of the standard MoE falls below the dense model",
        place="section 5.2",
        figure="loss of 25% of the standard MoE minus that of dense",
        effect=lambda rows: less(_trained(rows, "dense"), _part(rows, "standard", 0.25)),
        premises=_MOE,
    ),
    Claim(
        says="12.5% of EMO still beats the dense model",
        place="section 5.2",
        figure="loss of dense minus that of 12.5% of EMO",
        effect=lambda rows: less(_part(rows, "emo", 0.125), _trained(rows, "dense")),
        premises=_MOE,
    ),
    Claim(
        says="the way of choosing experts matters less for EMO",
        place="section 5.2, figure 4",
        figure="difference of router and Easy-EP at 12.5%: standard minus EMO",
        effect=_method_matters_less(0.125),
        premises=_MOE,
    ),
    Claim(
        says="Easy-EP is better than router for larger parts of a standard MoE",
        place="section 5.2, figure 4",
        figure="loss by router minus loss by Easy-EP, 50% of the standard MoE",
        effect=lambda rows: less(
            _chosen(rows, 0.5, "easy_ep", _five(rows), "standard"),
            _chosen(rows, 0.5, "router", _five(rows), "standard"),
        ),
        premises=_MOE,
    ),
    Claim(
        says="random experts are far worse",
        place="section 5.2, figure 4",
        figure="loss by random minus loss by router, 25% of EMO",
        effect=lambda rows: less(_part(rows, "emo", 0.25), _chosen(rows, 0.25, "random", None)),
        premises=_MOE,
    ),
    Claim(
        says="five examples are enough to choose",
        place="appendix B.2, figure 12",
        figure=f"{_SAME} minus what 5 documents lose against the most, 25% of EMO",
        effect=_few_documents(5),
        otherwise="not seen",
        premises=_MOE,
    ),
    Claim(
        says="even one example is",
        place="appendix B.2, figure 12",
        figure=f"{_SAME} minus what 1 document loses against the most, 25% of EMO",
        effect=_few_documents(1),
        otherwise="not seen",
        premises=_MOE,
    ),
    Claim(
        says="domains use more different experts in EMO",
        place="section 5.3, figure 6",
        figure="cosine of domains in the last layer: standard minus EMO",
        effect=_similarity,
        premises=_MOE,
    ),
    Claim(
        says="domains separate in later layers",
        place="section 5.3, figure 6",
        figure="cosine of domains in EMO: first layer minus last",
        effect=_clearer_later,
        premises=_MOE,
    ),
    Claim(
        says="tokens cluster by topic in EMO, by form in a standard MoE",
        place="section 5.3, figure 5",
        figure="mutual information of clusters and domains: EMO minus standard",
        effect=_topics,
        premises=_MOE,
    ),
    Claim(
        says="the tokens of a document are in one cluster in EMO, in many in a standard MoE",
        place="section 5.3, figure 5",
        figure="share of a document's tokens in its main cluster, above chance: EMO minus standard",
        effect=_concentration,
        premises=_MOE,
    ),
    Claim(
        says="local balancing makes training unstable",
        place="appendix A.1, figure 7",
        figure="largest gradient norm over the median, after the first tenth of the steps: local minus global",
        effect=_spikes,
        premises=_MOE,
    ),
    Claim(
        says="a pool of one size is worse at other sizes",
        place="appendix A.2, table 2",
        figure="loss of 12.5%: trained with pools of 25% minus with drawn sizes",
        effect=lambda rows: less(_part(rows, "emo", 0.125), _part(rows, "fixed_pool", 0.125)),
        premises=_MOE,
    ),
    Claim(
        says="a shared expert helps",
        place="appendix A.3, table 2",
        figure="loss of the full model without minus with a shared expert",
        effect=lambda rows: less(_trained(rows, "emo"), _trained(rows, "no_shared_expert")),
        premises=_MOE,
    ),
    Claim(
        says="annealing a standard MoE with pools makes it modular in part",
        place="appendix B.4, table 3",
        figure="rise of the standard MoE's loss minus that of the annealed one, 25%",
        effect=_smaller_drop(0.25, better="annealing"),
        premises=_MOE,
    ),
    Claim(
        says="pools from the start are better than annealing",
        place="appendix B.4, table 3",
        figure="rise of the annealed model's loss minus EMO's, 25%",
        effect=_smaller_drop(0.25, worse="annealing"),
        premises=_MOE,
    ),
)
