"""Names and configs of our architectures, and the place of their code; imports neither torch nor transformers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moesaic.common.errors import MoesaicError
from moesaic.families.dense_table import FAMILIES
from moesaic.families.family import DenseTwin, base_of
from moesaic.families.moe_table import MOE_FAMILIES
from moesaic.families.support import tested

AUTO_CLASSES = {
    "AutoConfig": "Config",
    "AutoModel": "Model",
    **{
        f"AutoModel{kind}": kind
        for kind in ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    },
}
"""Auto class of transformers -> the end of the name of ours."""

STEMS = {row.model_type: row.stem for row in FAMILIES.values()}
"""Model type of a dense base -> the stem of its class names."""

MOE_BASES = tuple(dict.fromkeys((*MOE_FAMILIES, *tested())))
"""Model types whose models have experts themselves, and get routers of ours."""


def class_names(base_model_type: str) -> dict[str, Any]:
    """Return the entries of ``config.json`` that name our classes made from a base, dense or with experts of its own.

    The keys are ``model_type``, ``architectures`` and ``auto_map``. Raises ``MoesaicError`` for a base without an MoE
    architecture.
    """
    stem = STEMS.get(base_model_type) or _stem_of_moe(base_model_type)
    if stem is None:
        raise MoesaicError(
            f"model_type {base_model_type!r} has no MoE architecture; the bases that have one are {', '.join(STEMS)}"
        )
    return {
        "model_type": f"moesaic_{base_model_type}",
        "architectures": [f"Moesaic{stem}ForCausalLM"],
        "auto_map": {auto: f"modeling_moesaic.Moesaic{stem}{kind}" for auto, kind in AUTO_CLASSES.items()},
    }


def _stem_of_moe(base_model_type: str) -> str | None:
    """The stem of a family that has experts itself: transformers' own name; None for a family that is not one."""
    if base_model_type not in MOE_BASES:
        return None
    from transformers.models.auto.configuration_auto import (
        CONFIG_MAPPING_NAMES,  # pyright: ignore[reportPrivateImportUsage]
    )

    return CONFIG_MAPPING_NAMES[base_model_type].removesuffix("Config")


def modeling_file() -> Path:
    """Return the path of the self-contained modeling file, which is copied next to every checkpoint."""
    return Path(__file__).with_name("modeling_moesaic.py")


def code_files(config: Mapping[str, Any]) -> dict[str, str]:
    """Name and text of the code that a checkpoint with this config brings along: none where the family is not ours."""
    if base_of(config.get("model_type")) is None:
        return {}
    return {modeling_file().name: modeling_file().read_text(encoding="utf-8")}


_ROUTER_KEYS = (
    "norm_topk_prob", "num_local_experts", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
    "decoder_sparse_step", "mlp_only_layers", "architectures", "auto_map", "model_type",
)  # fmt: skip


def converted_config(
    twin: DenseTwin, config: Mapping[str, Any], *, moe_layers: Sequence[int], num_experts: int
) -> dict[str, Any]:
    """config.json of a native model in our architecture, with plain top-k routing; the caller puts in expert groups.

    Settings that `config` leaves to the family's defaults are written out: the dense model's defaults are others.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = MOE_FAMILIES[config["model_type"]]
    full = CONFIG_MAPPING[family.model_type].from_dict(dict(config)).to_dict()
    if full.get("sliding_window") and "layer_types" not in full and hasattr(CONFIG_MAPPING[twin.base](), "layer_types"):
        # The family has its window in every layer; the dense model asks for the kind of each.
        full["layer_types"] = ["sliding_attention"] * full["num_hidden_layers"]
    own = {
        "num_experts": num_experts,
        "moe_intermediate_size": full[twin.width],
        "num_shared_experts": 0,
        "moe_layers": list(moe_layers),
        "routing_rule": "topk",
        "routing_weighting": "selected" if family.normalises(full) else "all",
        "expert_groups": None,
        "group_score": "max",
        "expert_mlp_bias": False,
    }
    if twin.shared_width is not None and full[twin.shared_width]:
        own |= {"num_shared_experts": 1, "intermediate_size": full[twin.shared_width]}
    kept = {key: value for key, value in full.items() if key not in _ROUTER_KEYS}
    return {**kept, **own, **class_names(twin.base)}
