"""The tables of the experiment `emo`."""

from collections.abc import Iterable, Sequence

from moesaic_lab.rows import Row
from moesaic_lab.tables import Table, difference, interval_of, label_values, pivot, show, where

_FULL = 1.0


def tables(rows: Sequence[Row]) -> list[Table]:
    """Every table that there are numbers for."""
    subsets = where(rows, measure="subset_loss")
    made = [
        _trained(rows),
        _increase(subsets),
        _choices(subsets),
        _per_domain(subsets),
        _tuned(rows),
        _memory_matched(rows),
        _similarity(rows),
        _clusters(rows),
        _training(rows),
        _checks(rows),
        _choices_by_domain(subsets),
    ]
    return [table for table in made if table.rows]


def _trained(rows: Sequence[Row]) -> Table:
    return pivot(
        where(rows, measure="loss", stage="trained"),
        title="From scratch on the same tokens",
        note="Held-out loss in nats per token after training, with all experts. `annealing`, where it was run, is not "
        "from scratch: it goes on from `standard`, with pools, on more tokens.",
        down=("model",),
        across="domain",
        mean="mean",
    )


def _choices(subsets: Sequence[Row]) -> Table:
    return pivot(
        [row for row in subsets if row["share"] != _FULL],
        title="Each method and number of calibration documents",
        note="Held-out loss with the experts chosen for a domain, mean over the domains. Columns: share kept.",
        down=("model", "method", "documents"),
        across="share",
    )


def _choices_by_domain(subsets: Sequence[Row]) -> Table:
    return pivot(
        [row for row in subsets if row["share"] != _FULL],
        title="Each method, number of documents and domain",
        note="The same by domain.",
        down=("model", "share", "method", "documents"),
        across="domain",
    )


def _tuned(rows: Sequence[Row]) -> Table:
    return pivot(
        where(rows, measure="loss", stage="tuned"),
        title="After fine-tuning on one domain",
        note="Held-out loss of that domain; experts chosen by router on 5 documents, share 1.0 is the full model.",
        down=("model", "share"),
        across="domain",
        mean="mean",
    )


def _similarity(rows: Sequence[Row]) -> Table:
    return pivot(
        where(rows, measure="domain_similarity"),
        title="Do domains use different experts?",
        note="Cosine of the domains' mean router probabilities, mean over pairs of domains. Columns: MoE layer.",
        down=("model",),
        across="layer",
    )


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
        full = where(subsets, model=model, share=_FULL)
        parts = (where(chosen, model=model, share=share) for share in shares)
        body.append((model, show(interval_of(full)), *(show(difference(part, full)) for part in parts)))
    return Table(
        title="What fewer experts cost",
        note="Loss with all experts, and the increase with a share of them, chosen by router on 5 documents of the "
        "domain; mean over the domains, paired by seed.",
        header=("model", "all", *(f"{share:.1%} more" for share in shares)),
        rows=tuple(body),
    )


def _per_domain(subsets: Sequence[Row]) -> Table:
    return pivot(
        [*where(subsets, share=_FULL), *router_on_5(subsets)],
        title="Each domain",
        note="Held-out loss with a share of the experts, chosen by router on 5 documents of the domain.",
        down=("model", "share"),
        across="domain",
        mean="mean",
    )


def _memory_matched(rows: Sequence[Row]) -> Table:
    """Figure 1 of the paper: 25% of the experts, before and after fine-tuning, beside small models from scratch."""
    subsets, trained = where(rows, measure="subset_loss"), where(rows, measure="loss", stage="trained")
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


def _clusters(rows: Sequence[Row]) -> Table:
    measures = ("cluster_purity", "cluster_nmi", "cluster_concentration", "cluster_concentration_by_chance")
    body = []
    for model in label_values(where(rows, measure=measures[0]), "model"):
        body.append((model, *(show(interval_of(where(rows, measure=one, model=model))) for one in measures)))
    return Table(
        title="Clusters of tokens by their routing",
        note="Purity and normalised mutual information against the domains; share of a document's tokens in its "
        "main cluster, as it is and by chance.",
        header=("model", "purity", "mutual information", "in main cluster", "by chance"),
        rows=tuple(body),
    )


def _training(rows: Sequence[Row]) -> Table:
    trained = where(rows, stage="trained")
    body = []
    for model in label_values(trained, "model"):
        mine = where(trained, model=model)
        cells = (
            show(interval_of(where(mine, measure=measure)), digits)
            for measure, digits in (("spikes", 1), ("largest_gradient", 1), ("load_entropy", 3), ("seconds", 0))
        )
        body.append((model, *cells))
    return Table(
        title="Training",
        note="After the first tenth of the steps: steps with a gradient norm over 5 times the median, and the largest "
        "norm over the median. Entropy of the experts' load over log E in the last step; seconds of all steps.",
        header=("model", "spikes", "largest / median", "load entropy", "seconds"),
        rows=tuple(body),
    )


def _checks(rows: Sequence[Row]) -> Table:
    checked, outside = where(rows, measure="pool_checked"), where(rows, measure="pool_violations")
    body = []
    if checked:
        tokens, wrong = sum(row["value"] for row in checked), sum(row["value"] for row in outside)
        body.append(("routings of tokens outside their document's pool", f"{wrong:,} of {tokens:,}"))
    if extracted := where(rows, measure="restrict_minus_extracted"):
        largest = max(row["value"] for row in extracted)
        body.append(("largest difference of logits, masked and extracted", f"{largest:g}"))
    return Table(title="Checks", note="Over all seeds.", header=("check", "result"), rows=tuple(body))
