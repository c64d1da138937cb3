"""From a recipe to an `UpcyclePlan`: opens the headers and refuses everything that cannot work. No torch."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from moesaic.checkpoint.config_file import ROPE_KEYS, rope_parameters
from moesaic.checkpoint.headers import TensorInfo
from moesaic.checkpoint.source import Checkpoint, file_inside, open_checkpoint
from moesaic.checkpoint.writer import Layout, OutputTensor, parse_size, plan_files
from moesaic.common.errors import MoesaicError
from moesaic.common.files import load_json
from moesaic.common.layer_ranges import parse_layers
from moesaic.families.counting import config_shapes, layer_of
from moesaic.families.dense import DenseModel, detect
from moesaic.modeling.names import class_names
from moesaic.upcycling.choices import Choices, LayerSpec, choose
from moesaic.upcycling.recipe import SharedWeights, Specialist, UpcycleRecipe

BASE = 0
"""Number of the base among the sources; specialist i is source i + 1."""

DTYPE_NAMES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""safetensors code -> the name that config.json uses."""

_DTYPE_CODES = {name: code for code, name in DTYPE_NAMES.items()}

_HALF = (
    "--dtype float16: weights that do not fit it are refused, but what a layer puts out can still be above 65,504; "
    "`moesaic verify` runs a float16 result in float16 too and names the layer"
)
_STALE = ("torch_dtype", "_name_or_path", "auto_map")
"""Keys of the base's config that would say something wrong about the result."""


@dataclass(frozen=True, kw_only=True)
class UpcyclePlan:
    """A recipe and its checkpoints, resolved and checked: nothing can be refused any more but the weights' values."""

    recipe: UpcycleRecipe
    """With every default filled in: running it again gives the same bytes."""
    base: DenseModel
    specialists: tuple[DenseModel, ...]
    layer: LayerSpec
    shared_weights: SharedWeights
    moe_layers: tuple[int, ...]
    dtype: str
    """safetensors code of the result's weights."""
    config: dict[str, Any]
    """config.json of the result."""
    outputs: tuple[OutputTensor, ...]
    """The result's tensors, layer by layer."""
    notices: tuple[str, ...]

    @cached_property
    def files(self) -> Layout:
        """Names, sizes and headers of the weight files."""
        return plan_files(self.outputs, parse_size(self.recipe.shard_size))

    @property
    def models(self) -> tuple[DenseModel, ...]:
        """All sources: the base, then the specialists."""
        return (self.base, *self.specialists)

    @property
    def expert_sources(self) -> tuple[int, ...]:
        """Numbers of the sources that experts come from."""
        return tuple(range(BASE + 1, len(self.models))) or (BASE,)

    @property
    def ffn_sources(self) -> tuple[int, ...]:
        """Numbers of the sources whose FFNs are used: for experts, and the base's for shared experts."""
        return tuple(sorted({*self.expert_sources, *([BASE] if self.layer.shared_experts else [])}))


def resolve(recipe: UpcycleRecipe, opener: Callable[[str], Checkpoint] = open_checkpoint) -> UpcyclePlan:
    """Open the sources' headers, fill in every default and check that everything fits together.

    Args:
        recipe: what the user asks for.
        opener: `open_checkpoint`, or `open_headers` where no weights are needed.

    Raises:
        MoesaicError: anything that the conversion could stumble over, except the values of the weights.
    """
    parse_size(recipe.shard_size)
    base = detect(opener(recipe.base))
    chosen = choose(
        recipe,
        hidden=base.hidden,
        intermediate=base.intermediate,
        biases=base.ffn_bias,
        initializer_range=float(base.config.get("initializer_range") or 0.02),
    )
    moe_layers = parse_layers(recipe.layers, base.num_layers)
    notices = [*base.checkpoint.dequantised, *base.notices, *chosen.notices]
    specialists = []
    for specialist in recipe.specialists:
        model = _open_specialist(specialist, opener)
        notices += [*model.checkpoint.dequantised, *model.notices, *compare(base, model, specialist.name)]
        specialists.append(model)
    dtype = base.dtype if recipe.dtype == "auto" else _DTYPE_CODES[recipe.dtype]
    if dtype not in DTYPE_NAMES:
        raise MoesaicError(f"{base.checkpoint.name}: its weights are {dtype}; convert them to bf16, fp16 or fp32 first")
    if dtype == "F16" != base.dtype:
        notices.append(_HALF)
    config = result_config(base, chosen.layer, moe_layers, dtype)
    # With `--dtype auto` a tensor that is carried over keeps its own dtype (fp32 norms in a bf16 model, say).
    own = {name: info.dtype for name, info in dense_tensors(base, moe_layers).items()} if recipe.dtype == "auto" else {}
    return UpcyclePlan(
        recipe=_filled_in(recipe, base, tuple(specialists), chosen),
        base=base,
        specialists=tuple(specialists),
        layer=chosen.layer,
        shared_weights=chosen.shared_weights,
        moe_layers=moe_layers,
        dtype=dtype,
        config=config,
        outputs=output_tensors(config, dtype, own),
        notices=tuple(notices),
    )


def _open_specialist(specialist: Specialist, opener: Callable[[str], Checkpoint]) -> DenseModel:
    try:
        return detect(opener(specialist.path))
    except MoesaicError as error:
        raise MoesaicError(f"--specialist {specialist.name}: {error}") from error


def _filled_in(
    recipe: UpcycleRecipe, base: DenseModel, specialists: tuple[DenseModel, ...], chosen: Choices
) -> UpcycleRecipe:
    """The recipe that gives the same bytes with nothing left to defaults, hub revisions pinned."""
    layer = chosen.layer
    pinned = zip(recipe.specialists, specialists, strict=True)
    return replace(
        recipe,
        base=_pinned(recipe.base, base.checkpoint),
        specialists=tuple(replace(spec, path=_pinned(spec.path, model.checkpoint)) for spec, model in pinned),
        experts=layer.experts,
        shards=layer.shards,
        top_k=layer.top_k,
        routing=layer.routing,
        weighting=layer.weighting,
        router_init=layer.router_init,
        scale=chosen.scale,
        shared_weights=chosen.shared_weights,
    )


def _pinned(reference: str, checkpoint: Checkpoint) -> str:
    if checkpoint.revision is None:
        return reference
    return f"{reference.split('@')[0]}@{checkpoint.revision}"


# --- the result -------------------------------------------------------------------------------------------------------


def result_config(base: DenseModel, layer: LayerSpec, moe_layers: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """config.json of the result: the base's text config under the MoE architecture's names, and the MoE keys."""
    kept = {key: value for key, value in base.config.items() if key not in _STALE}
    return {
        **kept,
        **class_names(base.family.model_type),
        "dtype": DTYPE_NAMES[dtype],
        "num_experts": layer.experts,
        "num_experts_per_tok": layer.top_k,
        "moe_intermediate_size": layer.expert.intermediate,
        "num_shared_experts": layer.shared_experts,
        "moe_layers": list(moe_layers),
        "routing_rule": layer.routing,
        "routing_weighting": layer.weighting,
        "routed_scaling_factor": layer.factors.weights,
        "expert_groups": None if layer.groups is None else list(layer.groups),
        "group_score": "max",
        "expert_mlp_bias": base.ffn_bias,
    }


def output_tensors(config: dict[str, Any], dtype: str, own_dtypes: dict[str, str]) -> tuple[OutputTensor, ...]:
    """The tensors of the result, layer by layer; `own_dtypes` names those that keep another dtype."""
    shapes = config_shapes(config)
    layers = int(config["num_hidden_layers"])
    names = sorted(shapes, key=lambda name: _place(name, layers))
    return tuple(OutputTensor(name=name, dtype=own_dtypes.get(name, dtype), shape=shapes[name]) for name in names)


def _place(name: str, layers: int) -> int:
    """Embedding first, then the layers, then what follows them; the sort is stable within a layer."""
    layer = layer_of(name)
    if layer is not None:
        return layer
    return -1 if "embed" in name else layers


def dense_tensors(model: DenseModel, moe_layers: tuple[int, ...]) -> dict[str, TensorInfo]:
    """The stored tensors of a dense model outside the FFNs of `moe_layers`, by canonical name."""
    family = model.family
    modules = {
        "gate": family.fused_gate_up or family.gate,
        "up": family.fused_gate_up or family.up,
        "down": family.down,
    }
    found = dict(model.others)
    for index in sorted(set(range(model.num_layers)) - set(moe_layers)):
        for part, value in model.ffns[index].parts().items():
            kind = "bias" if "bias" in part else "weight"
            found[f"model.layers.{index}.{modules[part.partition('_')[0]]}.{kind}"] = value.sources[0]
    return found


# --- is a specialist the base trained further? ------------------------------------------------------------------------

_MEANINGLESS = frozenset(
    {
        "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache",
        "_attn_implementation", "output_attentions", "output_hidden_states", "return_dict", "initializer_range",
        "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "id2label", "label2id", "problem_type",
        "chunk_size_feed_forward", "is_encoder_decoder", "pretraining_tp", "task_specific_params", "unsloth_version",
        "unsloth_fixed", "cache_implementation",
    }
)  # fmt: skip
"""Config keys that change neither what the weights mean nor what the model computes at inference."""

_BASE_WINS = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""Keys that may differ: the result takes the base's, and that is said."""


def compare(base: DenseModel, specialist: DenseModel, name: str) -> list[str]:
    """Return one sentence for each difference that is allowed.

    Args:
        base: the base.
        specialist: the specialist.
        name: how messages call the specialist.

    Raises:
        MoesaicError: fields of the config or the tokenizers differ; every one that does is named.
    """
    ours, theirs = _comparable(base.config), _comparable(specialist.config)
    who = f"--specialist {name} ({specialist.checkpoint.name})"
    if ours["model_type"] != theirs["model_type"]:
        raise MoesaicError(
            f"{who}: is a {theirs['model_type']} model and the base is {ours['model_type']}; every specialist must be "
            "the base trained further"
        )
    both = ours.keys() & theirs.keys()
    differing = [f"{key} is {_show(theirs[key])} and in the base {_show(ours[key])}" for key in sorted(both)
                 if ours[key] != theirs[key] and key not in _BASE_WINS]  # fmt: skip
    if differing:
        raise MoesaicError(f"{who}: its config.json differs from the base's: {'; '.join(differing)}")
    notices = [
        f"{who}: {key} is {_show(theirs[key])}, the result keeps the base's {_show(ours[key])}"
        for key in _BASE_WINS
        if key in both and ours[key] != theirs[key]
    ]
    one_sided = sorted(key for key in ours.keys() ^ theirs.keys() if not _trivial((ours | theirs)[key]))
    if one_sided:
        notices.append(f"{who}: only one of its config.json and the base's names {', '.join(one_sided)}")
    if specialist.dtype != base.dtype:
        notices.append(f"{who}: its weights are {specialist.dtype} and the base's {base.dtype}")
    return notices + compare_tokenizers(base.checkpoint.path, specialist.checkpoint.path, who)


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that matter, the many spellings of the same rope made one, derived sizes written out."""
    kept = {key: value for key, value in config.items() if key not in _MEANINGLESS and key not in ROPE_KEYS}
    heads = int(config["num_attention_heads"])
    kept["num_key_value_heads"] = config.get("num_key_value_heads") or heads
    kept["head_dim"] = config.get("head_dim") or int(config["hidden_size"]) // heads
    return kept | {f"rope {key}": value for key, value in _rope(config).items()}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rope as one flat dict, from transformers 5 (`rope_parameters`) or 4 (`rope_theta`, `rope_scaling`)."""
    parameters = rope_parameters(config)
    flat: dict[str, Any] = {}
    for key, value in parameters.items():
        flat |= {f"{key} {inner}": item for inner, item in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _trivial(value: Any) -> bool:
    """Whether a key that only one config has says what leaving it out says."""
    return value is None or value is False or value in ([], {})


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- tokenizers -------------------------------------------------------------------------------------------------------

_TOKENIZER_SECTIONS = ("model", "added_tokens", "normalizer", "pre_tokenizer")
_PLAIN_FILES = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")


def compare_tokenizers(base: Path, specialist: Path, who: str) -> list[str]:
    """Compare tokenizer.json by content where both have one, else the vocabulary files byte by byte.

    Raises:
        MoesaicError: the two give different token ids; the first difference is named.
    """
    ours, theirs = _tokenizer_files(base), _tokenizer_files(specialist)
    if not theirs:
        return [f"{who}: has no tokenizer, so it could not be compared with the base's"] if ours else []
    if not ours:
        return [f"{who}: has a tokenizer and the base has none; the result gets none"]
    shared = [name for name in ours if name in theirs]
    if not shared:
        return [f"{who}: its tokenizer ({theirs[0]}) and the base's ({ours[0]}) are different files and not compared"]
    for name in shared[:1] if shared[0] == "tokenizer.json" else shared:
        first, second = (file_inside(folder, name, told_by=str(folder)) for folder in (base, specialist))
        if first.read_bytes() == second.read_bytes():
            continue
        difference = _json_difference(first, second) if name == "tokenizer.json" else "its content"
        if difference:
            raise MoesaicError(
                f"{who}: its {name} differs from the base's in {difference}; the experts would see other token ids"
            )
    return []


def _tokenizer_files(folder: Path) -> list[str]:
    return [name for name in ("tokenizer.json", *_PLAIN_FILES) if (folder / name).exists()]


def _json_difference(first: Path, second: Path) -> str | None:
    """Name the first difference that changes token ids; None where the two tokenizers are the same."""
    ours, theirs = load_json(first), load_json(second)
    vocabularies = [_vocabulary(tokenizer) for tokenizer in (ours, theirs)]
    if vocabularies[0] != vocabularies[1]:
        tokens = sorted(dict(vocabularies[0].items() ^ vocabularies[1].items()))
        token = tokens[0]
        ids = [vocabulary.get(token, "missing") for vocabulary in vocabularies]
        return f"{len(tokens)} tokens of the vocabulary ({token!r} is {ids[1]}, in the base {ids[0]})"
    return next((key for key in _TOKENIZER_SECTIONS if _normal(ours.get(key)) != _normal(theirs.get(key))), None)


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Token -> id, added tokens included."""
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # unigram: (token, score) pairs
        vocabulary = {str(pair[0]): index for index, pair in enumerate(vocabulary)}
    return {**vocabulary, **{str(token["content"]): token["id"] for token in tokenizer.get("added_tokens") or []}}


def _normal(section: Any) -> Any:
    """Merges are written as "a b" or as ["a", "b"]; absent and null options mean the same."""
    if isinstance(section, dict):
        kept = {key: _normal(value) for key, value in section.items() if value is not None}
        if "merges" in kept:
            kept["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in section["merges"]]
        return kept
    return [_normal(item) for item in section] if isinstance(section, list) else section
