"""Word lists and the random text made from them: filler sentences, names, numbers."""

import random
from collections.abc import Iterator


def _list(text: str) -> tuple[str, ...]:
    """Return the comma-separated phrases of `text`, which may span lines."""
    return tuple(" ".join(phrase.split()) for phrase in text.split(","))


PEOPLE = _list("""
    the baker, a young clerk, the ferryman, her neighbour, the gardener, an old teacher, the
    night nurse, a carpenter, the librarian, his cousin, the postmaster, a travelling cook, the
    mechanic, the choir leader, a retired pilot, the florist
""")
DEEDS = _list("""
    opened the shutters, counted the empty crates, wrote a short letter, mended a wooden chair,
    waited for the rain to stop, carried two buckets of water, looked for the missing key,
    talked about the harvest, read the paper aloud, painted the fence green, listened to the
    radio, sorted the old photographs, walked back along the river, boiled a pot of soup, forgot
    to lock the gate, borrowed a ladder, hung the washing out, swept the yard, fed the geese
""")
PLACES_ABOUT = _list("""
    near the station, behind the chapel, at the edge of the village, in the back room, beside
    the canal, on the market square, under the walnut tree, at the top of the hill, in the
    narrow street, by the harbour wall, across from the school, in the cold kitchen
""")
TIMES = _list("""
    In the morning, After lunch, On Sunday, Late in the evening, Before the storm, That winter,
    At noon, When the bells rang, A week later, Towards the end of May, Without a word, As
    always, For once, On the way home, Some years ago
""")
ENDINGS = _list("""
    and nobody took notice, while the others slept, as if nothing had happened, because there
    was little else to do, and went home early, until it grew dark, though the wind was cold,
    and then sat down to rest, before the shops closed, and hummed an old tune, with some care,
    and thought of the sea
""")
CITIES = _list("""
    Lisbon, Oslo, Krakow, Dakar, Quito, Hanoi, Tunis, Perth, Malmo, Turin, Cork, Lagos, Bergen,
    Seville, Izmir, Odessa, Geneva, Lima, Kyoto, Ghent, Havana, Nairobi, Toledo, Bremen,
    Calgary, Dublin, Salzburg, Tampa, Riga, Porto, Denver, Naples, Cairo, Bogota, Vienna,
    Boston, Zagreb, Athens
""")
COLOURS = _list("""
    amber, azure, coral, crimson, emerald, golden, indigo, ivory, jade, lilac, maroon, olive,
    pearl, purple, scarlet, silver, teal, violet
""")
THINGS = _list("""
    anchor, basket, candle, drum, engine, feather, garden, hammer, island, jacket, kettle,
    ladder, mirror, needle, orchard, pencil, ribbon, saddle, tunnel, umbrella, violin, wagon,
    window, bridge, castle, desert, forest, harbour, lantern, meadow, palace, quarry, river,
    stable, temple, valley, barrel, blanket, bottle, button, carpet, chimney, compass, curtain,
    dagger, fiddle, fountain, helmet, ladle, locket, magnet, marble, napkin, oven, parcel,
    pillow, rocket, shovel, spoon, statue, thimble, trumpet, whistle
""")


def sentences(rng: random.Random) -> Iterator[str]:
    """Yield filler sentences forever. None contains a number or a name from `pairs`."""
    while True:
        who, deed, about = rng.choice(PEOPLE), rng.choice(DEEDS), rng.choice(PLACES_ABOUT)
        start, end = rng.choice(TIMES), rng.choice(ENDINGS)
        yield rng.choice(
            (
                f"{start} {who} {deed} {about}.",
                f"{start} {who} {deed} {about}, {end}.",
                f"{who.capitalize()} {deed} {about} {end}.",
                f"{start}, {about}, {who} {deed}.",
                f"{who.capitalize()} {deed}, {end}.",
            )
        )


def pairs(rng: random.Random) -> Iterator[str]:
    """Yield distinct names such as ``coral lantern`` forever; they grow longer once used up."""
    names = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
    while True:
        rng.shuffle(names)
        yield from names
        names = [f"{name} {thing}" for name in names for thing in THINGS]


def number(rng: random.Random, taken: set[str]) -> str:
    """Return five digits that are not in `taken`, and add them to it."""
    while (value := str(rng.randrange(10_000, 100_000))) in taken:
        pass
    taken.add(value)
    return value


def syllables(rng: random.Random, taken: set[str], count: int = 3) -> str:
    """Return an invented word such as ``mobeda`` that is not in `taken`, and add it."""
    while True:
        parts = [rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(count)]
        if (word := "".join(parts)) not in taken:
            taken.add(word)
            return word
