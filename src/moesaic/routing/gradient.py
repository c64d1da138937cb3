"""What the text's loss can teach a router, told from a layer's choices before anything runs. No torch."""

from dataclasses import dataclass
from typing import Literal

RouterGradient = Literal["full", "within groups", "none"]
"""What a router can learn from: all of its choices, those among the members of one group, nothing."""


@dataclass(frozen=True, kw_only=True)
class RouterChoices:
    """What decides whether a router has a gradient."""

    weighting: str
    """`selected`, `all` or `sigmoid`."""
    experts: int
    """E."""
    top_k: int
    """K."""
    tied: int = 1
    """Experts that share each router row and compete under plain top-k (M for tied rows); 1 where rows differ."""
    copies: bool = False
    """All experts are equal and all rows too, so that the same K experts get every token."""


def router_gradient(choices: RouterChoices) -> RouterGradient:
    """What the gradient by a router's logits can be at the first step, whatever the text is.

    A layer computes `y = f * sum over selected j of w_j E_j(x)`; the choice itself has no gradient, the weights have.
    With g the gradient of the loss by y, S the K selected experts and `<g, E_j>` the worth of what expert j puts out:

        selected, sigmoid:  dL/dl_j = f w_j d_j (<g, E_j> - sum over k in S of w_k <g, E_k>)    for j in S, else 0
        all:                dL/dl_j = f w_j ([j in S] <g, E_j> - sum over k in S of w_k <g, E_k>)     for every j

    with d_j = 1 (`sigmoid`: 1 - sigmoid(l_j)). So with renormalised weights and K = 1 (w = 1) everything cancels: none.
    Where all of S are members of one group whose rows are equal (w_j and d_j too), the sum over the group cancels: its
    rows learn to differ, but no group learns to be chosen. Where all experts are copies that get the same tokens with
    the same weights, `<g, E_j>` is the same number for all of S, now and after any number of steps: none. And the
    softmax over one expert is 1.
    """
    if choices.experts == 1:
        return "none"
    if choices.weighting == "all":
        return "full"
    if choices.top_k == 1 or choices.copies:
        return "none"
    return "within groups" if choices.top_k <= choices.tied < choices.experts else "full"


def gradient_warning(choices: RouterChoices) -> str | None:
    """One line for people, with the cure; None where all choices have a gradient."""
    gradient, start = router_gradient(choices), "the text's loss has no gradient"
    if gradient == "full":
        return None
    if gradient == "within groups":
        cure = "weighting all"
        if 2 * choices.tied <= choices.experts:
            cure += f", or {2 * choices.tied} active experts"
        return (
            f"{start} between groups: a token uses {choices.top_k} experts of one group of {choices.tied} with equal "
            f"router rows, and their weights sum to 1 whichever group it is, so no group can learn to be chosen; use "
            f"{cure}"
        )
    if choices.experts == 1:
        return f"{start} for the routers: there is one expert to choose from; use 2 or more"
    if choices.top_k == 1:
        return (
            f"{start} for the routers: a token uses one expert, whose weight is 1 whichever it is (weighting "
            f"{choices.weighting}); use weighting all, or 2 active experts"
        )
    return (
        f"{start} for the routers: all experts are equal, and with equal router rows they stay so; use random router "
        "rows, or weighting all"
    )
