"""The model card of a converted checkpoint. No torch."""

from moesaic.checkpoint import card
from moesaic.upcycling.layout import UpcyclePlan
from moesaic.upcycling.recipe import UpcycleRecipe
from moesaic.upcycling.statement import Statement


def model_card(plan: UpcyclePlan, promise: Statement, parameters: tuple[int, int]) -> str:
    """README.md: what it was made of, with which command, how large it is and what it preserves.

    Args:
        plan: the conversion.
        promise: what holds for the MoE layers.
        parameters: total and active ones.
    """
    layer, recipe = plan.layer, plan.recipe
    named = zip(recipe.specialists, plan.specialists, strict=True)
    facts: dict[str, object] = {
        "Method": f"{recipe.method}: {layer.method.description} ({layer.method.paper})",
        "Base": plan.base.checkpoint.name,
        **{f"Specialist {specialist.name}": model.checkpoint.name for specialist, model in named},
        "Routed experts per MoE layer": f"{layer.experts}, {layer.top_k} active per token",
        "Shared experts": layer.shared_experts,
        "MoE layers": f"{len(plan.moe_layers)} of {plan.base.num_layers}",
        "Routing": f"{layer.routing}, softmax over {layer.weighting} experts, router {layer.router_init}",
        "Parameters": f"{parameters[0]:,}, {parameters[1]:,} active per token",
        "At initialisation": f"{promise.code}: {promise.text}",
    }
    text = card.model_card(
        title=f"Mixture of experts from {plan.base.checkpoint.name}",
        bases=[model.checkpoint.name for model in plan.models],
        tags=["moe", recipe.method],
        command=command(recipe),
        facts=facts,
    )
    usage = card.fenced(
        "from transformers import AutoModelForCausalLM\n\n"
        'model = AutoModelForCausalLM.from_pretrained("OUT", trust_remote_code=True)',
        language="python",
    )
    return f"{text}\nThe architecture's code is in this folder, so transformers needs nothing else:\n\n{usage}\n"


def command(recipe: UpcycleRecipe) -> list[str]:
    """The command line that makes the same checkpoint in a folder OUT, nothing left to defaults."""
    flags = {
        name: getattr(recipe, name)
        for name in recipe.__dataclass_fields__
        if name not in ("base", "specialists", "allow_nonfinite")
    }
    specialists = [f"--specialist={specialist.name}={specialist.path}" for specialist in recipe.specialists]
    if recipe.specialists:
        del flags["experts"]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    nonfinite = ["--allow-nonfinite"] if recipe.allow_nonfinite else []
    return ["moesaic", "upcycle", recipe.base, "OUT", *specialists, *options, *nonfinite]
