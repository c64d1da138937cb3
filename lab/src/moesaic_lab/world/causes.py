"""Everyday cause and effect."""

import random

from moesaic_lab.world.items import Item, wrong_choices

_WHO = ("Anna", "Boris", "Carla", "David", "Elena", "Farid", "Greta", "Hugo", "Irene", "Jonas", "Kemal", "Lucia",
        "Marta", "Nils", "Olga", "Pablo", "Quentin", "Rosa", "Stefan", "Tina", "the neighbour", "the teacher",
        "the gardener", "the old man", "my sister", "our cousin")  # fmt: skip
_WHEN = ("On Monday", "Last night", "Before lunch", "In the morning", "After the storm", "During the holidays",
         "On a cold day", "At noon", "In spring", "Yesterday", "One evening", "At the weekend")  # fmt: skip
_KITCHEN = ("the soup", "the bread", "the cake", "the rice", "the pie", "the fish")
_FRAGILE = ("a glass", "a vase", "a plate", "an egg", "a mirror", "a bottle")
_CLOTHES = ("the shirt", "the coat", "the trousers", "the scarf", "the dress", "the socks")
_MACHINES = ("the car", "the lamp", "the radio", "the clock", "the torch", "the bicycle light")
_PLANTS = ("the roses", "the tomatoes", "the fern", "the young tree", "the beans", "the lawn")

_PATTERNS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (_KITCHEN, "left {x} in the oven for too long", "{x} was burnt"),
    (_KITCHEN, "forgot to put salt in {x}", "{x} tasted of nothing"),
    (_KITCHEN, "put far too much pepper in {x}", "everybody who tried {x} began to sneeze"),
    (_KITCHEN, "left {x} on the table with the dog", "the dog ate {x}"),
    (_KITCHEN, "took {x} out of the freezer an hour late", "{x} was still frozen at dinner"),
    (_FRAGILE, "dropped {x} on the stone floor", "{x} lay there in pieces"),
    (_FRAGILE, "wrapped {x} in three blankets before the journey", "{x} arrived whole"),
    (_FRAGILE, "put {x} at the edge of the shelf beside the cat", "the cat pushed {x} off the shelf"),
    (_FRAGILE, "sold {x} to a stranger", "there was an empty place where {x} had been"),
    (_CLOTHES, "washed {x} in very hot water", "{x} shrank"),
    (_CLOTHES, "hung {x} in the sun for a month", "{x} lost its colour"),
    (_CLOTHES, "caught {x} on a rusty nail", "{x} had a hole"),
    (_CLOTHES, "forgot {x} on the line in the rain", "{x} was soaked"),
    (_CLOTHES, "spilled ink over {x}", "{x} had a blue stain"),
    (_MACHINES, "left {x} switched on all night", "the battery of {x} was empty"),
    (_MACHINES, "let {x} fall into the lake", "{x} never worked again"),
    (_MACHINES, "put a new battery into {x}", "{x} worked as if it were new"),
    (_MACHINES, "took {x} apart without a plan", "nobody could put {x} together again"),
    (_PLANTS, "did not water {x} for weeks", "{x} dried up"),
    (_PLANTS, "covered {x} before the frost", "{x} survived the winter"),
    (_PLANTS, "let the goats graze beside {x}", "the goats ate {x}"),
    (_PLANTS, "watered {x} every evening", "{x} grew tall"),
    (("the gate", "the window", "the cellar door"), "left {x} open", "somebody came in through {x}"),
    (("the letter", "the parcel", "the invitation"), "wrote a wrong address on {x}", "{x} came back unopened"),
    (("the bus", "the train", "the ferry"), "got up an hour too late", "{x} had left already"),
    (("the path", "the bridge", "the steps"), "poured water over {x} in the frost", "people slipped on {x}"),
    (("the baby", "the guest", "the old dog"), "practised the trumpet at midnight", "{x} woke up"),
    (("the tent", "the umbrella", "the paper kite"), "set up {x} in a strong wind", "{x} flew away"),
)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def draw(rng: random.Random) -> Item:
    """One thing that somebody did and what came of it, asked for in one of two directions."""
    things, cause, effect = rng.choice(_PATTERNS)
    thing, who, when = rng.choice(things), rng.choice(_WHO), rng.choice(_WHEN)
    done, came = f"{who} {cause.format(x=thing)}", effect.format(x=thing)
    related = [other for other in _PATTERNS if other[0] is things] or list(_PATTERNS)
    pool = related if len(related) > 3 else list(_PATTERNS)
    worked = rng.choice([f"{_capital(done)}, so {came}.", f"{_capital(came)} because {done}."])
    if rng.random() < 0.5:
        return Item(
            question=f"{when} {done}. What happened?",
            answer=came,
            worked=worked,
            wrong=wrong_choices(rng, came, [other[2].format(x=thing) for other in pool]),
        )
    causes = [other[1].format(x=thing) for other in pool]
    return Item(
        question=f"{when} {came}. What had {who} done?",
        answer=f"{who} {cause.format(x=thing)}",
        worked=worked,
        wrong=wrong_choices(rng, done, [f"{who} {other}" for other in causes]),
    )
