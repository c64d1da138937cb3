"""The model card of a converted checkpoint. No torch."""

from moesaic.upcycling.layout import UpcyclePlan
from moesaic.upcycling.statement import Statement


def model_card(plan: UpcyclePlan, promise: Statement, parameters: tuple[int, int]) -> str:
    """README.md with the hub's metadata: what it was made of, how, how large it is and what it preserves.

    Args:
        plan: the conversion.
        promise: what holds for the MoE layers.
        parameters: total and active ones.
    """
    layer, recipe = plan.layer, plan.recipe
    hub_ids = [model.checkpoint.name for model in (plan.base, *plan.specialists) if model.checkpoint.revision]
    metadata = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if hub_ids:
        metadata += ["base_model:", *(f"- {name.split('@')[0]}" for name in dict.fromkeys(hub_ids))]
    metadata += ["tags:", "- moe", "- mixture-of-experts", "- moesaic", f"- {recipe.method}", "---"]
    total, active = parameters
    layers = f"{len(plan.moe_layers)} of {plan.base.num_layers} layers are MoE"
    routing = f"routing `{layer.routing}`, softmax over {layer.weighting} experts, router `{layer.router_init}`"
    shared = f" and {layer.shared_experts} shared" if layer.shared_experts else ""
    lines = [
        *metadata,
        "",
        f"# Mixture of experts from {plan.base.checkpoint.name}",
        "",
        f"Made by Moesaic with `{recipe.method}`: {layer.method.description} ({layer.method.paper}).",
        "",
        f"- {layer.experts} routed experts{shared} per MoE layer, {layer.top_k} active per token; {layers}",
        f"- {routing}",
        f"- {total:,} parameters, {active:,} active per token",
        f"- at initialisation: {promise.text}",
        "",
        "Sources:",
        "",
        f"- base: `{plan.base.checkpoint.name}`",
        *(
            f"- {specialist.name}: `{model.checkpoint.name}`"
            for specialist, model in zip(recipe.specialists, plan.specialists, strict=True)
        ),
        "",
        "The same again:",
        "",
        "```",
        "moesaic upcycle --config recipe.yaml OUT",
        "```",
        "",
        "Use it with transformers; the architecture's code is in this folder:",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM",
        "",
        'model = AutoModelForCausalLM.from_pretrained("OUT", trust_remote_code=True)',
        "```",
        "",
    ]
    return "\n".join(lines)
