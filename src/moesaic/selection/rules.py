"""Training rules that moesaic.json records (a selection bias, one_per_group, pools) on models that are cut.

`extract` and `expand` only cut the records, so transformers (two seconds) is imported where models are touched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moesaic.checkpoint.record import read_provenance
from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import load_recipe
from moesaic.routing.config import RuleConfig

INSTALLED = "_moesaic_router"
"""The attribute of a router on which `moesaic.routing.install` put a rule."""


def install_recorded(model: nn.Module, folder: Path) -> None:
    """Install the rule of a checkpoint folder's moesaic.json, if there is one, on a model without weights."""
    record = (read_provenance(folder) or {}).get("routing")
    if record is not None:
        from moesaic.routing.install import install

        bias = record["selection_bias"]
        tensor = None if bias is None else torch.tensor(bias, dtype=torch.float32)
        install(model, load_recipe(RuleConfig, record["rule"]), selection_bias=tensor)


def install_cut(router: Any, cut: nn.Module, kept: Sequence[int]) -> None:
    """Put the rule of `router` on `cut`, a router with the rows of some of its experts."""
    from moesaic.routing.install import install

    state = router.__dict__[INSTALLED]
    bias_LE = state.installation.selection_bias
    bias_1C = None if bias_LE is None else bias_LE[state.layer : state.layer + 1, list(kept)]
    rule = cut_rule(asdict(state.installation.config), [kept])
    install(nn.ModuleList([cut]), load_recipe(RuleConfig, rule), selection_bias=bias_1C)


def cut_routing(record: Mapping[str, Any] | None, kept: Sequence[Sequence[int]]) -> dict[str, Any] | None:
    """The `routing` entry of moesaic.json for a model with the kept experts of each MoE layer."""
    if record is None:
        return None
    bias = record["selection_bias"]
    try:
        rows = None if bias is None else [[row[expert] for expert in ids] for row, ids in zip(bias, kept, strict=True)]
        return {"rule": cut_rule(record["rule"], kept), "selection_bias": rows}
    except (ValueError, IndexError) as error:
        raise MoesaicError(
            "moesaic.json: its routing rule is not for this number of layers and experts; it is another checkpoint's"
        ) from error


def cut_rule(rule: Mapping[str, Any], kept: Sequence[Sequence[int]]) -> dict[str, Any]:
    """A `RuleConfig` as plain values for fewer experts: the kept experts' groups, pools no larger than what is left."""
    cut = dict(rule)
    if (groups := rule.get("expert_groups")) is not None:
        rows = {tuple(groups[expert] for expert in ids) for ids in kept}
        if len(rows) > 1:
            raise MoesaicError(
                "selection: the recorded rule one_per_group has one list of groups for all layers, but the kept "
                "experts' groups differ from layer to layer; keep the same groups in each layer"
            )
        cut["expert_groups"] = list(rows.pop())
    if (size := rule.get("pool_size")) is not None:
        most = len(kept[0])
        cut["pool_size"] = min(size, most) if isinstance(size, int) else [min(one, most) for one in size]
    return cut
