"""The specialists that a target was made from, where they are still what they were then (no torch)."""

from collections.abc import Mapping, Sequence
from typing import Any

from moesaic.checkpoint.record import PROVENANCE_FILE, fingerprint, weights_hash
from moesaic.checkpoint.source import open_checkpoint
from moesaic.checkpoint.streaming import scan
from moesaic.common.errors import MoesaicError
from moesaic.families.dense import DenseModel, detect
from moesaic.verifying.claim import Claim


def open_specialists(claim: Claim, base: DenseModel) -> tuple[list[DenseModel] | None, list[str]]:
    """Open the base and the specialists that a statement is about.

    Returns:
        The models, or None where there are none or they cannot be compared with; and notes that say why not.
    """
    if claim.recipe is None or not claim.recipe.specialists:
        return None, []
    models = [base]
    try:
        for one, record in zip(claim.recipe.specialists, claim.specialist_records, strict=True):
            model = detect(open_checkpoint(one.path))
            _refuse_another(base, model, record, claim.moe_layers)
            models.append(model)
    except MoesaicError as error:
        return None, [f"the experts could not be compared with the specialists' own files: {error}"]
    return models, []


def _refuse_another(
    base: DenseModel, specialist: DenseModel, record: Mapping[str, Any], moe_layers: Sequence[int]
) -> None:
    """Refuse a model of another shape than the base, or with other weights than `upcycle` read."""
    name = specialist.checkpoint.name
    for key in ("hidden", "intermediate", "num_layers", "activation", "ffn_bias"):
        ours, theirs = getattr(base, key), getattr(specialist, key)
        if ours != theirs:
            raise MoesaicError(f"{name} is another model than the base: {key} is {theirs} there and {ours} in the base")
    if not _has_recorded_weights(specialist, record, moe_layers):
        raise MoesaicError(
            f"the weights of {name} are not those that {PROVENANCE_FILE} records for it: they have changed, or this is "
            "another model"
        )


def _has_recorded_weights(specialist: DenseModel, record: Mapping[str, Any], moe_layers: Sequence[int]) -> bool:
    """Whether a specialist has the weights whose hash was recorded; also where that cannot be told.

    The hash is of the whole checkpoint where all of it went into the target. Otherwise it is of what was used, which
    can be told again where that was the FFNs alone.
    """
    if record.get("weights_hash") is not None:
        return fingerprint(specialist.checkpoint) == record["weights_hash"]
    parts = [part for layer in moe_layers for part in specialist.ffns[layer].parts().values()]
    used = {info.name: info for part in parts for info in part.sources}
    if record.get("used_tensors") != len(used):
        return True
    hashes = scan(used.values(), 1, allow_nonfinite=True)
    return weights_hash((i.name, i.dtype, i.shape, hashes[i.name]) for i in used.values()) == record["used_hash"]
