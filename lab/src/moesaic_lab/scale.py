"""How large an experiment is: data, models, tokens and what is varied. Plain data, no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal, get_args

from moesaic.common.errors import MoesaicError
from moesaic.common.layer_ranges import parse_layers
from moesaic.common.recipe import load_recipe
from moesaic.common.yaml_text import parse_yaml
from moesaic.expansion.recipe import ExpertOp, RouterOp
from moesaic.selection.recipe import METHODS, Method

SCALES = ("tiny", "small", "papers")
"""Names of the scales that come with the package."""

EmoVariant = Literal["fixed_pool", "no_shared_expert", "local_balancing", "annealing"]
DivmoeMethod = Literal[
    "virtual_group", "divmoe", "sparse", "btx", "drop", "drop_fine", "drop_fine_paper_scale", "scratch", "divmoe_topk",
    "divmoe_as_published", "btx_top1", "drop_paper_scale", "divmoe_m1", "divmoe_m4", "divmoe_random_router",
    "divmoe_paper_scale", "divmoe_base_weights", "divmoe_random_weights",
]  # fmt: skip
Treatment = Literal["gradient_norm", "uniform", "random", "exact"]
_BYTES = 258
"""Tokens of a byte-level tokenizer that has learnt nothing: the bytes, padding and end of text."""
_MOST_CLUSTERS = 1000


def kept_experts(share: float, experts: int) -> int:
    """Experts that `moesaic select --keep` keeps of so many."""
    return math.ceil(round(share * experts, 9))


def _at_least(least: float, scale: object, *names: str) -> None:
    for name in names:
        if getattr(scale, name) < least:
            raise MoesaicError(f"{name} must be at least {least}, got {getattr(scale, name)}")


def _unlike(scale: object, *names: str) -> None:
    for name in names:
        values = getattr(scale, name)
        if len(set(values)) < len(values):
            raise MoesaicError(f"{name} must have each value once, got {list(values)}")


def _shares(name: str, values: Sequence[float], *, whole: bool = False) -> None:
    for value in values:
        if not (0 < value < 1 or (whole and value == 1)):
            most = "at most" if whole else "less than"
            raise MoesaicError(f"{name} must be greater than 0 and {most} 1, got {value:g}")


@dataclass(frozen=True, kw_only=True)
class DataScale:
    """Text: how much the generated domains have, and what is held out of any."""

    documents: int
    """Training documents per generated domain; not used with --data."""
    tasks: int = 100
    """Held-out questions per generated domain and kind."""
    held_out_size: int = 40_000
    """Characters of held-out text per domain that losses are measured on, in whole documents."""
    held_out_characters: int = 1200
    """First characters of a held-out document that are used."""

    def __post_init__(self) -> None:
        _at_least(1, self, "documents", "tasks", "held_out_size", "held_out_characters")


@dataclass(frozen=True, kw_only=True)
class ModelScale:
    """What all models of an experiment share (Llama: pre-norm, tied embeddings)."""

    vocabulary: int
    """Tokens of the tokenizer, which is trained on the data."""
    hidden_size: int
    layers: int
    heads: int
    sequence_length: int = 256
    initializer_range: float = 0.02
    """Standard deviation of the first weights; 0.02 is for wide models: with 64 wide, 0.1 learns twice as fast."""

    def active_parameters(self, width: int) -> int:
        """Parameters that a token uses (the tied embeddings once); its FFN or experts are `width` wide together."""
        layer = 4 * self.hidden_size**2 + 3 * self.hidden_size * width
        return self.vocabulary * self.hidden_size + self.layers * layer

    def __post_init__(self) -> None:
        _at_least(1, self, "hidden_size", "layers", "heads")
        _at_least(2, self, "sequence_length")
        if self.vocabulary < _BYTES:
            raise MoesaicError(f"vocabulary must be at least {_BYTES}, the bytes and two more, got {self.vocabulary}")
        if self.hidden_size % (2 * self.heads):
            raise MoesaicError(f"heads must divide half of hidden_size ({self.hidden_size}), got {self.heads}")


@dataclass(frozen=True, kw_only=True)
class TrainScale:
    """One training run."""

    tokens: int
    lr: float
    batch_tokens: int = 4096
    micro_sequences: int | None = None
    """Sequences at a time; None: all of a step, so that balancing sees the whole batch."""
    warmup_steps: int = 10

    def __post_init__(self) -> None:
        _at_least(1, self, "tokens", "batch_tokens")
        if self.micro_sequences is not None:
            _at_least(1, self, "micro_sequences")
        _at_least(0, self, "warmup_steps")
        if self.lr <= 0:
            raise MoesaicError(f"lr must be greater than 0, got {self.lr}")

    @property
    def steps(self) -> int:
        """Optimizer steps: the tokens, rounded up to whole steps."""
        return -(-self.tokens // self.batch_tokens)

    @property
    def whole_tokens(self) -> int:
        """Tokens of all steps."""
        return self.steps * self.batch_tokens


@dataclass(frozen=True, kw_only=True)
class EmoScale:
    """Standard and modular MoE on the same tokens, and what is left of them with fewer experts."""

    model: ModelScale
    train: TrainScale
    experts: int
    top_k: int
    expert_size: int
    """Width of a routed expert, and of the shared one."""
    shares: tuple[float, ...] = (0.5, 0.25, 0.125)
    """Shares of the experts that are kept."""
    documents: tuple[int, ...] = (1, 5, 100)
    """Numbers of calibration documents."""
    methods: tuple[Method, ...] = METHODS
    inspect_tokens: int = 60_000
    """Tokens of training text whose routing is clustered."""
    clusters: int = 32
    """Clusters of these tokens."""
    tune_shares: tuple[float, ...] = (1.0, 0.25, 0.125)
    """Shares that are fine-tuned on one domain each (1.0 is the full model)."""
    tune: TrainScale
    """Fine-tuning on one domain."""
    variants: tuple[EmoVariant, ...] = ()
    """Further models."""
    anneal: TrainScale | None = None
    """Annealing of the standard model with document pools; needed by the variant `annealing`."""

    @property
    def width(self) -> int:
        """Of a token's experts together."""
        return self.expert_size * (self.top_k + 1)

    def __post_init__(self) -> None:
        _at_least(1, self, "top_k", "expert_size", "inspect_tokens")
        _at_least(2, self, "clusters")
        _unlike(self, "shares", "documents", "methods", "tune_shares", "variants")
        if self.experts <= self.top_k:
            raise MoesaicError(f"experts must be more than top_k ({self.top_k}), got {self.experts}")
        if self.clusters > _MOST_CLUSTERS:
            raise MoesaicError(f"clusters must be at most {_MOST_CLUSTERS}, got {self.clusters}")
        if not self.documents or min(self.documents) < 1:
            raise MoesaicError(f"documents must be one or more numbers of at least 1, got {list(self.documents)}")
        if "router" not in self.methods:
            raise MoesaicError("methods must hold router: parts are fine-tuned and compared as it chooses them")
        if "annealing" in self.variants and self.anneal is None:
            raise MoesaicError("anneal is missing: the variant annealing needs it")
        self._check_shares()

    def _check_shares(self) -> None:
        _shares("shares", self.shares)
        _shares("tune_shares", self.tune_shares, whole=True)
        if not self.shares:
            raise MoesaicError("shares is empty; give at least one, such as [0.25]")
        active = self.top_k + ("no_shared_expert" in self.variants)
        for share in self.shares:
            if (kept := kept_experts(share, self.experts)) < active:
                raise MoesaicError(
                    f"shares must leave the {active} experts that a token uses; {share:g} of {self.experts} is {kept}"
                )
        if others := [share for share in self.tune_shares if share not in (1, *self.shares)]:
            raise MoesaicError(f"tune_shares must be 1 or one of shares {list(self.shares)}, got {others[0]:g}")


@dataclass(frozen=True, kw_only=True)
class ExpandScale:
    """Few experts, many experts, and few that become many on the way, at matched tokens."""

    model: ModelScale
    train: TrainScale
    experts: int
    """E; the grown model has twice as many."""
    top_k: int
    expert_size: int
    moe_layers: str = "all"
    shares: tuple[float, ...] = (0.25, 0.5, 0.67, 0.8, 0.91)
    """tau/T: share of the steps with few experts."""
    treatments: tuple[Treatment, ...] = ("gradient_norm", "uniform", "random", "exact")
    """How the model grows."""
    expert_ops: tuple[ExpertOp, ...] = tuple(name for name in get_args(ExpertOp) if name != "copy")
    """Operators for the duplicates' weights that `operators` compares with plain copies."""
    router_ops: tuple[RouterOp, ...] = tuple(name for name in get_args(RouterOp) if name != "copy")
    """Operators for their router rows."""
    other_experts: tuple[int, ...] = ()
    """Other E for the comparison of activation ratios with sparse upcycling, at tau/T = 0.5; E belongs to it too."""
    utility_batches: int = 10

    def __post_init__(self) -> None:
        _at_least(1, self, "top_k", "expert_size", "utility_batches")
        _unlike(self, "shares", "treatments", "expert_ops", "router_ops", "other_experts")
        for name, operators in (("expert_ops", self.expert_ops), ("router_ops", self.router_ops)):
            if "copy" in operators:
                raise MoesaicError(f"{name} must not hold copy, which all others are compared with")
        _shares("shares", self.shares)
        for name, experts in (("experts", self.experts), *(("other_experts", one) for one in self.other_experts)):
            if experts < self.top_k:
                raise MoesaicError(f"{name} must be at least top_k ({self.top_k}), got {experts}")
        if self.experts in self.other_experts:
            raise MoesaicError(f"other_experts must not hold experts ({self.experts}), which belongs to them already")
        if not self.treatments:
            raise MoesaicError("treatments is empty; give at least one, such as [uniform]")
        if self.train.tokens <= self.train.batch_tokens:
            raise MoesaicError(
                f"train must have more tokens than one step ({self.train.batch_tokens}), to grow after it"
            )
        try:
            parse_layers(self.moe_layers, self.model.layers)
        except MoesaicError as error:
            raise MoesaicError(f"moe_layers cannot be {str(error).removeprefix('--layers ')}") from error


@dataclass(frozen=True, kw_only=True)
class DivmoeScale:
    """A dense base, specialists, and the models that are made of them."""

    model: ModelScale
    intermediate_size: int
    """F of the dense model; a multiple of 4."""
    base: TrainScale
    specialist: TrainScale
    """One domain each, from the base on."""
    train: TrainScale
    """Joint stage, from the upcycled model on."""
    methods: tuple[DivmoeMethod, ...] = get_args(DivmoeMethod)

    def __post_init__(self) -> None:
        _unlike(self, "methods")
        if self.intermediate_size < 1 or self.intermediate_size % 4:
            raise MoesaicError(f"intermediate_size must be a multiple of 4, got {self.intermediate_size}")


@dataclass(frozen=True, kw_only=True)
class LifeScale:
    """One model's life: dense, specialists, MoE, modular, larger, a part of it, and the part put back."""

    anneal: TrainScale
    """With document pools; the stages before are those of `divmoe`."""
    grown: TrainScale
    """After the expansion."""
    tune: TrainScale
    """Of the extracted part, on one domain."""
    keep: float = 0.25
    """Share of the larger model's experts in the part."""

    def __post_init__(self) -> None:
        _shares("keep", [self.keep], whole=True)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A scale of all experiments."""

    data: DataScale
    emo: EmoScale
    expand: ExpandScale
    divmoe: DivmoeScale
    life: LifeScale
    description: str = ""
    undecided: str = ""
    """What it cannot decide, said first wherever it is used."""


def load_scale(name: str | Path) -> Scale:
    """Read a scale: `tiny`, `small`, or a YAML file like theirs.

    Raises: `MoesaicError` for a name that is neither, and for a file that does not hold one.
    """
    if str(name) in SCALES:
        text = (resources.files("moesaic_lab") / "scales" / f"{name}.yaml").read_text(encoding="utf-8")
        return load_recipe(Scale, parse_yaml(text, str(name)), name=f"--scale {name}")
    if not Path(name).is_file():
        raise MoesaicError(f"--scale {name}: no such file, and none of {', '.join(SCALES)}")
    return load_recipe(Scale, Path(name))
