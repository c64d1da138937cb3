"""Claims about a model's life. They are ours: no paper goes the whole way."""

from collections.abc import Sequence

from moesaic_lab.claims.claim import Claim, less, within
from moesaic_lab.rows import Row
from moesaic_lab.tables import where

_NEAR = 0.001
"""Nats per token that count as nothing: float32 rounds differently with other numbers of experts."""


def _at(rows: Sequence[Row], model: str) -> list[Row]:
    return where(rows, measure="measured_loss", model=model)


CLAIMS = (
    Claim(
        says="(ours) dense, upcycled, annealed and grown, a model ends below the dense one on the same tokens",
        place="whole way",
        figure="loss of the short way minus that of the model grown exactly and trained",
        effect=lambda rows: less(_at(rows, "grown exactly, trained"), _at(rows, "short way: dense, same tokens")),
    ),
    Claim(
        says="(ours) growing exactly costs nothing",
        place="methods.md, section 3",
        figure=f"{_NEAR} minus the rise of the loss, grown exactly",
        effect=lambda rows: within(
            _NEAR, _at(rows, "grown exactly, not trained"), _at(rows, "divmoe, annealed with pools")
        ),
        otherwise="not seen",
    ),
    Claim(
        says="(ours) growing exactly ends below growing plainly",
        place="methods.md, section 3",
        figure="loss grown plainly minus loss grown exactly, both trained",
        effect=lambda rows: less(_at(rows, "grown exactly, trained"), _at(rows, "grown plainly, trained")),
    ),
)
