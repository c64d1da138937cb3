"""What a row of the table of MoE families says, and nothing that needs a checkpoint. Torch-free.

A row (`moe_table`) is the only place that knows a family: how its config calls things, what its router does, how its
experts are stored, which dense model it is made of, what `export` may write as this family, what llama.cpp and vLLM do
with it, and which verbs do not work. All other code reads these fields and never asks for a family's name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moesaic.common.errors import MoesaicError
from moesaic.families.dense_table import FAMILIES

Config = Mapping[str, Any]

MOE_PREFIX = "moesaic_"
"""What stands before the dense model's type in that of our architecture."""

MULTIPLIERS = ("embedding_multiplier", "logits_scaling", "residual_multiplier")
"""Config keys of Granite's multipliers; 1 in all other families."""

PLAIN_LAYERS = "plain decoder layers"
PLAIN_TOP_K, ONE_PER_GROUP = "plain top-k", "one expert per group"
SELECTED, ALL = "softmax over selected", "softmax over all"
NONE = "none"
"""Words for facts about a model (`exporting.rules` finds them, `NativeTarget.allowed` lists them)."""


def our_base(model_type: object) -> str | None:
    """The dense base of `moesaic_<base>`; None where a model is not of our architecture, but for its routers."""
    base = base_of(model_type)
    return base if base in FAMILIES else None


def base_of(model_type: object) -> str | None:
    """The base of `moesaic_<base>`, dense or with experts of its own; None where a model has no code of ours."""
    name = str(model_type)
    return name.removeprefix(MOE_PREFIX) if name.startswith(MOE_PREFIX) else None


def native_type(model_type: object) -> str:
    """The model type, that of the base where only routers are ours."""
    return str(model_type) if our_base(model_type) else base_of(model_type) or str(model_type)


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """Names below `model.layers.N.`: the router's, and either one per matrix with `{expert}`, or two stacked ones."""

    router: str
    own: tuple[str, str, str] | None = None
    """gate, up, down of one expert."""
    stacks: tuple[str, str] | None = None
    """gate and up (E, 2I, D), gate rows first; down (E, D, I)."""

    @property
    def names(self) -> list[str]:
        """Names that a layer stored so has, of its first expert where each has its own."""
        return [self.router, *(name.format(expert=0) for name in self.own or ()), *(self.stacks or ())]


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """The spellings of one family; no `per_expert` where nothing reads such a checkpoint, and then `reason` says so.

    `family` is the layout of the family's checkpoints on the hub, `fused` the names of transformers' own modules
    (`save_pretrained(save_original_format=False)`), `per-expert` one tensor per expert and matrix.
    """

    family: Spelling
    per_expert: Spelling | None
    fused: Spelling
    reason: str = ""

    @property
    def single(self) -> bool:
        """Whether there is one spelling only, so that another layout is nothing to write."""
        return self.per_expert is None and self.family == self.fused

    def spelling(self, layout: str, model_type: str) -> Spelling:
        """The spelling of a layout's name; a MoesaicError where the family has none."""
        chosen = {"family": self.family, "per-expert": self.per_expert, "fused": self.fused}[layout]
        if chosen is None:
            raise MoesaicError(
                f"--layout {layout}: {model_type} has no such layout: {self.reason}; use family or fused"
            )
        return chosen


def _own(block: str, gate: str, up: str, down: str) -> Spelling:
    gate, up, down = (f"{block}.experts.{{expert}}.{name}.weight" for name in (gate, up, down))
    return Spelling(router=f"{block}.gate.weight", own=(gate, up, down))


def _stacks(router: str, gate_up: str, down: str) -> Spelling:
    return Spelling(router=router, stacks=(gate_up, down))


_FUSED = _stacks("mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_QWEN_OWN = _own("mlp", "gate_proj", "up_proj", "down_proj")
_MIXTRAL_OWN = _own("block_sparse_moe", "w1", "w3", "w2")
_GPT_OSS_STACKS = _stacks("mlp.router.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")

QWEN_LAYOUTS = Layouts(family=_QWEN_OWN, per_expert=_QWEN_OWN, fused=_FUSED)
MIXTRAL_LAYOUTS = Layouts(family=_MIXTRAL_OWN, per_expert=_MIXTRAL_OWN, fused=_FUSED)
GRANITE_LAYOUTS = Layouts(
    family=_stacks(
        "block_sparse_moe.router.layer.weight",
        "block_sparse_moe.input_linear.weight",
        "block_sparse_moe.output_linear.weight",
    ),
    per_expert=None,
    fused=_stacks(
        "block_sparse_moe.router.weight",
        "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.experts.down_proj",
    ),
    reason="it has been published with stacked experts only",
)
GPT_OSS_LAYOUTS = Layouts(
    family=_GPT_OSS_STACKS,
    per_expert=None,
    fused=_GPT_OSS_STACKS,
    reason="its stacked matrices interleave gate and up, and nothing reads single experts",
)
OURS_LAYOUTS = Layouts(
    family=_FUSED, per_expert=None, fused=_FUSED, reason="modeling_moesaic.py reads stacked experts only"
)


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the slots of experts are, by names below `model.layers.N.`, in every layout that a family is stored in."""

    stacked: Mapping[str, tuple[str, int]]
    """Name -> role, and axis of the experts."""
    own: Mapping[str, str]
    """Name with `{expert}`, of a tensor that each expert has for itself -> role."""
    shared: tuple[str, ...] = ()
    """Beginnings of the names of shared experts."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One rule: scores of the logits, plus a bias for the choice alone, in groups or not; then weights."""

    scoring: Literal["softmax", "sigmoid"]
    weighting: Literal["selected", "all", "one after the other"]
    """The weights sum to a constant, or are the scores times one, or each is the share of an expert among those that
    are nearly as good and not chosen before (Phi-3.5-MoE)."""
    bias_on: Literal["none", "scores", "logits", "weights"]
    """What the number per expert is added to for the choice alone; or (`weights`) what it multiplies."""
    bias: str
    """Name of that number's tensor, of the router or of the block around it."""
    group_rank: str
    """`best`, `two best`: what a group counts in group-limited selection (DeepSeek-V2, DeepSeek-V3); or none."""
    returns: Literal["logits", "softmax", "sigmoid"]
    """What the router returns first: its logits, or scores already."""
    scaled: bool = False
    """Whether the router multiplies its weights by the config's factor (some blocks do it after the experts)."""


@dataclass(frozen=True, kw_only=True)
class DenseTwin:
    """The dense model whose class, with our MoE block in place of the FFN, computes what the family computes.

    Proved per row by a test that compares both models' logits. `width` is the config key of the experts' width,
    `shared_width` that of the shared experts, which are one FFN of a width of its own (None: the family has none). In a
    family with `shared_width` every layer is a MoE layer, so that our `intermediate_size` is free to say it.
    """

    base: str
    width: str = "intermediate_size"
    shared_width: str | None = None


@dataclass(frozen=True, kw_only=True)
class NativeTarget:
    """The family as what `export` writes: which models are exactly this family, and how the config is written.

    `allowed` lists words per fact of `exporting.rules.LABELS` (a fact left out may be anything). `keys` are taken over
    from our config as they are, `values` computed from it. `shared` says how shared experts are stored: `gated` (half
    weight by a gate of nearly zero, Qwen2-MoE), `stacked` (gate and up in one matrix, Granite); None: there are none.
    `why` is what `--to auto` says of its choice, `preference` its place in the order in which that tries families.
    """

    preference: int
    causal_class: str
    why: str
    allowed: Mapping[str, frozenset[str]]
    keys: tuple[str, ...] = ()
    values: Mapping[str, Callable[[Config], Any]] = field(default_factory=dict)
    shared: Literal["gated", "stacked"] | None = None
    qkv_bias: bool = False
    """Queries, keys and values always have biases: zeros where the model has none."""


@dataclass(frozen=True, kw_only=True)
class GgufFacts:
    """What llama.cpp's converter and graph do with the family, read from llama-cpp-python 0.3.36 and run against
    transformers by `make interop`.

    `allowed`: words per fact of `exporting.rules.GGUF_FACTS` that llama.cpp computes rightly (left out: anything).
    `own_head`: it wants an output matrix of its own, so a tied one is written out. `reason`: why the family is refused
    altogether. `caveat`: what is a little different in every model; said, not refused. `config`: keys that the
    converter reads and transformers does not write.
    """

    allowed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    own_head: bool = False
    reason: str = ""
    caveat: str = ""
    config: Config = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MoEFamily:
    """Everything about one family.

    What a config says: `experts_key` and `top_k_key` are the keys of E and K; a config may also write E under another
    of `EXPERT_COUNT_KEYS`. `scoring` turns logits into scores; `weighting` says what the weights of the selected
    experts are: `selected` (they sum to 1, before scaling), `all` (the scores as they are), or the config key that
    decides between the two. `scaling_key` multiplies the weights, `group_keys` are the number of groups and of groups
    chosen in group-limited selection, `selection_bias` says that a bias is added to the scores for the selection alone.

    How it is stored: `layouts`; `transposed`: stacked matrices are (input, output); `interleaved`: the outputs of gate
    and up alternate; without `gated` there is no gate, but `up` and `down` alone.
    """

    model_type: str
    about: str
    """Which models it is, for people."""
    notes: str = ""
    """Where the family comes from, or what is special about it; one line."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """Column of `support.COLUMNS` -> no and why, or what holds beside "tested"."""

    experts_key: str
    top_k_key: str = "num_experts_per_tok"
    scoring: Literal["softmax", "sigmoid", "unknown"] = "softmax"
    weighting: str = "selected"
    scaling_key: str | None = None
    group_keys: tuple[str, str] | None = None
    selection_bias: bool = False

    layouts: Layouts
    transposed: bool = False
    interleaved: bool = False
    gated: bool = True
    places: Places | None = None
    """None: those of `moe.USUAL`, by names that many families share."""
    uniform: bool = True
    """Layers differ in nothing but their FFN, so that a tensor of attention that one layer lacks is missing."""

    adds_up: bool = True
    """m copies of every expert, all active, have together the weight that the expert had alone (docs/statements.md,
    E1), or have m times it and `scaling_key` can make up for it."""
    derived: bool = False
    """Read off transformers' class (`derive`), not written here."""
    returns: Literal["logits", "softmax", "sigmoid"] = "logits"
    """What the router of transformers gives first: logits, or the scores already."""
    routers: tuple[str, ...] = ()
    """Classes of transformers whose routers our training rules can replace; none where a guess would be wrong."""
    decision: Decision | None = None
    """How these routers decide; None: a softmax of plain logits, and no more."""
    router_weights_in_fp32: bool = False
    """Whether these routers leave the weights in fp32, instead of the hidden states' dtype."""
    window_every: int | None = None
    """Every n-th layer sees everything, the others a window, where a config gives a window but no `layer_types`."""
    window_is_switched: bool = False
    """A window counts only where `use_sliding_window` is true."""

    twin: DenseTwin | None = None
    no_twin: str = ""
    """Why a checkpoint cannot become another family, or (without `twin`) our architecture on a dense model."""
    export_first: tuple[str, ...] = ()
    """Model types of released checkpoints whose own code no longer imports: only `export` reads them."""

    target: NativeTarget | None = None
    gguf: GgufFacts | None = None

    def normalises(self, config: Config) -> bool:
        """Whether the weights of the selected experts sum to a constant."""
        if self.weighting in ("selected", "all"):
            return self.weighting == "selected"
        # transformers' own defaults: families with sigmoid scores renormalise, those with softmax don't.
        return config.get(self.weighting, self.scoring == "sigmoid") in (True, "selected", "sigmoid")
