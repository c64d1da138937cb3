"""What the makers of models say of their sizes, and the parts of their config.json that decide them."""

from dataclasses import dataclass
from typing import Any, Literal

Convention = Literal["all", "without lookup", "without embeddings"]


@dataclass(frozen=True, kw_only=True)
class Published:
    """A model's total and active parameters in billions as `source` prints them, and what its active figure counts.

    `without lookup`: without the token embedding, of which a token reads one row, but with the output head.
    """

    source: str
    total: str
    active: str
    counts: Convention
    config: dict[str, Any]


def _sizes(hidden: int, layers: int, heads: int, keys: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        **more,
    }


_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

_DEEPSEEK_V3 = {
    "q_lora_rank": 1536, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "num_experts_per_tok": 8, **_MLA,
}  # fmt: skip

_GPT_OSS = {
    "model_type": "gpt_oss", "intermediate_size": 2880, "head_dim": 64, "num_experts_per_tok": 4,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip

PUBLISHED: dict[str, Published] = {
    "DeepSeek-V3": Published(
        source="DeepSeek-V3 Technical Report (arXiv 2412.19437), abstract",
        total="671",
        active="37",
        counts="without lookup",
        config={
            "model_type": "deepseek_v3",
            **_sizes(7168, 61, 128, 128, 129280, first_k_dense_replace=3, n_routed_experts=256, **_DEEPSEEK_V3),
            "num_nextn_predict_layers": 1,
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        },
    ),
    "Kimi-K2": Published(
        source="model card of moonshotai/Kimi-K2-Instruct: 1T, 32B",
        total="1.0e3",
        active="32",
        counts="without lookup",
        config={
            "model_type": "kimi_k2",
            **_sizes(7168, 61, 64, 64, 163840, first_k_dense_replace=1, n_routed_experts=384, **_DEEPSEEK_V3),
        },
    ),
    "DeepSeek-V2": Published(
        source="DeepSeek-V2 (arXiv 2405.04434), abstract",
        total="236",
        active="21",
        counts="without lookup",
        config={
            "model_type": "deepseek_v2",
            **_sizes(5120, 60, 128, 128, 102400, first_k_dense_replace=1, n_routed_experts=160, **_MLA),
            **{"q_lora_rank": 1536, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_shared_experts": 2},
            "num_experts_per_tok": 6,
        },
    ),
    "DeepSeek-V2-Lite": Published(
        source="DeepSeek-V2 (arXiv 2405.04434), appendix B",
        total="15.7",
        active="2.4",
        counts="without lookup",
        config={
            "model_type": "deepseek_v2",
            **_sizes(2048, 27, 16, 16, 102400, first_k_dense_replace=1, n_routed_experts=64, **_MLA),
            **{"q_lora_rank": None, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_shared_experts": 2},
            "num_experts_per_tok": 6,
        },
    ),
    "Mixtral-8x7B": Published(
        source="Mistral AI, 'Mixtral of experts', 11 December 2023",
        total="46.7",
        active="12.9",
        counts="all",
        config={
            "model_type": "mixtral",
            **_sizes(4096, 32, 32, 8, 32000, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2),
        },
    ),
    "Mixtral-8x22B": Published(
        source="Mistral AI, 'Cheaper, better, faster, stronger', 17 April 2024",
        total="141",
        active="39",
        counts="all",
        config={
            "model_type": "mixtral",
            **_sizes(6144, 56, 48, 8, 32768, intermediate_size=16384, num_local_experts=8, num_experts_per_tok=2),
        },
    ),
    "Qwen3-30B-A3B": Published(
        source="model card of Qwen/Qwen3-30B-A3B: 30.5B, 3.3B",
        total="30.5",
        active="3.3",
        counts="all",
        config={
            "model_type": "qwen3_moe",
            **_sizes(2048, 48, 32, 4, 151936, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8),
            "head_dim": 128,
        },
    ),
    "Qwen3-235B-A22B": Published(
        source="model card of Qwen/Qwen3-235B-A22B: 235B, 22B",
        total="235",
        active="22",
        counts="all",
        config={
            "model_type": "qwen3_moe",
            **_sizes(4096, 94, 64, 4, 151936, moe_intermediate_size=1536, num_experts=128, num_experts_per_tok=8),
            "head_dim": 128,
        },
    ),
    "gpt-oss-20b": Published(
        source="gpt-oss model card (arXiv 2508.10925), table 1: 20.91B, 3.61B",
        total="20.91",
        active="3.61",
        counts="without lookup",
        config={**_GPT_OSS, **_sizes(2880, 24, 64, 8, 201088, num_local_experts=32)},
    ),
    "gpt-oss-120b": Published(
        source="gpt-oss model card (arXiv 2508.10925), table 1: 116.83B, 5.13B",
        total="116.83",
        active="5.13",
        counts="without lookup",
        config={**_GPT_OSS, **_sizes(2880, 36, 64, 8, 201088, num_local_experts=128)},
    ),
    "OLMoE-1B-7B": Published(
        source="OLMoE (arXiv 2409.02060), section 2: 6.9B, 1.3B",
        total="6.9",
        active="1.3",
        counts="all",
        config={
            "model_type": "olmoe",
            **_sizes(2048, 16, 16, 16, 50304, intermediate_size=1024, num_experts=64, num_experts_per_tok=8),
        },
    ),
    "Qwen1.5-MoE-A2.7B": Published(
        source="model card of Qwen/Qwen1.5-MoE-A2.7B: 14.3B, 2.7B",
        total="14.3",
        active="2.7",
        counts="all",
        config={
            "model_type": "qwen2_moe",
            **_sizes(2048, 24, 16, 16, 151936, moe_intermediate_size=1408, num_experts=60, num_experts_per_tok=4),
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "Qwen2-57B-A14B": Published(
        source="Qwen2 Technical Report (arXiv 2407.10671): 57B, 14B",
        total="57",
        active="14",
        counts="all",
        config={
            "model_type": "qwen2_moe",
            **_sizes(3584, 28, 28, 4, 151936, moe_intermediate_size=2560, num_experts=64, num_experts_per_tok=8),
            "shared_expert_intermediate_size": 20480,
        },
    ),
    "Granite-3.0-3B-A800M": Published(
        source="model card of ibm-granite/granite-3.0-3b-a800m-base: 3.3B, 800M",
        total="3.3",
        active="0.8",
        counts="without embeddings",
        config={
            "model_type": "granitemoe",
            **_sizes(1536, 32, 24, 8, 49155, intermediate_size=512, num_local_experts=40, num_experts_per_tok=8),
            "tie_word_embeddings": True,
        },
    ),
    "Granite-3.0-1B-A400M": Published(
        source="model card of ibm-granite/granite-3.0-1b-a400m-base: 1.3B, 400M",
        total="1.3",
        active="0.4",
        counts="without embeddings",
        config={
            "model_type": "granitemoe",
            **_sizes(1024, 24, 16, 8, 49155, intermediate_size=512, num_local_experts=32, num_experts_per_tok=8),
            "tie_word_embeddings": True,
        },
    ),
    "Phi-3.5-MoE": Published(
        source="model card of microsoft/Phi-3.5-MoE-instruct: 42B (Phi-3 report: 41.9B), 6.6B",
        total="41.9",
        active="6.6",
        counts="all",
        config={
            "model_type": "phimoe",
            **_sizes(4096, 32, 32, 8, 32064, intermediate_size=6400, num_local_experts=16, num_experts_per_tok=2),
            **{"attention_bias": True, "lm_head_bias": True},
        },
    ),
    "MiniMax-M2": Published(
        source="model card of MiniMaxAI/MiniMax-M2: 230B, 10B",
        total="23e1",
        active="10",
        counts="without lookup",
        config={
            "model_type": "minimax_m2",
            **_sizes(3072, 62, 48, 8, 200064, intermediate_size=1536, num_local_experts=256, num_experts_per_tok=8),
            "head_dim": 128,
        },
    ),
    "dots.llm1": Published(
        source="dots.llm1 (arXiv 2506.05767), abstract: 142B, 14B",
        total="142",
        active="14",
        counts="all",
        config={
            "model_type": "dots1",
            **_sizes(4096, 62, 32, 32, 152064, first_k_dense_replace=1, n_routed_experts=128, n_shared_experts=2),
            **{"intermediate_size": 10944, "moe_intermediate_size": 1408, "num_experts_per_tok": 6, "head_dim": 128},
        },
    ),
}
