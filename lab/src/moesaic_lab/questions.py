"""Questions of the generated domains, with worked answers that can be checked: what one is, arithmetic and programs."""

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


_THINGS = ("apples", "coins", "stones", "books", "eggs", "cards", "nails", "seeds", "cups", "ropes", "shells", "pears")
_UNITS = ("metres", "grams", "litres", "minutes", "miles", "steps")


def _sum(rng: random.Random, question: str, answer: int, worked: str) -> Item:
    return Item(question=question, answer=str(answer), worked=worked, wrong=wrong_numbers(rng, answer))


def _addition(rng: random.Random) -> Item:
    a, b = rng.randint(11, 999), rng.randint(11, 999)
    tens = a + b // 10 * 10
    return _sum(rng, f"What is {a} + {b}?", a + b, f"{a} + {b // 10 * 10} = {tens}. {tens} + {b % 10} = {a + b}.")


def _subtraction(rng: random.Random) -> Item:
    b = rng.randint(11, 499)
    a = b + rng.randint(5, 499)
    tens = a - b // 10 * 10
    return _sum(rng, f"What is {a} - {b}?", a - b, f"{a} - {b // 10 * 10} = {tens}. {tens} - {b % 10} = {a - b}.")


def _product(rng: random.Random) -> Item:
    a, b = rng.randint(12, 99), rng.randint(3, 9)
    tens, ones = a // 10 * 10 * b, a % 10 * b
    worked = f"{a // 10 * 10} * {b} = {tens}. {a % 10} * {b} = {ones}. {tens} + {ones} = {a * b}."
    return _sum(rng, f"What is {a} * {b}?", a * b, worked)


def _equation(rng: random.Random) -> Item:
    x, factor, shift = rng.randint(2, 40), rng.randint(2, 9), rng.randint(1, 60)
    total = factor * x + shift
    worked = f"{factor}x = {total} - {shift} = {total - shift}. x = {total - shift} / {factor} = {x}."
    return _sum(rng, f"Solve {factor}x + {shift} = {total} for x.", x, worked)


def _two_sides(rng: random.Random) -> Item:
    x, small, more, shift = rng.randint(2, 30), rng.randint(2, 6), rng.randint(1, 5), rng.randint(1, 40)
    large, right = small + more, more * x + shift
    worked = f"{large}x - {small}x = {right} - {shift}. {more}x = {right - shift}. x = {x}."
    return _sum(rng, f"Solve {large}x + {shift} = {small}x + {right} for x.", x, worked)


def _sequence(rng: random.Random) -> Item:
    start, step = rng.randint(1, 90), rng.randint(2, 25)
    terms = [start + index * step for index in range(4)]
    shown = ", ".join(map(str, terms))
    return _sum(rng, f"Which number follows {shown}?", terms[-1] + step, f"Each is {step} more. {terms[-1]} + {step}.")


def _sharing(rng: random.Random) -> Item:
    each, people, thing = rng.randint(3, 40), rng.randint(2, 9), rng.choice(_THINGS)
    total = each * people
    question = f"{people} children share {total} {thing} equally. How many {thing} does each get?"
    return _sum(rng, question, each, f"{total} / {people} = {each}.")


def _rate(rng: random.Random) -> Item:
    rate, first, second, unit = rng.randint(3, 60), rng.randint(2, 9), rng.randint(2, 9), rng.choice(_UNITS)
    question = f"A machine uses {rate * first} {unit} in {first} runs. How many {unit} does it use in {second} runs?"
    worked = f"One run uses {rate * first} / {first} = {rate} {unit}. {rate} * {second} = {rate * second}."
    return _sum(rng, question, rate * second, worked)


def _remainder(rng: random.Random) -> Item:
    by, times, rest = rng.randint(3, 12), rng.randint(4, 60), rng.randint(0, 2)
    total = by * times + rest
    worked = f"{by} * {times} = {by * times}. {total} - {by * times} = {rest}."
    return _sum(rng, f"What is the remainder of {total} divided by {by}?", rest, worked)


_CALCULATIONS = (_addition, _subtraction, _product, _equation, _two_sides, _sequence, _sharing, _rate, _remainder)


def draw_arithmetic(rng: random.Random) -> Item:
    """One question of any kind."""
    return rng.choice(_CALCULATIONS)(rng)


_NAMES = ("a", "b", "count", "total", "n", "size", "value", "left", "width", "score", "rest", "limit")
_FUNCTIONS = ("grow", "shift", "double", "scale", "mix", "apply", "change", "step")
_WORDS = ("lamp", "river", "stone", "paper", "cloud", "garden", "bottle", "window", "silver", "orange", "marble")


def _code(rng: random.Random, lines: list[str], printed: str | int, worked: str, wrong: tuple[str, ...] = ()) -> Item:
    code = "\n".join(lines)
    wrong = wrong or wrong_numbers(rng, int(printed))
    return Item(question=f"What does this program print?\n{code}", answer=str(printed), worked=worked, wrong=wrong)


def _assignments(rng: random.Random) -> Item:
    first, second = rng.sample(_NAMES, 2)
    a, b, c = rng.randint(2, 50), rng.randint(2, 50), rng.randint(2, 9)
    lines = [f"{first} = {a}", f"{second} = {first} + {b}", f"{first} = {second} * {c}", f"print({first} - {second})"]
    total = a + b
    worked = f"{second} is {total}, {first} is {total * c}, and {total * c} - {total} is printed."
    return _code(rng, lines, total * c - total, worked)


def _loop(rng: random.Random) -> Item:
    name, start, times, step = rng.choice(_NAMES), rng.randint(0, 30), rng.randint(2, 6), rng.randint(2, 15)
    lines = [f"{name} = {start}", f"for i in range({times}):", f"    {name} += {step}", f"print({name})"]
    return _code(rng, lines, start + times * step, f"{step} is added {times} times to {start}.")


def _sum_of_indices(rng: random.Random) -> Item:
    name, times, factor = rng.choice(_NAMES), rng.randint(3, 6), rng.randint(1, 9)
    lines = [f"{name} = 0", f"for i in range({times}):", f"    {name} += i * {factor}", f"print({name})"]
    terms = [i * factor for i in range(times)]
    return _code(rng, lines, sum(terms), " + ".join(map(str, terms)) + f" = {sum(terms)}.")


def _branch(rng: random.Random) -> Item:
    name, value, bound = rng.choice(_NAMES), rng.randint(1, 90), rng.randint(10, 80)
    up, down = rng.randint(2, 30), rng.randint(2, 30)
    lines = [f"{name} = {value}", f"if {name} > {bound}:", f"    {name} -= {down}", "else:", f"    {name} += {up}"]
    larger = value > bound
    worked = f"{value} is {'' if larger else 'not '}greater than {bound}, so {down if larger else up} is "
    result = value - down if larger else value + up
    return _code(rng, [*lines, f"print({name})"], result, worked + ("taken away." if larger else "added."))


def _function(rng: random.Random) -> Item:
    function, name = rng.choice(_FUNCTIONS), rng.choice(_NAMES)
    factor, shift, given = rng.randint(2, 9), rng.randint(1, 30), rng.randint(2, 20)
    lines = [f"def {function}({name}):", f"    return {name} * {factor} + {shift}", f"print({function}({given}))"]
    return _code(rng, lines, given * factor + shift, f"{given} * {factor} = {given * factor}, plus {shift}.")


def _items_of_list(rng: random.Random) -> Item:
    name, numbers = rng.choice(_NAMES), [rng.randint(1, 60) for _ in range(rng.randint(3, 5))]
    call, result, why = rng.choice(
        [
            ("max", max(numbers), "the largest"),
            ("min", min(numbers), "the smallest"),
            ("sum", sum(numbers), "the sum"),
            ("len", len(numbers), "the number of items"),
        ]
    )
    return _code(rng, [f"{name} = {numbers}", f"print({call}({name}))"], result, f"{call} gives {why}.")


def _text(rng: random.Random) -> Item:
    name, word = rng.choice(_NAMES), rng.choice(_WORDS) + rng.choice(_WORDS)
    ways: list[tuple[str, Callable[[str], str], str]] = [
        (".upper()", str.upper, "all letters become capitals"),
        ("[::-1]", lambda text: text[::-1], "the letters come in reverse order"),
        ("[:4]", lambda text: text[:4], "only the first four letters stay"),
        (".replace('e', 'o')", lambda text: text.replace("e", "o"), "every e becomes an o"),
    ]
    chosen = rng.randrange(len(ways))
    code, change, why = ways[chosen]
    right = change(word)
    others = {right, word, word.title(), word[1:], *(way(word) for _, way, _ in ways)} - {right}
    return _code(
        rng, [f"{name} = '{word}'", f"print({name}{code})"], right, f"{why}.", tuple(rng.sample(sorted(others), 3))
    )


_PROGRAMS = (_assignments, _loop, _sum_of_indices, _branch, _function, _items_of_list, _text)


def draw_program(rng: random.Random) -> Item:
    """One program of any kind."""
    return rng.choice(_PROGRAMS)(rng)
