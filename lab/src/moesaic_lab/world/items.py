"""What every generated domain is made of: questions with a worked answer that can be checked, and their split."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

HELD_OUT_SHARE = 0.1
"""Share of all possible questions that training text never contains."""
_WRONG = 3


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question."""

    question: str
    answer: str
    worked: str
    """The way from the question to the answer, as text; may be empty."""
    wrong: tuple[str, ...]
    """Plausible wrong answers, all different from the answer and from each other."""

    def __post_init__(self) -> None:
        assert len({self.answer, *self.wrong}) == 1 + len(self.wrong), f"answers repeat: {self}"

    @property
    def is_held_out(self) -> bool:
        """Whether the question belongs to the held-out part: a function of its words alone."""
        return xxhash.xxh3_64_intdigest(self.question.encode()) < HELD_OUT_SHARE * 2**64


Draw = Callable[[random.Random], Item]
"""Draws one item of a domain."""


def draw_item(draw: Draw, rng: random.Random, *, held_out: bool) -> Item:
    """The next item that belongs to the wanted part."""
    while True:
        item = draw(rng)
        if item.is_held_out == held_out:
            return item


def wrong_numbers(rng: random.Random, right: int) -> tuple[str, ...]:
    """Numbers near the right one, as people get them wrong: off by a little, a digit or a sign."""
    offsets = [1, -1, 2, -2, 10, -10, 9, -9, 11, 5, -5, 20]
    rng.shuffle(offsets)
    return tuple(str(right + offset) for offset in offsets[:_WRONG])


def wrong_choices(rng: random.Random, right: str, others: list[str]) -> tuple[str, ...]:
    """Other members of the right answer's kind."""
    return tuple(rng.sample(sorted(set(others) - {right}), _WRONG))
