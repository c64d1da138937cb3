"""The tables and claims of the experiment `emo`."""

from collections.abc import Callable, Iterable, Sequence

from moesaic_lab.claims import Claim, Numbers, Premise, needing
from moesaic_lab.results import Row, Table, by_model, difference, interval_of, label_values, pivot, show, where

_TRAINING = {
    "spikes": ("spikes", 1),
    "largest / median": ("largest_gradient", 1),
    "load entropy": ("load_entropy", 3),
    "seconds": ("seconds", 0),
}
_CLUSTERS = {
    "purity": ("cluster_purity", 3),
    "mutual information": ("cluster_nmi", 3),
    "in main cluster": ("cluster_concentration", 3),
    "by chance": ("cluster_concentration_by_chance", 3),
}


def tables(rows: Sequence[Row]) -> list[Table]:
    """Every table that there are numbers for."""
    trained = where(rows, measure="loss", stage="trained")
    subsets = where(rows, measure="subset_loss")
    parts = [row for row in subsets if row["share"] != 1.0]
    made = [
        pivot(
            trained,
            title="From scratch on the same tokens",
            note="Held-out loss in nats per token after training, with all experts. `annealing`, where it was run, is "
            "not from scratch: it goes on from `standard`, with pools, on more tokens.",
        ),
        _increase(subsets),
        pivot(
            parts,
            title="Each method and number of calibration documents",
            note="Held-out loss with the experts chosen for a domain, mean over the domains. Columns: share kept.",
            down=("model", "method", "documents"),
            across="share",
        ),
        pivot(
            [*where(subsets, share=1.0), *router_on_5(subsets)],
            title="Each domain",
            note="Held-out loss with a share of the experts, chosen by router on 5 documents of the domain.",
            down=("model", "share"),
        ),
        pivot(
            where(rows, measure="loss", stage="tuned"),
            title="After fine-tuning on one domain",
            note="Held-out loss of that domain; experts chosen by router on 5 documents, share 1.0 is the full model.",
            down=("model", "share"),
        ),
        _memory_matched(rows, trained, subsets),
        pivot(
            where(rows, measure="domain_similarity"),
            title="Do domains use different experts?",
            note="Cosine of the domains' mean router probabilities, mean over pairs of domains. Columns: MoE layer.",
            across="layer",
        ),
        by_model(
            rows,
            title="Clusters of tokens by their routing",
            note="Purity and normalised mutual information against the domains; share of a document's tokens in its "
            "main cluster, as it is and by chance.",
            columns=_CLUSTERS,
            first="cluster_purity",
        ),
        by_model(
            where(rows, stage="trained"),
            title="Training",
            note="After the first tenth of the steps: steps with a gradient norm over 5 times the median, and the "
            "largest norm over the median. Entropy of the experts' load over log E in the last step; seconds of all "
            "steps.",
            columns=_TRAINING,
            first="spikes",
        ),
        _checks(rows),
        pivot(
            parts,
            title="Each method, number of documents and domain",
            note="The same by domain.",
            down=("model", "share", "method", "documents"),
        ),
    ]
    return [table for table in made if table.rows]


def nearest_to_5(numbers: Iterable[int]) -> int:
    """The number of calibration documents that comparisons use: that nearest to the paper's 5, or 5 without any."""
    return min(numbers, key=lambda number: abs(number - 5), default=5)


def router_on_5(subsets: Sequence[Row]) -> list[Row]:
    """The selection that most tables use: by `router`, on the number of documents nearest to 5."""
    return where(subsets, method="router", documents=nearest_to_5(label_values(subsets, "documents")))


def _increase(subsets: Sequence[Row]) -> Table:
    chosen = router_on_5(subsets)
    shares = label_values(chosen, "share")
    body = []
    for model in label_values(subsets, "model"):
        full = where(subsets, model=model, share=1.0)
        parts = (where(chosen, model=model, share=share) for share in shares)
        body.append((model, show(interval_of(full)), *(show(difference(part, full)) for part in parts)))
    return Table(
        title="What fewer experts cost",
        note="Loss with all experts, and the increase with a share of them, chosen by router on 5 documents of the "
        "domain; mean over the domains, paired by seed.",
        header=("model", "all", *(f"{share:.1%} more" for share in shares)),
        rows=tuple(body),
    )


def _memory_matched(rows: Sequence[Row], trained: Sequence[Row], subsets: Sequence[Row]) -> Table:
    """Figure 1 of the paper: 25% of the experts, before and after fine-tuning, beside small models from scratch."""
    chosen = where(router_on_5(subsets), share=0.25)
    body = [
        ("standard MoE with as many experts, from scratch", show(interval_of(where(trained, model="few_experts")))),
        ("dense model of the active size, from scratch", show(interval_of(where(trained, model="dense")))),
    ]
    for model in label_values(chosen, "model"):
        tuned = where(rows, measure="loss", stage="tuned", model=model, share=0.25)
        body.append((f"25% of {model}", show(interval_of(where(chosen, model=model)))))
        if tuned:
            body.append((f"25% of {model}, fine-tuned", show(interval_of(tuned))))
    return Table(
        title="At equal memory",
        note="Held-out loss, mean over the domains. The parts see the same tokens as the models from scratch, and the "
        "fine-tuned ones a few more of their domain.",
        header=("model", "loss"),
        rows=tuple(body) if chosen else (),
    )


def _checks(rows: Sequence[Row]) -> Table:
    body = []
    if checked := where(rows, measure="pool_checked"):
        tokens, wrong = (sum(r["value"] for r in some) for some in (checked, where(rows, measure="pool_violations")))
        body.append(("routings of tokens outside their document's pool", f"{wrong:,} of {tokens:,}"))
    if extracted := where(rows, measure="restrict_minus_extracted"):
        largest = max(row["value"] for row in extracted)
        body.append(("largest difference of logits, masked and extracted", f"{largest:g}"))
    return Table(title="Checks", note="Over all seeds.", header=("check", "result"), rows=tuple(body))


_NEAR = 0.05
"""Nats per token that still count as a match."""
_SAME = 0.02
"""The same for two ways of choosing."""


def _end(n: Numbers, model: str) -> float:
    return n("loss", stage="trained", model=model)


def _beats_dense(n: Numbers) -> float:
    return _end(n, "dense") - _end(n, "standard")


_MOE = Premise(
    name="MoE beats dense",
    figure="loss of the dense model of the active size minus that of the standard MoE",
    effect=_beats_dense,
)


def _chosen(n: Numbers, model: str, share: float, method: str, documents: int | None) -> float:
    return n("subset_loss", model=model, share=share, method=method, documents=documents)


def _part(n: Numbers, model: str, share: float, method: str = "router") -> float:
    """Loss with a share of the experts, chosen on about 5 documents."""
    return _chosen(n, model, share, method, nearest_to_5(label_values(n.rows, "documents")))


def _rise(n: Numbers, model: str, share: float) -> float:
    """What a model loses with a share of its experts."""
    return _part(n, model, share) - n("subset_loss", model=model, share=1.0)


def _rise_tuned(n: Numbers, model: str, share: float) -> float:
    part, full = (n("loss", stage="tuned", model=model, share=one) for one in (share, 1.0))
    return part - full


def _method_matters(n: Numbers, model: str, share: float) -> float:
    return abs(_part(n, model, share) - _part(n, model, share, "easy_ep"))


def _few_documents(n: Numbers, number: int) -> float:
    most = max(label_values(n.rows, "documents"), default=None)
    return _SAME - (_chosen(n, "emo", 0.25, "router", number) - _chosen(n, "emo", 0.25, "router", most))


def _similarity(n: Numbers, model: str, which: Callable[..., int | None]) -> float:
    """Of the domains in the first or last layer."""
    layer = which(label_values(where(n.rows, measure="domain_similarity"), "layer"), default=None)
    return n("domain_similarity", model=model, layer=layer)


def _concentration(n: Numbers, model: str) -> float:
    """Above chance, because a large cluster holds many tokens of every document."""
    return n("cluster_concentration", model=model) - n("cluster_concentration_by_chance", model=model)


def _largest_gradient(n: Numbers, model: str) -> float:
    return n("largest_gradient", stage="trained", model=model)


CLAIMS = (
    Claim(
        says="both are better than a dense model of the active size: standard (section 5.1)",
        figure="loss of dense minus standard",
        effect=_beats_dense,
    ),
    Claim(
        says="both are better than a dense model of the active size: EMO (section 5.1)",
        figure="loss of dense minus EMO",
        effect=lambda n: _end(n, "dense") - _end(n, "emo"),
    ),
    *needing(
        _MOE,
        Claim(
            says="as a full model EMO matches the standard MoE (section 5.1, table 1)",
            figure=f"{_NEAR} minus EMO's excess over the standard MoE",
            effect=lambda n: _NEAR - (_end(n, "emo") - _end(n, "standard")),
            otherwise="not seen",
        ),
        Claim(
            says="with 25% of the experts the standard MoE breaks and EMO does not (section 5.2, figure 3)",
            figure="rise of the standard MoE's loss minus EMO's rise, 25%",
            effect=lambda n: _rise(n, "standard", 0.25) - _rise(n, "emo", 0.25),
        ),
        Claim(
            says="the same with 12.5% (section 5.2, figure 3)",
            figure="rise of the standard MoE's loss minus EMO's rise, 12.5%",
            effect=lambda n: _rise(n, "standard", 0.125) - _rise(n, "emo", 0.125),
        ),
        Claim(
            says="EMO's drop is a tenth of the standard MoE's at 25% (1 against 10 points) (section 5.2)",
            figure="a tenth of the standard MoE's rise minus EMO's rise",
            effect=lambda n: 0.1 * _rise(n, "standard", 0.25) - _rise(n, "emo", 0.25),
            otherwise="not seen",
        ),
        Claim(
            says="the same after fine-tuning (section 5.2, figure 3)",
            figure="rise of the standard MoE's loss minus EMO's rise, 25%, both fine-tuned",
            effect=lambda n: _rise_tuned(n, "standard", 0.25) - _rise_tuned(n, "emo", 0.25),
        ),
        Claim(
            says="25% of EMO matches or beats a standard MoE of that size from scratch (figure 1, figure 11)",
            figure=f"{_NEAR} minus the excess of 25% of EMO over the MoE from scratch",
            effect=lambda n: _NEAR - (_part(n, "emo", 0.25) - _end(n, "few_experts")),
            otherwise="not seen",
        ),
        Claim(
            says="a part of the standard MoE falls below the dense model (section 5.2)",
            figure="loss of 25% of the standard MoE minus that of dense",
            effect=lambda n: _part(n, "standard", 0.25) - _end(n, "dense"),
        ),
        Claim(
            says="12.5% of EMO still beats the dense model (section 5.2)",
            figure="loss of dense minus that of 12.5% of EMO",
            effect=lambda n: _end(n, "dense") - _part(n, "emo", 0.125),
        ),
        Claim(
            says="the way of choosing experts matters less for EMO (section 5.2, figure 4)",
            figure="difference of router and Easy-EP at 12.5%: standard minus EMO",
            effect=lambda n: _method_matters(n, "standard", 0.125) - _method_matters(n, "emo", 0.125),
        ),
        Claim(
            says="Easy-EP is better than router for larger parts of a standard MoE (section 5.2, figure 4)",
            figure="loss by router minus loss by Easy-EP, 50% of the standard MoE",
            effect=lambda n: _part(n, "standard", 0.5) - _part(n, "standard", 0.5, "easy_ep"),
        ),
        Claim(
            says="random experts are far worse (section 5.2, figure 4)",
            figure="loss by random minus loss by router, 25% of EMO",
            effect=lambda n: _chosen(n, "emo", 0.25, "random", None) - _part(n, "emo", 0.25),
        ),
        Claim(
            says="five examples are enough to choose (appendix B.2, figure 12)",
            figure=f"{_SAME} minus what 5 documents lose against the most, 25% of EMO",
            effect=lambda n: _few_documents(n, 5),
            otherwise="not seen",
        ),
        Claim(
            says="even one example is (appendix B.2, figure 12)",
            figure=f"{_SAME} minus what 1 document loses against the most, 25% of EMO",
            effect=lambda n: _few_documents(n, 1),
            otherwise="not seen",
        ),
        Claim(
            says="domains use more different experts in EMO (section 5.3, figure 6)",
            figure="cosine of domains in the last layer: standard minus EMO",
            effect=lambda n: _similarity(n, "standard", max) - _similarity(n, "emo", max),
        ),
        Claim(
            says="domains separate in later layers (section 5.3, figure 6)",
            figure="cosine of domains in EMO: first layer minus last",
            effect=lambda n: _similarity(n, "emo", min) - _similarity(n, "emo", max),
        ),
        Claim(
            says="tokens cluster by topic in EMO, by form in a standard MoE (section 5.3, figure 5)",
            figure="mutual information of clusters and domains: EMO minus standard",
            effect=lambda n: n("cluster_nmi", model="emo") - n("cluster_nmi", model="standard"),
        ),
        Claim(
            says="a document's tokens are in one cluster in EMO, in many in a standard MoE (section 5.3, figure 5)",
            figure="share of a document's tokens in its main cluster, above chance: EMO minus standard",
            effect=lambda n: _concentration(n, "emo") - _concentration(n, "standard"),
        ),
        Claim(
            says="local balancing makes training unstable (appendix A.1, figure 7)",
            figure="largest gradient norm over the median, after the first tenth of the steps: local minus global",
            effect=lambda n: _largest_gradient(n, "local_balancing") - _largest_gradient(n, "emo"),
        ),
        Claim(
            says="a pool of one size is worse at other sizes (appendix A.2, table 2)",
            figure="loss of 12.5%: trained with pools of 25% minus with drawn sizes",
            effect=lambda n: _part(n, "fixed_pool", 0.125) - _part(n, "emo", 0.125),
        ),
        Claim(
            says="a shared expert helps (appendix A.3, table 2)",
            figure="loss of the full model without minus with a shared expert",
            effect=lambda n: _end(n, "no_shared_expert") - _end(n, "emo"),
        ),
        Claim(
            says="annealing a standard MoE with pools makes it modular in part (appendix B.4, table 3)",
            figure="rise of the standard MoE's loss minus that of the annealed one, 25%",
            effect=lambda n: _rise(n, "standard", 0.25) - _rise(n, "annealing", 0.25),
        ),
        Claim(
            says="pools from the start are better than annealing (appendix B.4, table 3)",
            figure="rise of the annealed model's loss minus EMO's, 25%",
            effect=lambda n: _rise(n, "annealing", 0.25) - _rise(n, "emo", 0.25),
        ),
    ),
)
