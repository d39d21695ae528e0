"""Tools with names of any kind, which a call must copy, and requests that need not repeat the name."""

from __future__ import annotations

from random import Random

from training.words import COMMON, TOWNS, word

_VERBS = (
    *("add", "create", "save", "store", "log", "book", "file", "submit", "put", "insert", "register", "upload"),
    *("push", "make", "write", "keep", "enter", "import", "post", "track", "sync", "record", "new", "append"),
)
_NOUNS = (
    *("expense", "entry", "contact", "bill", "payment", "task", "report", "booking", "note", "event", "profile"),
    *("customer", "purchase", "account", "lead", "asset", "deal", "visit", "member", "guest", "claim", "refund"),
)
_FURTHER = ("entry", "record", "list", "item", "data", "log", "book", "table", "sheet", "service")
_IDLE_VERBS = ("open", "close", "start", "stop", "delete", "rename", "lock", "restart", "translate", "share")
_IDLE_NOUNS = ("door", "window", "video", "alarm", "server", "game", "message", "map", "camera", "printer")
_IDLE_KEYS = (
    *(("minutes", "integer"), ("level", "integer"), ("path", "string"), ("email", "string"), ("on", "boolean")),
    *(("language", "string"), ("user", "string"), ("speed", "number"), ("query", "string"), ("device", "string")),
)
_ABOUT_NOUN = (
    *("Add this to my {noun}s.", "Put this into my {noun}s.", "Make {a} {noun} of this.", "Save this {noun}."),
    *("Save this as {a} {noun}.", "Please add the {noun}.", "Create {a} {noun} from the picture.", "New {noun}."),
)
ANY_REQUEST = (  # where one tool alone fits the picture
    *("Please save this.", "Save it.", "Add this.", "Book it.", "Please add it.", "Store this.", "Log this, please."),
    *("Can you add this?", "Remember this.", "Save this for me.", "Keep this.", "Can you save it?", "Record this."),
)


def any_name(rng: Random, verb: str, noun: str) -> str:
    """snake_case, camelCase and the like, of two or three words."""
    words = [verb, noun]
    if rng.random() < 0.3:
        words.append(rng.choice([further for further in _FURTHER if further != noun]))
    elif rng.random() < 0.2:
        words.insert(1, rng.choice(("new", "to", "my", "one")))
    style = rng.random()
    if style < 0.55:
        return "_".join(words)
    if style < 0.6:
        return "-".join(words)
    tail = "".join(part.capitalize() for part in words[1:])
    return (words[0] if style < 0.92 else words[0].capitalize()) + tail


def any_tool(rng: Random) -> tuple[str, str, tuple[str, ...]]:
    """Name, description and requests of a tool that keeps something; the description need not repeat the name."""
    noun = rng.choice(_NOUNS) if rng.random() < 0.7 else rng.choice(COMMON)
    verb = rng.choice(_VERBS)
    article = "an" if noun[0] in "aeiou" else "a"
    other = rng.choice(("Add", "Create", "Save", "Keep", "Store", "Make"))
    description = rng.choice((f"{other} {article} {noun}.", f"{other} {article} {noun}.", f"For {noun}s.", ""))
    name = any_name(rng, verb, noun)
    ways = (*(way.format(noun=noun, a=article) for way in _ABOUT_NOUN), f"Use {name}.", f"Call {name}.")
    return name, description, ways


def idle_tool(rng: Random) -> tuple[str, str, dict[str, str]]:
    """A tool that has nothing to do with pictures."""
    verb, noun = rng.choice(_IDLE_VERBS), rng.choice(_IDLE_NOUNS)
    described = rng.choice((f"{verb.capitalize()} the {noun}.", f"{verb.capitalize()} the {noun}.", ""))
    return any_name(rng, verb, noun), described, dict(rng.sample(_IDLE_KEYS, rng.randint(1, 2)))


_PLACES = (*TOWNS, "Vienna", "Boston", "Riga", "Kyiv", "Dublin", "Seoul", "Prague", "New York", "Milan")
_TEXT_TOOLS = (  # names, description, key, kind, requests
    (
        ("get_weather", "getWeather", "weather", "fetch_weather", "weather_lookup", "get_current_weather"),
        "Get the weather of a city.",
        ("city", "location", "place", "town"),
        "place",
        ("What is the weather in {}?", "How is the weather in {}?", "Weather in {}?", "Is it raining in {}?"),
    ),
    (
        ("get_time", "getTime", "local_time", "clock"),
        "Get the time in a city.",
        ("city", "location", "place"),
        "place",
        ("What time is it in {}?", "Tell me the time in {}.", "What is the time in {}?"),
    ),
    (
        ("set_timer", "startTimer", "timer", "create_timer"),
        "Set a timer.",
        ("minutes", "duration"),
        "number",
        ("Set a timer for {} minutes.", "Timer for {} minutes.", "Start a timer of {} minutes."),
    ),
    (
        ("search", "web_search", "searchWeb", "find_pages"),
        "Search the web.",
        ("query", "text", "q"),
        "word",
        ("Search for {}.", "Search the web for {}.", "Look up {}."),
    ),
    (
        ("play_song", "playMusic", "play", "start_song"),
        "Play a song.",
        ("song", "title", "name"),
        "word",
        ("Play {}.", "Play the song {}.", "I want to hear {}."),
    ),
)


def text_tool(rng: Random) -> tuple[str, str, str, str, str]:
    """A tool for a request without a picture: name, description, key, request, and the value as JSON."""
    names, description, keys, kind, ways = rng.choice((*_TEXT_TOOLS[:1], *_TEXT_TOOLS))
    if kind == "number":
        said = value = str(rng.randint(1, 99))
    else:
        usual = _PLACES if kind == "place" else COMMON
        said = rng.choice(usual) if rng.random() < 0.8 else word(rng, 7, 3).capitalize()
        value = f'"{said}"'
    described = rng.choice((description, description, ""))
    return rng.choice(names), described, rng.choice(keys), rng.choice(ways).format(said), value
