"""The model card of a trained checkpoint. No torch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moesaic.common.recipe import dump_recipe
from moesaic.families.counting import ParameterCount
from moesaic.training.recipe import TrainRecipe

if TYPE_CHECKING:
    from moesaic.modeling.cross_entropy import DomainLoss


def model_card(
    recipe: TrainRecipe, *, parameters: ParameterCount, steps: int, validation: Mapping[str, "DomainLoss"]
) -> str:
    """README.md with the hub's metadata: what was trained, on what, how, and the held-out losses."""
    source = recipe.model if isinstance(recipe.model, str) else f"{recipe.model.family}, from random weights"
    experts = ""
    if parameters.moe_layers:
        experts = f"; {parameters.top_k} of {parameters.num_experts} experts in {parameters.moe_layers} layers"
    tags = ["- moe", "- mixture-of-experts"] if parameters.moe_layers else []
    lines = [
        *("---", "library_name: transformers", "pipeline_tag: text-generation", "tags:", *tags, "- moesaic", "---", ""),
        f"# Trained from {source}",
        "",
        f"- {parameters.total:,} parameters, {parameters.active:,} active per token{experts}",
        f"- {steps:,} steps of {recipe.batch.tokens:,} tokens, sequences of {recipe.data.sequence_length:,}",
        f"- routing during training: {recipe.routing.rule or 'as at inference'}",
        "",
    ]
    if validation:
        lines += ["| held-out | loss (nats per token) | standard error | documents |", "|---|---|---|---|"]
        lines += [
            f"| {domain} | {measured.loss:.4f} | {_error(measured)} | {measured.documents:,} |"
            for domain, measured in validation.items()
        ]
        lines.append("")
    lines += ["Recipe:", "", "```yaml", dump_recipe(recipe).rstrip(), "```", ""]
    return "\n".join(lines)


def _error(measured: "DomainLoss") -> str:
    return "" if measured.standard_error is None else f"{measured.standard_error:.4f}"
