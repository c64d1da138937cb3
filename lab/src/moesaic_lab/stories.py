"""Questions of the two generated domains in words: facts of an invented world, and everyday cause and effect.

The world is the same for everybody: people live in towns, towns lie in lands and on rivers. Single facts are training
text; questions ask for what two or three of them together say.
"""

import random
from dataclasses import dataclass

from moesaic_lab.questions import Item, wrong_choices

_STARTS = ("Bel", "Cor", "Dra", "El", "Fen", "Gal", "Hol", "Ister", "Kar", "Lum", "Mor", "Nev", "Or", "Pel", "Quin",
           "Ras", "Sol", "Tam", "Ur", "Vel")  # fmt: skip
_TOWN_ENDS = ("mouth", "ham", "stead", "wick", "haven")
_LAND_ENDS = ("ia", "or", "esse")
_PERSON_STARTS = ("Ab", "Bri", "Ced", "Do", "Em", "Fa", "Gre", "Hil", "Il", "Jo", "Ka", "Lo", "Mi", "Nor", "Os", "Pri",
                  "Ro", "Sel", "Til", "Ve")  # fmt: skip
_PERSON_ENDS = ("ra", "den", "mina", "ver", "las", "no")
_RIVERS = ("Anner", "Brume", "Cald", "Dove", "Esk", "Flint", "Gray", "Hale")
_CRAFTS = ("baker", "weaver", "smith", "miller", "potter", "tailor", "carpenter", "fisher", "mason", "dyer")
_ANIMALS = ("goat", "cat", "raven", "mule", "goose", "hound", "ferret", "owl")
_GOODS = ("salt", "wool", "honey", "iron", "glass", "barley", "amber", "oil", "copper", "silk")


@dataclass(frozen=True, kw_only=True)
class Town:
    """A town of the world."""

    name: str
    land: str
    river: str
    good: str
    """What it sells."""


@dataclass(frozen=True, kw_only=True)
class Person:
    """Somebody of the world."""

    name: str
    town: Town
    craft: str
    animal: str


def _make_people() -> tuple[Person, ...]:
    rng = random.Random("the invented world")
    lands = [f"{start}{rng.choice(_LAND_ENDS)}" for start in rng.sample(_STARTS, 8)]
    towns = [
        Town(name=start + end, land=rng.choice(lands), river=rng.choice(_RIVERS), good=rng.choice(_GOODS))
        for start in _STARTS
        for end in rng.sample(_TOWN_ENDS, 2)
    ]
    names = [start + end for start in _PERSON_STARTS for end in _PERSON_ENDS]
    return tuple(
        Person(name=name, town=rng.choice(towns), craft=rng.choice(_CRAFTS), animal=rng.choice(_ANIMALS))
        for name in names
    )


PEOPLE = _make_people()
TOWNS = tuple({person.town.name: person.town for person in PEOPLE}.values())


def facts_about(person: Person, rng: random.Random) -> list[str]:
    """Sentences that each say one fact, in one of several wordings."""
    town = person.town
    return [
        rng.choice([f"{person.name} lives in {town.name}.", f"The home of {person.name} is {town.name}."]),
        rng.choice([f"{person.name} is a {person.craft}.", f"{person.name} works as a {person.craft}."]),
        rng.choice([f"{person.name} keeps a {person.animal}.", f"A {person.animal} belongs to {person.name}."]),
        rng.choice([f"{town.name} lies in {town.land}.", f"{town.name} is a town of {town.land}."]),
        rng.choice([f"{town.name} stands on the river {town.river}.", f"The {town.river} flows through {town.name}."]),
        rng.choice([f"{town.name} sells {town.good}.", f"The {town.good} on the market comes from {town.name}."]),
    ]


def _land(rng: random.Random, person: Person) -> Item:
    lands = [town.land for town in TOWNS]
    worked = f"{person.name} lives in {person.town.name}, and {person.town.name} lies in {person.town.land}."
    return Item(
        question=f"In which land does {person.name} live?",
        answer=person.town.land,
        worked=worked,
        wrong=wrong_choices(rng, person.town.land, lands),
    )


def _river(rng: random.Random, person: Person) -> Item:
    worked = f"{person.name} lives in {person.town.name}, which stands on the {person.town.river}."
    return Item(
        question=f"Which river flows through the town of {person.name} the {person.craft}?",
        answer=person.town.river,
        worked=worked,
        wrong=wrong_choices(rng, person.town.river, list(_RIVERS)),
    )


def _good(rng: random.Random, person: Person) -> Item:
    worked = f"{person.name} lives in {person.town.name}, and {person.town.name} sells {person.town.good}."
    return Item(
        question=f"What can one buy in the town where {person.name} keeps a {person.animal}?",
        answer=person.town.good,
        worked=worked,
        wrong=wrong_choices(rng, person.town.good, list(_GOODS)),
    )


def _same_land(rng: random.Random, person: Person) -> Item:
    other = rng.choice([one for one in PEOPLE if one.name != person.name])
    same = other.town.land == person.town.land
    worked = (
        f"{person.name} lives in {person.town.name} in {person.town.land}, "
        f"{other.name} in {other.town.name} in {other.town.land}."
    )
    return Item(
        question=f"Do {person.name} and {other.name} live in the same land?",
        answer="yes" if same else "no",
        worked=worked,
        wrong=("no" if same else "yes",),
    )


def _shared_animal(rng: random.Random, person: Person) -> Item:
    other = rng.choice([one for one in PEOPLE if one.name != person.name])
    return Item(
        question=f"{person.name} and {other.name} trade animals. What does {person.name} keep now?",
        answer=f"a {other.animal}",
        worked=f"{person.name} kept a {person.animal} and {other.name} a {other.animal}.",
        wrong=wrong_choices(rng, f"a {other.animal}", [f"a {animal}" for animal in _ANIMALS]),
    )


_FACT_QUESTIONS = (_land, _river, _good, _same_land, _shared_animal)


def draw_fact(rng: random.Random) -> Item:
    """One question about somebody."""
    return rng.choice(_FACT_QUESTIONS)(rng, rng.choice(PEOPLE))


def passage(rng: random.Random) -> str:
    """What is known about two or three people, in any order."""
    lines = [line for person in rng.sample(PEOPLE, rng.randint(2, 3)) for line in facts_about(person, rng)]
    rng.shuffle(lines)
    return " ".join(lines)


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


def draw_cause(rng: random.Random) -> Item:
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
