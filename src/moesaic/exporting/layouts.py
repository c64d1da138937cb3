"""How the experts of a layer are spelled on disk: per expert or stacked, in each family. Torch-free.

`family` is the layout of the family's checkpoints on the hub, `fused` the names of transformers' own modules
(`save_pretrained(save_original_format=False)`), `per-expert` one tensor per expert and matrix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moesaic.checkpoint.pieces import CopiedTensor
from moesaic.common.errors import MoesaicError
from moesaic.exporting.rows import Rows, joined, stacked, tensor

LayoutName = Literal["input", "family", "per-expert", "fused"]
LAYOUTS = ("input", "family", "per-expert", "fused")


@dataclass(frozen=True, kw_only=True)
class Expert:
    """The matrices of one expert (or of the shared experts): gate and up (I, D), down (D, I)."""

    gate: Rows
    up: Rows
    down: Rows


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """Names below `model.layers.N.`: the router's, and either one per matrix with `{expert}`, or two stacked ones."""

    router: str
    own: tuple[str, str, str] | None = None
    """gate, up, down of one expert."""
    stacks: tuple[str, str] | None = None
    """gate and up (E, 2I, D), gate rows first; down (E, D, I)."""


@dataclass(frozen=True, kw_only=True)
class FamilyLayouts:
    """The spellings of one family; None where nothing reads such a checkpoint, and then `reason` says so."""

    family: Spelling
    per_expert: Spelling | None
    fused: Spelling
    reason: str = ""

    def spelling(self, layout: str, model_type: str) -> Spelling:
        """The spelling of a layout's name; a MoesaicError where the family has none."""
        known = {"family": self.family, "per-expert": self.per_expert, "fused": self.fused}
        chosen = known[layout]
        if chosen is None:
            raise MoesaicError(
                f"--layout {layout}: {model_type} has no such layout: {self.reason}; use family or fused"
            )
        return chosen


_QWEN_OWN = Spelling(
    router="mlp.gate.weight",
    own=(
        "mlp.experts.{expert}.gate_proj.weight",
        "mlp.experts.{expert}.up_proj.weight",
        "mlp.experts.{expert}.down_proj.weight",
    ),
)
_FUSED = Spelling(router="mlp.gate.weight", stacks=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))
_QWEN = FamilyLayouts(family=_QWEN_OWN, per_expert=_QWEN_OWN, fused=_FUSED)

_MIXTRAL_OWN = Spelling(
    router="block_sparse_moe.gate.weight",
    own=(
        "block_sparse_moe.experts.{expert}.w1.weight",
        "block_sparse_moe.experts.{expert}.w3.weight",
        "block_sparse_moe.experts.{expert}.w2.weight",
    ),
)

_GRANITE = FamilyLayouts(
    family=Spelling(
        router="block_sparse_moe.router.layer.weight",
        stacks=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    ),
    per_expert=None,
    fused=Spelling(
        router="block_sparse_moe.router.weight",
        stacks=("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
    ),
    reason="it has been published with stacked experts only",
)

OURS = FamilyLayouts(
    family=_FUSED, per_expert=None, fused=_FUSED, reason="modeling_moesaic.py reads stacked experts only"
)

GPT_OSS = FamilyLayouts(
    family=Spelling(
        router="mlp.router.weight",
        stacks=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
    per_expert=None,
    fused=Spelling(
        router="mlp.router.weight",
        stacks=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
    reason="its stacked matrices interleave gate and up, and nothing reads single experts",
)

LAYOUTS_OF: dict[str, FamilyLayouts] = {
    "olmoe": _QWEN,
    "flex_olmo": _QWEN,
    "qwen2_moe": _QWEN,
    "qwen3_moe": _QWEN,
    "mixtral": FamilyLayouts(family=_MIXTRAL_OWN, per_expert=_MIXTRAL_OWN, fused=_FUSED),
    "gpt_oss": GPT_OSS,
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "deepseek_v2": _QWEN,
    "deepseek_v3": _QWEN,
    "glm4_moe": _QWEN,
}


def layouts_of(model_type: str) -> FamilyLayouts:
    """The layouts of a family of `moe_table`, or of our architecture."""
    return OURS if model_type.startswith("moesaic_") else LAYOUTS_OF[model_type]


def expert_tensors(prefix: str, spelling: Spelling, router: Rows, experts: Sequence[Expert]) -> list[CopiedTensor]:
    """Router and experts of one layer under the names of a spelling; `prefix` is `model.layers.N.`."""
    made = [tensor(prefix + spelling.router, router)]
    if spelling.own is not None:
        for number, expert in enumerate(experts):
            names: Mapping[str, Rows] = dict(zip(spelling.own, (expert.gate, expert.up, expert.down), strict=True))
            made += [tensor(prefix + name.format(expert=number), rows) for name, rows in names.items()]
        return made
    assert spelling.stacks is not None
    gate_up, down = spelling.stacks
    made.append(tensor(prefix + gate_up, stacked([joined([expert.gate, expert.up]) for expert in experts])))
    made.append(tensor(prefix + down, stacked([expert.down for expert in experts])))
    return made
