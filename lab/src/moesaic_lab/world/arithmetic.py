"""Arithmetic and algebra with their steps."""

import random

from moesaic_lab.world.items import Item, wrong_numbers

_THINGS = ("apples", "coins", "stones", "books", "eggs", "cards", "nails", "seeds", "cups", "ropes", "shells", "pears")
_UNITS = ("metres", "grams", "litres", "minutes", "miles", "steps")


def _item(rng: random.Random, question: str, answer: int, worked: str) -> Item:
    return Item(question=question, answer=str(answer), worked=worked, wrong=wrong_numbers(rng, answer))


def _addition(rng: random.Random) -> Item:
    a, b = rng.randint(11, 999), rng.randint(11, 999)
    tens = a + b // 10 * 10
    return _item(rng, f"What is {a} + {b}?", a + b, f"{a} + {b // 10 * 10} = {tens}. {tens} + {b % 10} = {a + b}.")


def _subtraction(rng: random.Random) -> Item:
    b = rng.randint(11, 499)
    a = b + rng.randint(5, 499)
    tens = a - b // 10 * 10
    return _item(rng, f"What is {a} - {b}?", a - b, f"{a} - {b // 10 * 10} = {tens}. {tens} - {b % 10} = {a - b}.")


def _product(rng: random.Random) -> Item:
    a, b = rng.randint(12, 99), rng.randint(3, 9)
    tens, ones = a // 10 * 10 * b, a % 10 * b
    worked = f"{a // 10 * 10} * {b} = {tens}. {a % 10} * {b} = {ones}. {tens} + {ones} = {a * b}."
    return _item(rng, f"What is {a} * {b}?", a * b, worked)


def _equation(rng: random.Random) -> Item:
    x, factor, shift = rng.randint(2, 40), rng.randint(2, 9), rng.randint(1, 60)
    total = factor * x + shift
    worked = f"{factor}x = {total} - {shift} = {total - shift}. x = {total - shift} / {factor} = {x}."
    return _item(rng, f"Solve {factor}x + {shift} = {total} for x.", x, worked)


def _two_sides(rng: random.Random) -> Item:
    x, small, more, shift = rng.randint(2, 30), rng.randint(2, 6), rng.randint(1, 5), rng.randint(1, 40)
    large, right = small + more, more * x + shift
    worked = f"{large}x - {small}x = {right} - {shift}. {more}x = {right - shift}. x = {x}."
    return _item(rng, f"Solve {large}x + {shift} = {small}x + {right} for x.", x, worked)


def _sequence(rng: random.Random) -> Item:
    start, step = rng.randint(1, 90), rng.randint(2, 25)
    terms = [start + index * step for index in range(4)]
    shown = ", ".join(map(str, terms))
    return _item(rng, f"Which number follows {shown}?", terms[-1] + step, f"Each is {step} more. {terms[-1]} + {step}.")


def _sharing(rng: random.Random) -> Item:
    each, people, thing = rng.randint(3, 40), rng.randint(2, 9), rng.choice(_THINGS)
    total = each * people
    question = f"{people} children share {total} {thing} equally. How many {thing} does each get?"
    return _item(rng, question, each, f"{total} / {people} = {each}.")


def _rate(rng: random.Random) -> Item:
    rate, first, second, unit = rng.randint(3, 60), rng.randint(2, 9), rng.randint(2, 9), rng.choice(_UNITS)
    question = f"A machine uses {rate * first} {unit} in {first} runs. How many {unit} does it use in {second} runs?"
    worked = f"One run uses {rate * first} / {first} = {rate} {unit}. {rate} * {second} = {rate * second}."
    return _item(rng, question, rate * second, worked)


def _remainder(rng: random.Random) -> Item:
    by, times, rest = rng.randint(3, 12), rng.randint(4, 60), rng.randint(0, 2)
    total = by * times + rest
    worked = f"{by} * {times} = {by * times}. {total} - {by * times} = {rest}."
    return _item(rng, f"What is the remainder of {total} divided by {by}?", rest, worked)


_KINDS = (_addition, _subtraction, _product, _equation, _two_sides, _sequence, _sharing, _rate, _remainder)


def draw(rng: random.Random) -> Item:
    """One question of any kind."""
    return rng.choice(_KINDS)(rng)
