"""A tiny configuration of any causal MoE family of transformers, by what its keys are called.

Building a model from it takes milliseconds, and shows how the family is made (`derive`). A key that a family does not
have is left out; a number that depends on another (MLA has as many key heads as heads) is in `_GIVEN`. Needs
transformers.
"""

from collections.abc import Mapping
from typing import Any

EXPERTS, TOP_K, HIDDEN = 8, 2, 32

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of the number of routed experts, in all families."""

TOP_K_KEYS = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts",
    "experts_per_token",
)  # fmt: skip
"""Keys of the number of active experts."""

GROUP_KEYS = (("n_group", "num_expert_group"), ("topk_group",))
"""Keys of the number of groups of group-limited selection, and of the groups that a token may use."""


def _of(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


_SIZES: Mapping[str, Any] = {
    **dict.fromkeys(EXPERT_KEYS, EXPERTS),
    **dict.fromkeys(TOP_K_KEYS, TOP_K),
    **_of(96, "vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
    **_of(HIDDEN, "hidden_size ple_embed_dim router_hidden_size embed_dim"),
    **_of(48, "intermediate_size dense_intermediate_size prefix_dense_intermediate_size dense_mlp_intermediate_size"),
    **_of(16, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"),
    **_of(16, "shared_experts_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size"),
    **_of(2, "num_hidden_layers moe_layer_end_index num_key_value_heads linear_num_key_heads swa_num_key_value_heads"),
    **_of(2, "topk_group"),
    **_of(4, "num_attention_heads linear_num_heads linear_num_value_heads mamba_num_heads index_n_heads"),
    **_of(4, "n_group num_expert_group index_topk mamba_n_heads mamba_dt_rank o_groups hidden_size_per_layer_input"),
    **_of(4, "split_ngram_parts make_ngram_vocab_size_divisible_by"),
    **_of(8, "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim linear_head_dim linear_key_head_dim"),
    **_of(8, "linear_value_head_dim mamba_head_dim index_head_dim swa_head_dim swa_v_head_dim"),
    **_of(8, "rotary_dim global_head_dim sliding_window chunk_size block_size mamba_chunk_size index_block_size"),
    **_of(16, "kv_lora_rank q_lora_rank o_lora_rank hc_lowrank gated_norm_rank ssm_state_size mamba_d_state"),
    **_of(16, "mamba_d_head"),
    **_of(128, "max_position_embeddings model_max_length"),
    **_of(100, "ngram_vocab_size_base"),
    **_of(1, "first_k_dense_replace num_dense_layers moe_layer_start_index mamba_n_groups n_groups bos_token_id"),
    **_of(1, "moe_layer_interval"),
    "enable_moe_block": True,
    "pad_token_id": 0,
    "eos_token_id": 2,
}

_UNSET_MEANS_WITHOUT = ("q_lora_rank", "index_head_dim", "sliding_window")
"""Keys whose null says that a family has no such thing; they stay null."""

_GIVEN: Mapping[str, tuple[str, Any]] = {
    "kv_lora_rank": ("num_key_value_heads", 4),
    "conv_L_cache": ("layer_types", ["conv", "full_attention"]),
    "cca_time0": ("num_experts_per_tok", 1),
    "mlp_only_layers": ("mlp_only_layers", [0]),
    "mlp_layer_types": ("mlp_layer_types", ["dense", "sparse"]),
    "compress_rates": ("mlp_layer_types", ["hash_moe", "moe"]),
}
"""Where a family has the first key, the second one has this value: MLA's heads, LFM2's layers, ZAYA's one expert, and
a dense layer for those that name them."""


def tiny_config(model_type: str, **values: Any) -> Any:
    """A tiny configuration of a family: 8 experts, 2 active, hidden size 32, 2 layers; `values` take precedence.

    Raises:
        ValueError and others of transformers: the family has checks that a tiny model does not pass.
    """
    from transformers import AutoConfig

    plain = AutoConfig.for_model(model_type)
    given = plain.to_dict()
    renamed = getattr(type(plain), "attribute_map", {})
    known = {**given, **{alias: given.get(name) for alias, name in renamed.items()}}
    sizes = {key: value for key, value in _SIZES.items() if _applies(key, given, renamed)}
    if given.get("n_shared_experts", 0) is None:
        sizes["n_shared_experts"] = 1
    if known.get("num_key_value_heads") == known.get("num_attention_heads"):
        sizes["num_key_value_heads"] = 4
    for key, (then, value) in _GIVEN.items():
        if key in known and then in known:
            sizes[then] = value
    return AutoConfig.for_model(model_type, **{**sizes, **values})


def _applies(key: str, given: Mapping[str, Any], renamed: Mapping[str, str]) -> bool:
    """Whether a family has a key, under its own name rather than an alias of another one that is set too."""
    if key not in given:
        return key in renamed and renamed[key] not in _SIZES
    return not (given[key] is None and (key in _UNSET_MEANS_WITHOUT))
