"""What is switched on at the routers, as plain data: no torch here, so that recipes and records can hold it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moesaic.common.errors import MoesaicError

RULES = {
    "topk": "moesaic.routing.rules:TopK",
    "one_per_group": "moesaic.routing.rules:OnePerGroup",
    "document_pool": "moesaic.routing.pools:DocumentPool",
}
"""Rule -> its class, as text because recipes read this table without torch. A new rule is a class and a line here."""

if TYPE_CHECKING:
    RuleName = str
else:
    RuleName = Literal[tuple(RULES)]

RULES_WORK_ON = "our own architecture, or of a family that is `tested` in the column rules of `moesaic families`"

BalanceScope = Literal["local", "global", "batch", "step"]
PoolDraw = Literal["document_and_layer", "document"]
GroupScore = Literal["max", "mean", "log_mean_exp"]


@dataclass(frozen=True, kw_only=True)
class RuleConfig:
    """The rule that `install` puts on every router of a model."""

    rule: RuleName | None = None
    """`topk`, `one_per_group` (DivMoE, algorithm 1) or `document_pool` (EMO, section 3.2); None: the model's own."""
    pool_size: int | tuple[int, int] | None = None
    """`document_pool`: size d of every pool, or the inclusive range d is drawn from. None is the paper's {K..E}."""
    pool_draw: PoolDraw = "document_and_layer"
    """`document_pool`: a fresh d for each document in each layer, or one d per document for all layers."""
    expert_groups: tuple[int, ...] | None = None
    """`one_per_group`: group of each expert. None takes the model's own; native families have none and need this."""
    group_score: GroupScore | None = None
    """`one_per_group`: score of a group from its experts' logits. None takes the model's own, or `max`."""

    def __post_init__(self) -> None:
        if self.pool_size is not None and self.rule != "document_pool":
            raise MoesaicError(f"pool_size is only for rule: document_pool, not {self.rule or 'the model own rule'}")
        if self.pool_draw != "document_and_layer" and self.rule != "document_pool":
            raise MoesaicError(f"pool_draw is only for rule: document_pool, not {self.rule or 'the model own rule'}")
        if self.rule != "one_per_group" and (self.expert_groups is not None or self.group_score is not None):
            raise MoesaicError("expert_groups and group_score are only for rule: one_per_group")

    def pool_range(self, *, top_k: int, num_experts: int) -> tuple[int, int]:
        """Return the smallest and largest pool size, both included.

        A pool smaller than K has too few experts for a token; one larger than E does not exist (published code draws up
        to 128 of 127 experts, which only gives "no mask" a second ticket).
        """
        size = self.pool_size if self.pool_size is not None else (top_k, num_experts)
        low, high = (size, size) if isinstance(size, int) else size
        if not top_k <= low <= high <= num_experts:
            shown = low if low == high else f"[{low}, {high}]"
            raise MoesaicError(
                f"routing.pool_size: {shown} does not fit {top_k} active of {num_experts} routed experts; "
                f"write a size or an increasing range within [{top_k}, {num_experts}]"
            )
        return low, high

    @staticmethod
    def refuse_groups(groups: object) -> None:
        """Refuse (MoesaicError) pools for a model that has expert groups of its own."""
        if groups is not None:
            raise MoesaicError(
                "routing.rule: document_pool trains a model that routes by plain top-k at inference, but this one has "
                "routing_rule one_per_group; set routing_rule to topk in its config.json first"
            )

    @staticmethod
    def refuse_decision(decision: object) -> None:
        """Refuse (MoesaicError) one_per_group for a router that is more than a softmax of plain logits."""
        if decision is not None:
            raise MoesaicError(
                "routing.rule: one_per_group needs routers with a softmax of plain logits, or our architecture; this "
                "family's have sigmoids, biases, groups or factors: use topk or document_pool"
            )

    def refuse_other_groups(self, own_rule: str) -> None:
        """Refuse (MoesaicError) any rule but its own for a family's router that decides between groups of experts."""
        if (self.rule or own_rule) != own_rule or self.expert_groups is not None or self.group_score is not None:
            raise MoesaicError(
                "routing: this family's own routers choose between the groups that config.json names, and follow no "
                "other rule, groups or score; leave routing.rule, expert_groups and group_score out"
            )


def check_groups(groups: Sequence[int] | None, *, num_experts: int, top_k: int) -> Sequence[int]:
    """The groups that `one_per_group` works with; a MoesaicError where they are missing or do not fit the experts."""
    if groups is None:
        raise MoesaicError(
            "routing.rule: one_per_group needs to know the group of each expert, and this model's config.json has no "
            "expert_groups; give them as routing.expert_groups"
        )
    if len(groups) != num_experts:
        raise MoesaicError(
            f"routing.expert_groups: {len(groups)} entries for {num_experts} experts; name a group for each"
        )
    if len(set(groups)) < top_k:
        raise MoesaicError(
            f"routing.expert_groups: {len(set(groups))} groups, but {top_k} experts per token must come from different "
            "groups; name more groups"
        )
    return groups
