"""Small Python programs and what they print."""

import random
from collections.abc import Callable

from moesaic_lab.world.items import Item, wrong_numbers

_NAMES = ("a", "b", "count", "total", "n", "size", "value", "left", "width", "score", "rest", "limit")
_FUNCTIONS = ("grow", "shift", "double", "scale", "mix", "apply", "change", "step")
_WORDS = ("lamp", "river", "stone", "paper", "cloud", "garden", "bottle", "window", "silver", "orange", "marble")


def _item(rng: random.Random, lines: list[str], printed: str | int, worked: str, wrong: tuple[str, ...] = ()) -> Item:
    code = "\n".join(lines)
    wrong = wrong or wrong_numbers(rng, int(printed))
    return Item(question=f"What does this program print?\n{code}", answer=str(printed), worked=worked, wrong=wrong)


def _assignments(rng: random.Random) -> Item:
    first, second = rng.sample(_NAMES, 2)
    a, b, c = rng.randint(2, 50), rng.randint(2, 50), rng.randint(2, 9)
    lines = [f"{first} = {a}", f"{second} = {first} + {b}", f"{first} = {second} * {c}", f"print({first} - {second})"]
    total = a + b
    worked = f"{second} is {total}, {first} is {total * c}, and {total * c} - {total} is printed."
    return _item(rng, lines, total * c - total, worked)


def _loop(rng: random.Random) -> Item:
    name, start, times, step = rng.choice(_NAMES), rng.randint(0, 30), rng.randint(2, 6), rng.randint(2, 15)
    lines = [f"{name} = {start}", f"for i in range({times}):", f"    {name} += {step}", f"print({name})"]
    return _item(rng, lines, start + times * step, f"{step} is added {times} times to {start}.")


def _sum_of_indices(rng: random.Random) -> Item:
    name, times, factor = rng.choice(_NAMES), rng.randint(3, 6), rng.randint(1, 9)
    lines = [f"{name} = 0", f"for i in range({times}):", f"    {name} += i * {factor}", f"print({name})"]
    terms = [i * factor for i in range(times)]
    return _item(rng, lines, sum(terms), " + ".join(map(str, terms)) + f" = {sum(terms)}.")


def _branch(rng: random.Random) -> Item:
    name, value, bound = rng.choice(_NAMES), rng.randint(1, 90), rng.randint(10, 80)
    up, down = rng.randint(2, 30), rng.randint(2, 30)
    lines = [f"{name} = {value}", f"if {name} > {bound}:", f"    {name} -= {down}", "else:", f"    {name} += {up}"]
    larger = value > bound
    worked = f"{value} is {'' if larger else 'not '}greater than {bound}, so {down if larger else up} is "
    result = value - down if larger else value + up
    return _item(rng, [*lines, f"print({name})"], result, worked + ("taken away." if larger else "added."))


def _function(rng: random.Random) -> Item:
    function, name = rng.choice(_FUNCTIONS), rng.choice(_NAMES)
    factor, shift, given = rng.randint(2, 9), rng.randint(1, 30), rng.randint(2, 20)
    lines = [f"def {function}({name}):", f"    return {name} * {factor} + {shift}", f"print({function}({given}))"]
    return _item(rng, lines, given * factor + shift, f"{given} * {factor} = {given * factor}, plus {shift}.")


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
    return _item(rng, [f"{name} = {numbers}", f"print({call}({name}))"], result, f"{call} gives {why}.")


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
    return _item(
        rng, [f"{name} = '{word}'", f"print({name}{code})"], right, f"{why}.", tuple(rng.sample(sorted(others), 3))
    )


_KINDS = (_assignments, _loop, _sum_of_indices, _branch, _function, _items_of_list, _text)


def draw(rng: random.Random) -> Item:
    """One program of any kind."""
    return rng.choice(_KINDS)(rng)
