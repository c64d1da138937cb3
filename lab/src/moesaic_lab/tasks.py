"""What a step does beside the verbs: losses, premises, accuracy, parts of the experts, pools, clusters of tokens.

Each task gives rows without seed and labels, which `moesaic lab task` adds.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import moesaic
from moesaic.analysis.format import read_inspection
from moesaic.common.recipe import load_recipe
from moesaic.data.cache import open_cache
from moesaic.data.dataset import PackedDataset, ValidationSet, validation_sets
from moesaic.data.recipe import DataRecipe, SourceRecipe
from moesaic.data.tokenise import prepare
from moesaic.modeling.cross_entropy import IGNORED, token_losses
from moesaic.routing.install import routing_context
from moesaic.routing.pools import RoutingContext
from moesaic.routing.rules import RoutingDecision
from moesaic.routing.subset import Selection, save_selection
from moesaic.selection.recipe import Method
from moesaic.selection.statistics import load_statistics
from moesaic.training.recipe import TrainRecipe
from moesaic_lab.plan import selection_file, train_file, valid_file
from moesaic_lab.results import Row, read_lines

_DISCOUNT = 0.75
"""Taken off the count of every pair that was seen: absolute discounting, usually with 0.75 (Chen and Goodman 1999)."""


def held_out_sets(
    domains: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, sequence_length: int
) -> dict[str, ValidationSet]:
    """The held-out documents of each domain, packed as `train` packs them."""
    held_out = tuple(SourceRecipe(path=valid_file(domain), domain=domain) for domain in domains)
    recipe = DataRecipe(sequence_length=sequence_length, sources=held_out, validation=held_out)
    return {one.domain: one for one in validation_sets(prepare(recipe, tokenizer, quiet=True))}


def held_out_loss(model: PreTrainedModel, held_out: ValidationSet) -> Row:
    """Loss of one held-out set in nats per predicted token, with its standard error over documents."""
    loss = moesaic.held_out_loss(model, held_out)
    return {"domain": held_out.domain, "value": loss.loss, "standard_error": loss.standard_error}


def measure(*, checkpoints: Mapping[str, str], domains: Sequence[str], sequence_length: int) -> Iterator[Row]:
    """A row per checkpoint and domain, and one with the number of parameters.

    Args:
        checkpoints: name in the results -> folder; all with the same tokenizer.
        domains: whose held-out documents are measured.
        sequence_length: that these are packed to.
    """
    tokenizer = moesaic.load_tokenizer(next(iter(checkpoints.values())))
    held_out = held_out_sets(domains, tokenizer, sequence_length=sequence_length)
    for order, (name, folder) in enumerate(checkpoints.items()):
        common = {"model": name, "order": order}
        model = moesaic.load(folder, device="cpu")
        yield from ({**common, "measure": "measured_loss", **held_out_loss(model, one)} for one in held_out.values())
        yield {**common, "measure": "parameters", "value": sum(one.numel() for one in model.parameters())}


def premise(*, checkpoint: str, domains: Sequence[str], sequence_length: int) -> Iterator[Row]:
    """Per domain the loss of a unigram model, a bigram model, the checkpoint, and the checkpoint without its FFNs."""
    tokenizer = moesaic.load_tokenizer(checkpoint)
    held_out = held_out_sets(domains, tokenizer, sequence_length=sequence_length)
    unigram_V, bigram_VV = frequencies(pairs(domains, tokenizer))
    model = moesaic.load(checkpoint, device="cpu")
    for domain, one in held_out.items():
        before_N, after_N = _targets(one)
        unigram, bigram = -np.log(unigram_V[after_N]), -np.log(bigram_VV[before_N, after_N])
        yield {"domain": domain, "measure": "unigram_loss", "value": float(unigram.mean())}
        yield {"domain": domain, "measure": "bigram_loss", "value": float(bigram.mean())}
        yield {"measure": "premise_loss", **held_out_loss(model, one)}
        with without_ffns(model):
            yield {"measure": "without_ffns_loss", **held_out_loss(model, one)}


def pairs(domains: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> NDArray[np.int64]:
    """How often each token follows each other one in the training documents of all domains: (V, V)."""
    size = len(tokenizer)
    counts_VV = np.zeros(size * size, dtype=np.int64)
    sources = tuple(SourceRecipe(path=train_file(domain), domain=domain) for domain in domains)
    for folder in prepare(DataRecipe(sequence_length=2, sources=sources), tokenizer, quiet=True).sources:
        cache = open_cache(folder)
        ids_N = np.asarray(cache.tokens, dtype=np.int64)
        pair_N = ids_N[:-1] * size + ids_N[1:]
        pair_N = np.delete(pair_N, cache.offsets[1:-1] - 1)  # the last token of a document says nothing of the next
        counts_VV += np.bincount(pair_N, minlength=size * size)
    return counts_VV.reshape(size, size)


def frequencies(counts_VV: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A unigram model (one added to every count), and a bigram model that backs off to it.

    p(w | v) = (max(c(vw) - d, 0) + d * n(v) * p(w)) / c(v), with d = 0.75 and n(v) different followers of v; p(w) for a
    v that was never seen.
    """
    unigram_V = counts_VV.sum(axis=0) + 1.0
    unigram_V /= unigram_V.sum()
    total_V1 = counts_VV.sum(axis=1, keepdims=True)
    kinds_V1 = (counts_VV > 0).sum(axis=1, keepdims=True)
    seen_VV = np.maximum(counts_VV - _DISCOUNT, 0) + _DISCOUNT * kinds_V1 * unigram_V
    return unigram_V, np.where(total_V1 > 0, seen_VV / np.maximum(total_V1, 1), unigram_V)


def _targets(held_out: ValidationSet) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every token that is predicted, and the one before it."""
    before, after = [], []
    for batch in held_out.batches(64):
        predicted_BS = batch.labels_BS[:, 1:] != IGNORED
        before.append(batch.input_ids_BS[:, :-1][predicted_BS])
        after.append(batch.labels_BS[:, 1:][predicted_BS])
    return torch.cat(before).numpy(), torch.cat(after).numpy()


@contextmanager
def without_ffns(model: PreTrainedModel) -> Iterator[None]:
    """Let every FFN, dense or MoE, add nothing to the residual stream."""

    def nothing(_module: Any, inputs: tuple[torch.Tensor, ...], _output: Any) -> torch.Tensor:
        return torch.zeros_like(inputs[0])

    with ExitStack() as stack:
        for layer in model.model.layers:
            stack.callback(layer.mlp.register_forward_hook(nothing).remove)
        yield


def accuracy(*, checkpoints: Mapping[str, str], domains: Sequence[str]) -> Iterator[Row]:
    """Multiple-choice accuracy on the generated domains' held-out questions: a row per model and domain."""
    questions = {domain: read_lines(Path(f"data/{domain}.choice.jsonl")) for domain in domains}
    for name, folder in checkpoints.items():
        model, tokenizer = moesaic.load(folder, device="cpu"), moesaic.load_tokenizer(folder)
        for domain, rows in questions.items():
            right = sum(predicted(model, tokenizer, row) == row["answer"] for row in rows)
            value = right / len(rows)
            yield {"measure": "accuracy", "model": name, "domain": domain, "value": value, "questions": len(rows)}


@torch.no_grad()
def predicted(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> int:
    """Index of the choice with the lowest loss per byte after the question (lm-eval's `acc_norm`)."""
    prompt = tokenizer(f"Question: {row['question']}\nAnswer:")["input_ids"]
    answers = [tokenizer(f" {choice}")["input_ids"] for choice in row["choices"]]
    losses = _losses(model, prompt, answers)
    scores = [loss / len(choice.encode()) for loss, choice in zip(losses, row["choices"], strict=True)]
    return scores.index(min(scores))


def _losses(model: PreTrainedModel, prompt: list[int], answers: Sequence[list[int]]) -> list[float]:
    """Loss of each answer after the prompt, summed over its tokens."""
    length = len(prompt) + max(map(len, answers))
    ids_AS = torch.zeros(len(answers), length, dtype=torch.int64)
    labels_AS = torch.full((len(answers), length), IGNORED)
    for ids_S, labels_S, answer in zip(ids_AS, labels_AS, answers, strict=True):
        end = len(prompt) + len(answer)
        ids_S[:end] = torch.tensor(prompt + answer)
        labels_S[len(prompt) - 1 : end - 1] = torch.tensor(answer)
    # Padding comes after the answers, and attention looks back only.
    positions_AS = torch.arange(length).expand(len(answers), -1)
    logits = model(input_ids=ids_AS, position_ids=positions_AS, use_cache=False).logits
    losses_T, _ = token_losses(logits.flatten(0, 1), labels_AS.flatten())
    return losses_T.view(labels_AS.shape).double().sum(dim=1).tolist()


def subsets(
    *,
    checkpoint: str,
    selections: str,
    domains: Sequence[str],
    sequence_length: int,
    shares: Sequence[float],
    documents: Sequence[int],
    methods: Sequence[Method],
    seed: int,
    check_extracted: bool,
) -> Iterator[Row]:
    """Losses with all and with some of the experts, chosen on a few documents of a domain.

    A row per share, method, number of documents and domain, and how alike the domains route.

    Args:
        checkpoint: the MoE.
        selections: folder for selections and statistics.
        domains: that experts are chosen for.
        sequence_length: of held-out sequences, and tokens of a calibration document.
        shares: of the experts that are kept.
        documents: numbers of calibration documents.
        methods: of choosing.
        seed: of the choice.
        check_extracted: also extract one part and compare its logits with the masked model's, bit for bit.
    """
    folder = Path(selections)
    model = moesaic.load(checkpoint, device="cpu")
    held_out = held_out_sets(domains, moesaic.load_tokenizer(checkpoint), sequence_length=sequence_length)
    for one in held_out.values():
        yield {"measure": "subset_loss", "share": 1.0, **held_out_loss(model, one)}
    selection = None
    for domain, one in held_out.items():
        for number, method, share in _choices(documents, methods, shares):
            statistics = folder / f"{domain}-{number}.stats.json"
            known = statistics.exists()  # one pass over the documents serves all methods and shares
            selection = moesaic.select(
                checkpoint,
                keep=f"{100 * share:g}%",
                method=method,
                data=None if known else train_file(domain),
                stats=(statistics,) if known else (),
                stats_out=None if known else statistics,
                examples=None if known else number,
                max_tokens=sequence_length,
                seed=seed,
            )
            if method == "router":
                save_selection(selection, selection_file(selections, domain, number, share))
            labels = {"method": method, "share": share, "documents": None if method == "random" else number}
            with moesaic.restrict(model, selection):
                yield {**labels, "measure": "subset_loss", **held_out_loss(model, one)}
            if (mass := selection.routing_mass_kept) is not None:
                yield {**labels, "measure": "mass_kept", "domain": domain, "value": float(np.mean(mass))}
    yield from _similarities([folder / f"{domain}-{max(documents)}.stats.json" for domain in domains])
    if check_extracted and selection is not None:
        value = _extracted_difference(checkpoint, folder, model, selection, next(iter(held_out.values())))
        yield {"measure": "restrict_minus_extracted", "value": value}


def _choices(
    documents: Sequence[int], methods: Sequence[Method], shares: Sequence[float]
) -> Iterator[tuple[int, Method, float]]:
    """Every combination; random experts once, because they do not depend on documents."""
    for number in documents:
        for method in methods:
            if method != "random" or number == documents[0]:
                for share in shares:
                    yield number, method, share


def _similarities(files: Sequence[Path]) -> Iterator[Row]:
    """Cosine of the domains' mean router probabilities, per layer: the mean over pairs."""
    means_DLE = np.array([load_statistics(file).probability_LE for file in files])
    unit_DLE = means_DLE / np.linalg.norm(means_DLE, axis=-1, keepdims=True)
    for layer in range(unit_DLE.shape[1]):
        cosine_DD = unit_DLE[:, layer] @ unit_DLE[:, layer].T
        value = float(cosine_DD[np.triu_indices(len(cosine_DD), k=1)].mean())
        yield {"measure": "domain_similarity", "layer": layer, "value": value}


@torch.no_grad()
def _extracted_difference(
    checkpoint: str, folder: Path, model: PreTrainedModel, selection: Selection, held_out: ValidationSet
) -> float:
    """Largest difference of logits between the masked model and the extracted checkpoint; 0 is bit for bit."""
    save_selection(selection, folder / "check.json")
    moesaic.extract(checkpoint, folder / "check.json", folder / "check", overwrite=True)
    extracted = moesaic.load(folder / "check", device="cpu")
    batch = next(held_out.batches(8))
    inputs: Mapping[str, Any] = {"input_ids": batch.input_ids_BS, "position_ids": batch.position_ids_BS}
    with moesaic.restrict(model, selection):
        masked = model(**inputs, use_cache=False).logits
    return float((masked - extracted(**inputs, use_cache=False).logits).abs().max())


@torch.no_grad()
def pools(*, run: str, steps: int) -> Iterator[Row]:
    """Does the pool constraint hold: the batches of the first steps of a finished run with `document_pool` once more.

    Gives the tokens checked; and selections outside the pool, with the experts that documents use beyond their pools.
    """
    recipe = load_recipe(TrainRecipe, Path(run) / "recipe.yaml")
    prepared = prepare(recipe.data, moesaic.load_tokenizer(run), quiet=True)
    data = PackedDataset(prepared, seed=recipe.seed, sequences_per_step=recipe.sequences_per_step)
    model = moesaic.load(run, device="cpu")
    checked = outside = 0
    for step, micro_step in ((step, micro) for step in range(steps) for micro in range(recipe.micro_steps)):
        batch = data.batch(step, micro_step=micro_step, num_micro_steps=recipe.micro_steps)
        context = RoutingContext.from_packed(
            batch.document_ids_BS,
            first_document=batch.first_document,
            num_documents=batch.num_documents,
            seed=recipe.seed,
            step=step,
        )
        with routing_context(model, context, pools=True) as record:
            model(input_ids=batch.input_ids_BS, position_ids=batch.position_ids_BS, use_cache=False)
        for decision in record.decisions:
            checked += int(context.token_mask_T.sum())
            outside += violations(decision, context)
    yield {"measure": "pool_checked", "value": checked}
    yield {"measure": "pool_violations", "value": outside}


def violations(decision: RoutingDecision, context: RoutingContext) -> int:
    """Selections outside the token's pool, and experts that a document uses beyond the number its pool holds."""
    mask_T = context.token_mask_T
    assert decision.allowed_TE is not None, "the rule draws pools"
    outside = int((~decision.allowed_TE.gather(1, decision.expert_ids_TK))[mask_T].sum())
    used_NE = torch.zeros(context.num_documents, decision.allowed_TE.shape[1], dtype=torch.bool)
    used_NE[context.document_ids_T[mask_T, None], decision.expert_ids_TK[mask_T]] = True
    pool_N = torch.zeros(context.num_documents, dtype=torch.int64)
    pool_N[context.document_ids_T[mask_T]] = decision.allowed_TE[mask_T].sum(dim=1)
    return outside + int((used_NE.sum(dim=1) - pool_N).clamp_min(0).sum())


_CLUSTERS = ("purity", "nmi", "silhouette", "concentration", "concentration_by_chance")


def inspected(*, inspection: str) -> Iterator[Row]:
    """How far token clusters follow domains and documents, of what `moesaic inspect` wrote."""
    clustering = read_inspection(inspection).clustering
    for name in _CLUSTERS if clustering is not None else ():
        if (value := getattr(clustering, name)) is not None:
            yield {"measure": f"cluster_{name}", "value": value}
