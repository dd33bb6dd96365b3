"""The words and phrases of the two domains of ``data.grammar``, and the frames they are put into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Forms:
    """How to say the value of a slot: before the noun, after "it", or after the noun. Each may be impossible."""

    adjectives: tuple[str, ...] = ()
    clauses: tuple[str, ...] = ()
    phrases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Words:
    """A domain's slots in the order of its MRs: first a name and a type, which are always said, then the others."""

    names: tuple[str, ...]
    type_slot: str
    types: tuple[str, ...]
    attributes: Mapping[str, Mapping[str, Forms]]
    aims: tuple[str, ...]
    praised: tuple[str, ...]
    verdicts: tuple[str, ...]


PLACES: Mapping[str, Mapping[str, Forms]] = {
    "area": {
        "city centre": Forms(phrases=("in the city centre", "in the centre of the city")),
        "riverside": Forms(phrases=("by the river", "at the riverside", "in the riverside area")),
        "old town": Forms(phrases=("in the old town", "in the old part of the city")),
    },
    "near": {
        name: Forms(phrases=(f"near {name}", f"close to {name}", f"not far from {name}"))
        for name in ("Market Square", "Green Bridge", "The Old Mill", "King Street", "The Silver Tower", "Park Lane")
    },
}
PRICES = {
    "cheap": Forms(("cheap", "low-priced"), ("has low prices", "is cheap"), ("with low prices",)),
    "moderate": Forms(
        ("moderately priced", "mid-priced"), ("has moderate prices", "is moderately priced"), ("with moderate prices",)
    ),
    "high": Forms(("expensive", "high-priced"), ("has high prices", "is expensive"), ("with high prices",)),
}


def _ratings(by: str) -> dict[str, Forms]:
    worded = {
        value: Forms((adverb,) if adverb else (), (f"has {a} {value} {by} rating",), (f"with {a} {value} {by} rating",))
        for value, a, adverb in (("low", "a", "poorly rated"), ("average", "an", ""), ("high", "a", "highly rated"))
    }
    counted = {
        value: Forms((), (f"has a {by} rating of {value}", f"is rated {value}"), (f"rated {value}",))
        for value in ("1 out of 5", "3 out of 5", "5 out of 5")
    }
    return worded | counted


DOMAINS: Mapping[str, Words] = {
    "public": Words(
        names=(
            "The Golden Crown",
            "The Red Lion",
            "The Silver Swan",
            "The White House",
            "The King's Garden",
            "The Old Anchor",
            "Mill House",
            "Park View",
            "River Lodge",
            "Green Gables",
        ),
        type_slot="placeType",
        types=("hotel", "guest house", "museum", "art gallery", "bookshop", "antique shop"),
        attributes={
            "priceRange": PRICES,
            "style": {
                style: Forms((style,), (f"is {style}", f"has {a} {style} style"), (f"in {a} {style} style",))
                for a, style in (("a", "modern"), ("a", "historic"), ("an", "elegant"), ("a", "simple"))
            },
            "visitor rating": _ratings("visitor"),
            "area": PLACES["area"],
            "petFriendly": {
                "yes": Forms(
                    ("pet-friendly",), ("is pet-friendly", "welcomes dogs", "is good for dogs"), ("with room for dogs",)
                ),
                "no": Forms(
                    (),
                    ("is not pet-friendly", "does not welcome dogs", "is not good for dogs"),
                    ("without room for dogs",),
                ),
            },
            "near": PLACES["near"],
        },
        aims=(
            "We asked {number} visitors about {name}.",
            "This report is about {name} and the {number} visitors who came on a {day}.",
            "In {month}, {number} visitors spent a {day} at {name} and told us about it.",
        ),
        praised=("the building", "the staff", "the garden", "the view", "the rooms", "the light", "the opening hours"),
        verdicts=(
            "We conclude that the {type} is worth a visit in {month}.",
            "In short, the {type} is a good choice on a {day}.",
            "More visits in {month} are needed before we can say more about the {type}.",
        ),
    ),
    "private": Words(
        names=(
            "The Green Lantern",
            "The Red Kitchen",
            "The Golden Spoon",
            "The Silver Plate",
            "The White Swan",
            "The Old Oven",
            "King's Table",
            "Mill Garden",
            "River House",
            "Pepper Lodge",
        ),
        type_slot="eatType",
        types=("restaurant", "pub", "coffee shop", "bistro"),
        attributes={
            "food": {
                food: Forms((food,), (f"serves {food} food", f"offers {food} dishes"), (f"serving {food} food",))
                for food in ("Indian", "Italian", "English", "French", "Chinese", "Japanese", "Greek", "Thai")
            },
            "priceRange": PRICES,
            "customer rating": _ratings("customer"),
            "area": PLACES["area"],
            "familyFriendly": {
                "yes": Forms(
                    ("family-friendly", "child-friendly"),
                    ("is family-friendly", "welcomes children", "is good for families"),
                    ("for the whole family",),
                ),
                "no": Forms(
                    ("adults-only",),
                    ("is not family-friendly", "does not welcome children", "is not good for families"),
                    ("for adults only",),
                ),
            },
            "near": PLACES["near"],
        },
        aims=(
            "We asked {number} guests about their dinner at {name}.",
            "This review sums up {number} meals at {name}, most of them eaten on a {day}.",
            "In {month}, {number} guests had lunch at {name} and filled in a form about it.",
        ),
        praised=("the soup", "the service", "the menu", "the bread", "the desserts", "the wine", "the noise"),
        verdicts=(
            "We conclude that the {type} is worth a dinner in {month}.",
            "In short, the cook of the {type} should keep the menu of {month}.",
            "More meals on a {day} are needed before we can rate the {type}.",
        ),
    ),
}
FRAMES = (
    "{name} is {thing}{place}.",
    "{name} is {thing}{place} and {clause}.",
    "There is {thing} called {name}{place}.",
    "If you are looking for {thing}, try {name}{place}.",
)
FRAMES_WITH_PLACE = (
    "{Place}, you can find {thing} called {name}.",
    "{Place} there is {thing} called {name}.",
    "{name}, {thing}, is located{place}.",
)
FINDINGS = (
    "{Most} of them liked {one}, but {few} were unhappy with {other}.",
    "{Most} of them spoke well of {one} and {few} said the same of {other}.",
    "While {most} praised {one}, only {few} of them had good words for {other}.",
)
