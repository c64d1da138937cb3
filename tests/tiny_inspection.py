"""A made-up inspection for tests of what reads one: small, complete, every field filled, the same for the same seed."""

from pathlib import Path

import numpy as np

from moesaic.analysis.format import write_inspection
from moesaic.analysis.inspection import (
    CentralToken,
    Cluster,
    Clustering,
    CoExpert,
    DataFacts,
    Document,
    DomainFacts,
    ExpertCard,
    FirstToken,
    Inspection,
    ModelFacts,
    RankedDocument,
    Reader,
    Share,
    Statistics,
    Verdict,
)

NASTY = "</script><b>&\u202eabc\x00\x1b[31m\ufffd"
"""A token string that is markup, control characters and right-to-left at once."""
STRINGS = ("", " the", "def", "\n", " sum", "é", " of", NASTY, "x", " =")


def tiny_inspection(
    *,
    name: str = "./tiny",
    layers: int = 3,
    experts: int = 8,
    top_k: int = 2,
    domains: tuple[str, ...] = ("code", "math", "prose"),
    clusters: int = 4,
    documents: int = 12,
    document_tokens: int = 20,
    seed: int = 0,
) -> Inspection:
    """An inspection of random numbers that fit together in shape; layer 1 is skewed and the last one collapsed."""
    draw = np.random.default_rng(seed)
    tokens = documents * document_tokens
    levels = [0, *[1] * (layers - 2), 2]
    cluster_T = draw.integers(0, clusters, tokens)
    per_domain = documents // len(domains)
    facts = tuple(DomainFacts(name=one, documents=per_domain, tokens=per_domain * document_tokens) for one in domains)
    return Inspection(
        model=ModelFacts(
            name=name,
            revision=None,
            model_type="moesaic_llama",
            sample_hash=f"{seed:032x}",
            num_layers=layers + 1,
            layers=tuple(range(1, layers + 1)),
            num_experts=experts,
            top_k=top_k,
            num_shared_experts=1,
            scoring="softmax",
            groups=((0,) * (experts // 2) + (1,) * (experts - experts // 2),) * layers,
            groups_are="expert groups of one_per_group",
        ),
        data=DataFacts(
            sources=("data.jsonl",),
            domain_field="domain",
            domains=facts,
            documents=documents,
            tokens=tokens,
            document_tokens=document_tokens,
            min_length=4,
            max_length=2048,
            records=documents + 3,
            too_short=2,
            too_long=1,
            seed=seed,
        ),
        verdict=Verdict(level="collapsed", sentence="Layer 3 is collapsed."),
        verdicts=tuple(
            Verdict(level=("healthy", "skewed", "collapsed")[level], sentence=f"Layer {index + 1} is so.")
            for index, level in enumerate(levels)
        ),
        rule="Collapsed below this, skewed below that.",
        clustering=_clustering(clusters, len(domains), documents),
        why_no_clusters="",
        first_token=FirstToken(
            cluster=0,
            first_in_cluster=0.9,
            second_in_cluster=0.1,
            cluster_is_first=0.5,
            cosine_to_rest=(0.5,) * layers,
            sentence="90% of the first tokens are in cluster 0.",
        ),
        versions={"moesaic": "0.1.0"},
        documents=tuple(
            Document(
                domain=index // per_domain,
                tokens=document_tokens,
                source=f"data.jsonl:{index + 1}",
                opening=f"Opening of document {index} {NASTY}",
                cluster=index % clusters,
                concentration=0.5,
            )
            for index in range(documents)
        ),
        experts=tuple(_card(layer, expert, experts) for layer in range(1, layers + 1) for expert in range(experts)),
        statistics=_statistics(draw, layers, experts, len(domains), clusters, np.array(levels), cluster_T),
        reader=_reader(draw, layers, experts, top_k, document_tokens, cluster_T, documents // 2),
    )


def write_tiny_inspection(folder: Path, *, against: bool = False, **options: object) -> Path:
    """Write one to a new folder, with a second model's if asked."""
    import dataclasses

    folder.mkdir(parents=True)
    made = tiny_inspection(**options)  # pyright: ignore[reportArgumentType]
    other = tiny_inspection(**(options | {"seed": 1, "name": "./other"})) if against else None  # pyright: ignore[reportArgumentType]
    write_inspection(dataclasses.replace(made, against=other), folder)
    return folder


def _clustering(clusters: int, domains: int, documents: int) -> Clustering:
    return Clustering(
        clusters=tuple(
            Cluster(
                tokens=60 - index,
                domains=tuple(10 + domain for domain in range(domains)),
                purity=0.5,
                documents=tuple(RankedDocument(document=rank, share=0.9 - rank / 100) for rank in range(documents)),
                nearest=(CentralToken(document=1, position=3, before="a b", text=NASTY, after=" c", similarity=0.99),),
                frequent=(Share(name=NASTY, count=7, share=0.7), Share(name=" the", count=5, share=0.2)),
            )
            for index in range(clusters)
        ),
        features=24,
        components=5,
        variance_kept=0.96,
        iterations=7,
        cosine=0.8,
        purity=0.5,
        nmi=0.3,
        silhouette=0.2,
        silhouette_tokens=240,
        concentration=0.6,
        concentration_by_chance=0.3,
    )


def _card(layer: int, expert: int, experts: int) -> ExpertCard:
    return ExpertCard(
        layer=layer,
        expert=expert,
        documents=(RankedDocument(document=2, share=0.4),),
        tokens=(Share(name=NASTY, count=4, share=0.5),),
        experts=(CoExpert(expert=(expert + 1) % experts, share=0.3, lift=1.5),),
    )


def _statistics(
    draw: np.random.Generator,
    layers: int,
    experts: int,
    domains: int,
    clusters: int,
    level_L: np.ndarray,
    cluster_T: np.ndarray,
) -> Statistics:
    counts_NLE = draw.integers(1, 100, (domains, layers, experts))
    counts_SLE = np.concatenate([counts_NLE.sum(0, keepdims=True), counts_NLE])
    load_SLE = counts_SLE / counts_SLE.sum(-1, keepdims=True)
    ordered_SLE = np.sort(load_SLE)[..., ::-1]
    entropy_SL = -(load_SLE * np.log(load_SLE)).sum(-1)
    probability_NLE = draw.dirichlet([0.3] * experts, (domains, layers))
    unit_NLE = probability_NLE / np.linalg.norm(probability_NLE, axis=-1, keepdims=True)
    flat_NF = probability_NLE.reshape(domains, -1)
    flat_NF = flat_NF / np.linalg.norm(flat_NF, axis=-1, keepdims=True)
    pairs_LEE = draw.integers(0, 30, (layers, experts, experts))
    pairs_LEE = pairs_LEE + pairs_LEE.transpose(0, 2, 1)
    pairs_LEE[:, range(experts), range(experts)] = counts_SLE[0]
    centre_CC = np.full((clusters, clusters), 0.2) + 0.8 * np.eye(clusters)
    start_B = np.array([0, 1, 2, 4, 8])
    shape = (len(start_B), layers)
    to_previous_BL = draw.random(shape)
    to_previous_BL[0] = np.nan
    return Statistics(
        counts_SLE=counts_SLE,
        load_SLE=load_SLE,
        mass_SLE=load_SLE,
        entropy_SL=entropy_SL / np.log(experts),
        largest_SL=ordered_SLE[..., 0],
        two_busiest_SL=ordered_SLE[..., :2].sum(-1),
        dead_SL=(counts_SLE == 0).sum(-1),
        effective_SL=np.exp(entropy_SL),
        coselection_SL=draw.random(entropy_SL.shape),
        confidence_SL=draw.random(entropy_SL.shape),
        uncertainty_SL=draw.random(entropy_SL.shape),
        level_SL=np.broadcast_to(level_L, entropy_SL.shape).copy(),
        pairs_LEE=pairs_LEE,
        probability_NLE=probability_NLE,
        similarity_LNN=np.einsum("nle,mle->lnm", unit_NLE, unit_NLE),
        similarity_NN=flat_NF @ flat_NF.T,
        bucket_start_B=start_B,
        bucket_tokens_B=np.array([12, 12, 24, 48, 144]),
        position_confidence_BL=draw.random(shape),
        position_entropy_BL=draw.random(shape),
        position_to_document_BL=draw.random(shape),
        position_to_previous_BL=to_previous_BL,
        cluster_mass_CLE=draw.dirichlet([0.3] * experts, (clusters, layers)),
        cluster_cosine_CC=centre_CC,
        token_cluster_T=cluster_T.astype(np.int16),
    )


def _reader(
    draw: np.random.Generator,
    layers: int,
    experts: int,
    top_k: int,
    document_tokens: int,
    cluster_T: np.ndarray,
    documents: int,
) -> Reader:
    number = documents * document_tokens
    string_R = draw.integers(1, len(STRINGS), number).astype(np.uint32)
    string_R[7::11] = 0
    ids = [draw.permutation(experts)[:top_k] for _ in range(number * layers)]
    weights_RLK = np.sort(draw.dirichlet([1.0] * top_k, (number, layers)))[..., ::-1]
    return Reader(
        documents=tuple(range(documents)),
        sampled=documents - 2,
        strings=STRINGS,
        first_token_D1=np.arange(documents + 1) * document_tokens,
        string_R=string_R,
        cluster_R=cluster_T[:number].astype(np.int16),
        ids_RLK=np.array(ids, dtype=np.uint8).reshape(number, layers, top_k),
        weights_RLK=weights_RLK.astype(np.float16),
    )
