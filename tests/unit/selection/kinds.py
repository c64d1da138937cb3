"""Tiny checkpoints of every kind of router: the families of others, and ours with each rule; and selections of them."""

from pathlib import Path
from typing import Any

from moesaic.checkpoint.source import open_checkpoint
from moesaic.families.identity import describe
from moesaic.families.moe import detect_moe
from moesaic.routing.subset import Selection
from moesaic.selection.scorers import score_random
from moesaic.selection.select import best_experts
from tests.tiny_models import tiny_moe_model
from tests.tiny_moes import MOE_FAMILIES, save_tiny_moe

# Four groups of four experts: half of each can go.
_GROUPED: dict[str, Any] = {"n_routed_experts": 16}

_OURS: dict[str, dict[str, Any]] = {
    "ours_topk": {"num_shared_experts": 1},
    "ours_all": {"routing_weighting": "all"},
    **{
        f"ours_{score}": {"routing_rule": "one_per_group", "group_score": score, "expert_groups": groups}
        for score, groups in (
            ("max", [0, 0, 1, 1, 2, 2]),
            ("mean", [[0, 0, 1, 1, 2, 2], [0, 1, 2, 2, 1, 0]]),
            ("log_mean_exp", [[0, 1, 0, 1, 0, 1], [0, 1, 1, 0, 2, 2]]),
        )
    },
}

_GROUPED_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2_grouped": (
        "deepseek_v2", {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3_top4": ("deepseek_v3", {"num_experts_per_tok": 4}),
    "glm4_moe": ("glm4_moe", {}),
}  # fmt: skip

KINDS = [*dict.fromkeys([*MOE_FAMILIES, *_GROUPED_KINDS, *_OURS])]


def save_kind(folder: Path, kind: str, *, seed: int = 0) -> Path:
    """Save a tiny model of a kind."""
    if kind in _OURS:
        tiny_moe_model("llama", seed=seed, **_OURS[kind]).save_pretrained(folder)
        return folder
    family, more = _GROUPED_KINDS.get(kind, (kind, {}))
    return save_tiny_moe(folder, family, seed=seed, **(_GROUPED | more if kind in _GROUPED_KINDS else {}))


def random_selection(folder: Path, *, seed: int = 0, share: int = 2) -> Selection:
    """Keep one in `share` experts at random, other ones in each layer."""
    checkpoint = open_checkpoint(folder)
    source = describe(checkpoint, detect_moe(checkpoint))
    scores_LE = score_random(source.layers, source.num_experts, seed)
    keep = source.num_experts // share
    return Selection(
        source=source,
        method="random",
        layers=source.layers,
        kept=tuple(best_experts(row_E, keep, source.num_groups) for row_E in scores_LE),
        scores=tuple(map(tuple, scores_LE.tolist())),
        routing_mass_kept=None,
    )
