"""From a recipe and the base's sizes to numbers that fit together: every default filled in, every misfit refused.

N specialists, M shards, E experts, K active, I and F intermediate sizes of an expert and of the dense FFN. No torch.
"""

from dataclasses import dataclass, replace

from moesaic.common.errors import MoesaicError
from moesaic.routing.gradient import RouterChoices
from moesaic.upcycling.method import ExpertSpec, Method
from moesaic.upcycling.methods import METHODS
from moesaic.upcycling.recipe import RouterInit, RoutingRule, Scale, SharedWeights, UpcycleRecipe, Weighting

DEFAULT_EXPERTS = 8


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Factors of a layer: on the routing weights, and on the experts' linear maps (in float32, before the cast)."""

    weights: float
    """On the routing weights: `routed_scaling_factor` of the result's config."""
    gate_up: float
    """On gate and up (and their biases) of every routed expert."""
    down: float
    """On down (and its bias) of every routed expert."""
    shared_down: float
    """On down (and its bias) of the shared experts."""

    @property
    def routed(self) -> float:
        """On the routed experts' weighted sum, where gate and up are as they were."""
        return self.weights * self.down

    @property
    def folded(self) -> "Factors":
        """The same layer with the weights' factor in `down`, as checkpoints without `routed_scaling_factor` have it."""
        return replace(self, weights=1.0, down=self.routed)


def factors(*, scale: Scale, weighting: Weighting, experts: int, top_k: int, shards: int, shared: int) -> Factors:
    """Factors of one layer (docs/statements.md).

    `exact`: weights that sum to 1 over K = M*(whole groups) give each shard 1/M, so weights times M; a softmax over all
    E without renormalisation gives 1/E at a flat router, so weights times E*M/K. The experts keep the FFN's numbers: M
    times what a shard puts out, before its weight, can leave float16. With S shared experts (S whole FFNs) the routed
    part gets one half and each shared expert 1/(2S), so that exact experts still add up to the FFN.
    `paper`: the cube root of E*M/K (equation 5 of DivMoE: E_exp*G^2/k with E = E_exp*G, G = M) on all three matrices,
    whatever the weighting; the shared experts are left alone, as with `none`.
    """
    exact = {"selected": float(shards), "all": experts * shards / top_k}
    root = (experts * shards / top_k) ** (1 / 3)
    half = 0.5 if shared else 1.0
    table: dict[Scale, Factors] = {
        "exact": Factors(weights=exact[weighting] * half, gate_up=1.0, down=1.0, shared_down=half / max(shared, 1)),
        "paper": Factors(weights=1.0, gate_up=root, down=root, shared_down=1.0),
        "none": Factors(weights=1.0, gate_up=1.0, down=1.0, shared_down=1.0),
    }
    return table[scale]


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What every MoE layer of the result looks like and how it is made."""

    method: Method
    seed: int
    specialists: int
    """N; 0 where the experts come from the base."""
    experts: int
    """E."""
    top_k: int
    """K."""
    shards: int
    """M."""
    shared_experts: int
    """S."""
    routing: RoutingRule
    weighting: Weighting
    router_init: RouterInit
    """Resolved: never `auto`."""
    router_std: float
    factors: Factors
    exact_factors: Factors
    """What `--scale exact` would use; the statements about the result need `factors` to be equal to it."""
    expert: ExpertSpec

    @property
    def groups(self) -> tuple[int, ...] | None:
        """Group of each expert for `one_per_group` (a specialist, or a virtual group); None for plain top-k."""
        if self.routing == "topk":
            return None
        return tuple(expert // self.shards for expert in range(self.experts))

    @property
    def router_choices(self) -> RouterChoices:
        """What decides whether the text's loss can teach the router."""
        whole_copies = self.method.preserves and not self.specialists and self.shards == 1
        return RouterChoices(
            weighting=self.weighting,
            experts=self.experts,
            top_k=self.top_k,
            tied=self.shards if self.router_init == "tied" and self.routing == "topk" else 1,
            copies=whole_copies and self.router_init == "zeros",
        )


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The resolved numbers, and one sentence for each thing the user should know."""

    layer: LayerSpec
    scale: Scale
    shared_weights: SharedWeights
    notices: tuple[str, ...]


def choose(
    recipe: UpcycleRecipe, *, hidden: int, intermediate: int, biases: bool = False, initializer_range: float = 0.02
) -> Choices:
    """Fill in the method's defaults and check that everything fits.

    Args:
        recipe: what the user asks for.
        hidden: D of the base.
        intermediate: F of the base.
        biases: whether the base's FFN has biases.
        initializer_range: the base's initial standard deviation.

    Raises:
        MoesaicError: a flag does not fit the method, the base or another flag.
    """
    method = METHODS[recipe.method]
    _refuse_unused(recipe, method)
    count = _specialists(recipe, method)
    shards = _shards(recipe, method, intermediate)
    experts = _experts(recipe, method, count, shards)
    routing = _routing(recipe, method, experts, shards)
    top_k = _top_k(recipe, experts, shards, routing)
    weighting = recipe.weighting or (method.weighting_of_one if top_k == 1 else "selected")
    router_init, notices = _router(recipe, method, experts, shards, top_k, routing)
    scale = recipe.scale if method.scaled else "none"
    if recipe.scale == "paper" and not method.scaled:
        notices = (*notices, f"--scale paper: not applied, --method {method.name} keeps its initial standard deviation")
    sizes = {"experts": experts, "top_k": top_k, "shards": shards, "shared": recipe.shared_experts}
    layer = LayerSpec(
        method=method,
        seed=recipe.seed,
        specialists=count,
        experts=experts,
        top_k=top_k,
        shards=shards,
        shared_experts=recipe.shared_experts,
        routing=routing,
        weighting=weighting,
        router_init=router_init,
        router_std=recipe.router_std,
        factors=factors(scale=scale, weighting=weighting, **sizes),
        exact_factors=factors(scale="exact", weighting=weighting, **sizes),
        expert=ExpertSpec(
            hidden=hidden,
            intermediate=intermediate // shards,
            shards=shards,
            biases=biases,
            initializer_range=initializer_range,
            drop_ratio=recipe.drop_ratio,
            drop_indices=recipe.drop_indices,
        ),
    )
    return Choices(layer=layer, scale=scale, shared_weights=_shared_weights(recipe, method), notices=notices)


def _refuse_unused(recipe: UpcycleRecipe, method: Method) -> None:
    """Refuse settings of other methods where they differ from the default; a recorded recipe has them all."""
    for other in METHODS.values():
        for key in other.settings:
            value = getattr(recipe, key)
            if key not in method.settings and value != UpcycleRecipe.__dataclass_fields__[key].default:
                flag = f"--{key.replace('_', '-')}"
                raise MoesaicError(
                    f"{flag} {value}: --method {method.name} does not use it; leave it out, or use "
                    f"--method {other.name}"
                )


def _specialists(recipe: UpcycleRecipe, method: Method) -> int:
    count = len(recipe.specialists)
    if method.needs_specialists and count < 2:
        raise MoesaicError(
            f"--method {method.name} makes its experts from specialists and needs at least 2, got {count}: "
            "give --specialist NAME=PATH once per domain"
        )
    if count and not method.needs_specialists:
        takers = " or ".join(sorted(name for name, other in METHODS.items() if other.needs_specialists))
        raise MoesaicError(
            f"--specialist {recipe.specialists[0].name}: --method {method.name} makes its experts from the base alone; "
            f"leave the specialists out, or use --method {takers}"
        )
    return count


def _shards(recipe: UpcycleRecipe, method: Method, intermediate: int) -> int:
    shards = method.default_shards if recipe.shards is None else recipe.shards
    if shards > 1 and not method.cuts:
        cutters = ", ".join(sorted(name for name, other in METHODS.items() if other.cuts))
        raise MoesaicError(
            f"--shards {shards}: --method {method.name} keeps every FFN whole; leave --shards out, or use a method "
            f"that cuts ({cutters})"
        )
    if intermediate % shards:
        fits = [number for number in range(1, min(intermediate, 64) + 1) if intermediate % number == 0]
        raise MoesaicError(
            f"--shards {shards}: does not divide the base's FFN width {intermediate}; {', '.join(map(str, fits))} do"
        )
    return shards


def _experts(recipe: UpcycleRecipe, method: Method, count: int, shards: int) -> int:
    if method.needs_specialists:
        made = count * shards
        if recipe.experts not in (None, made):
            raise MoesaicError(
                f"--experts {recipe.experts}: --method {method.name} makes {made} experts from {count} specialists "
                f"and --shards {shards}; leave --experts out"
            )
        return made
    experts = DEFAULT_EXPERTS if recipe.experts is None else recipe.experts
    if method.whole_groups and experts % shards:
        raise MoesaicError(
            f"--experts {experts}: must be a multiple of --shards {shards}, so that every group of --method "
            f"{method.name} is whole; use {_nearest_multiple(experts, shards)}"
        )
    return experts


def _routing(recipe: UpcycleRecipe, method: Method, experts: int, shards: int) -> RoutingRule:
    routing = recipe.routing or method.default_routing
    if routing == "one_per_group" and method.default_routing != routing:
        if shards == 1:
            raise MoesaicError(
                f"--routing one_per_group: with whole FFNs (--shards 1) every group of --method {method.name} would be "
                "one expert, which is plain top-k; leave --routing out or set --shards"
            )
        if experts % shards:
            raise MoesaicError(
                f"--routing one_per_group: groups hold one expert per shard, so --experts {experts} must be a multiple "
                f"of --shards {shards}; use {_nearest_multiple(experts, shards)}"
            )
    return routing


def _top_k(recipe: UpcycleRecipe, experts: int, shards: int, routing: RoutingRule) -> int:
    groups = experts // shards
    most, what = (experts, "experts") if routing == "topk" else (groups, "groups (one expert per group and token)")
    top_k = min(max(2, shards), most) if recipe.top_k is None else recipe.top_k
    if top_k > most:
        raise MoesaicError(f"--top-k {top_k}: --routing {routing} has only {most} {what}; use at most {most}")
    return top_k


def _router(
    recipe: UpcycleRecipe, method: Method, experts: int, shards: int, top_k: int, routing: RoutingRule
) -> tuple[RouterInit, tuple[str, ...]]:
    """Return the resolved initialisation and what is to be said about it."""
    auto = recipe.router_init == "auto"
    wanted = method.auto_router[routing] if auto else recipe.router_init
    problem = _misfit(wanted, experts, shards)
    uneven = f"--top-k {top_k} is not a multiple of --shards {shards}"
    if problem and not auto:
        raise MoesaicError(f"--router-init {wanted}: {problem}; use --router-init random")
    if wanted in ("tied", "latin_square") and shards == 1 and not auto:
        return wanted, (f"--router-init {wanted}: with whole FFNs (--shards 1) its rows are those of random",)
    if wanted == "latin_square" and auto and (problem or top_k % shards):
        return "random", (
            f"--router-init auto: random rows, because {problem or uneven}; the shards that a token uses need not be "
            "complementary then",
        )
    if wanted in ("tied", "latin_square") and top_k % shards:
        return wanted, (f"{uneven}: a token uses an incomplete group, so nothing is preserved exactly",)
    if wanted in ("tied", "zeros") and routing == "one_per_group" and shards > 1:
        return wanted, (
            f"--router-init {wanted}: all experts of a group tie, so every token takes shard 0 of each group until "
            "training tells them apart",
        )
    return wanted, ()


def _misfit(router: RouterInit, experts: int, shards: int) -> str | None:
    """Say why the rows of this initialisation cannot be laid out, if so."""
    if router not in ("tied", "latin_square"):
        return None
    if experts % shards:
        return f"--shards {shards} does not divide the number of experts ({experts})"
    if router == "latin_square" and (experts // shards) % shards:
        return f"--shards {shards} does not divide the number of domains ({experts // shards})"
    return None


def _shared_weights(recipe: UpcycleRecipe, method: Method) -> SharedWeights:
    chosen = recipe.shared_weights or ("mean" if method.needs_specialists else "base")
    if chosen == "random-specialist" and not method.needs_specialists:
        raise MoesaicError(
            f"--shared-weights random-specialist: --method {method.name} has no specialists; use --shared-weights base"
        )
    if chosen == "reinit" and not method.reinit:
        raise MoesaicError(
            f"--shared-weights reinit: random weights everywhere are for --method scratch only, not {method.name}"
        )
    return chosen


def _nearest_multiple(number: int, of: int) -> int:
    return max(of, round(number / of) * of)
