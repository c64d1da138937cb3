"""How large an experiment is: data, models, tokens and what is varied. Plain data, no torch."""

from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Literal, get_args

from moesaic.errors import MoesaicError
from moesaic.recipe import load_recipe
from moesaic.recipe_yaml import parse_yaml
from moesaic.selection.request import METHODS, Method

SCALES = ("tiny", "small")
"""Names of the scales that come with the package."""

EmoVariant = Literal["fixed_pool", "no_shared_expert", "local_balancing", "annealing"]
DivmoeMethod = Literal[
    "scratch", "sparse", "btx", "virtual_group", "drop", "drop_fine", "drop_fine_paper_scale", "divmoe", "divmoe_topk",
    "divmoe_as_published", "divmoe_random_router", "divmoe_paper_scale", "divmoe_m1", "divmoe_m4",
    "divmoe_base_weights", "divmoe_random_weights",
]  # fmt: skip
Treatment = Literal["gradient_norm", "uniform", "random", "exact"]


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


@dataclass(frozen=True, kw_only=True)
class ModelScale:
    """What all models of an experiment share (Llama: pre-norm, tied embeddings)."""

    vocabulary: int
    """Tokens of the tokenizer, which is trained on the data."""
    hidden_size: int
    layers: int
    heads: int
    sequence_length: int = 256


@dataclass(frozen=True, kw_only=True)
class TrainScale:
    """One training run."""

    tokens: int
    lr: float
    batch_tokens: int = 4096
    micro_sequences: int = 8
    warmup_steps: int = 10


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

    def __post_init__(self) -> None:
        if "annealing" in self.variants and self.anneal is None:
            raise MoesaicError("anneal is missing: the variant annealing needs it")


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
    other_experts: tuple[int, ...] = ()
    """Other E for the comparison of activation ratios with sparse upcycling, at tau/T = 0.5; E belongs to it too."""
    utility_batches: int = 10


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


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A scale of all experiments."""

    data: DataScale
    emo: EmoScale
    expand: ExpandScale
    divmoe: DivmoeScale
    life: LifeScale
    description: str = field(default="")


def load_scale(name: str | Path) -> Scale:
    """Read a scale: `tiny`, `small`, or a YAML file like theirs.

    Raises: `MoesaicError` for a name that is neither, and for a file that does not hold one.
    """
    if str(name) in SCALES:
        text = (resources.files("moesaic.lab") / "scales" / f"{name}.yaml").read_text(encoding="utf-8")
        return load_recipe(Scale, parse_yaml(text, str(name)), name=f"--scale {name}")
    if not Path(name).is_file():
        raise MoesaicError(f"--scale {name}: no such file, and none of {', '.join(SCALES)}")
    return load_recipe(Scale, Path(name))
