"""Words to draw and labels for charts. Drawn words are common English words of up to eight letters, or made up."""

from __future__ import annotations

import string
from random import Random

_COMMON = """
    able about above actor adult after again agent air album alert alive all almost alone along also always amber and
    angel angle animal answer apple april arch area arm army arrow art aunt autumn away baby back bag bake ball bank
    bar base basket bath beach bean bear beauty bed bee bell belt bench best better bird birth black blade blank blue
    board boat body bone book boot border both bottle bottom bowl box boy brain branch brave bread break breeze brick
    bridge bright bring broad brother brown brush bubble bucket build bus bush busy butter button cabin cable cake
    call calm camera camp candle candy canvas car card care cargo carpet carry cart castle cat cause cave ceiling
    center chain chair chalk chance change charm cheap cheese cherry chest child choice church circle city clean clear
    clever clock close cloud clown coach coast coat coffee coin cold collar color comet common cook copper corn corner
    cotton count country couple course cousin cover cow craft crane cream crew cross crowd crown cup current curve
    daily dance danger dark dawn day dear deep deer desert desk detail diamond dinner dish dog doll dolphin door
    double down dragon dream dress drink drive drop drum dry duck dust eagle early earth east easy echo edge egg
    eight elbow empty end energy engine enjoy entry equal escape evening event every exam exit extra eye fabric face
    fact fair fall family famous farm fast father feather fence ferry field fig film final find fine finger fire first
    fish five flag flame flat floor flour flower fly fog follow food foot force forest fork form fort forward fossil
    four fox frame free fresh friend frog front frost fruit full funny future galaxy game garden garlic gate gentle
    giant gift girl glad glass globe glove goal goat gold good goose grain grand grape grass gravity great green
    grey ground group grow guard guest guide guitar habit hair half hall hammer hand happy harbor hard harvest hat
    hawk head health heart heavy height hello helmet help hero hidden high hill history hobby hold hole holiday home
    honest honey hope horn horse hotel hour house human humor hunger hunt ice idea image inch info ink insect inside
    iron island ivory jacket jam jar jazz jelly jewel job join joke journey joy judge juice jump june jungle junior
    just keen keep kettle key kid kind king kiss kitchen kite kitten knee knife knot ladder lady lake lamp land large
    last late laugh laundry law lazy leader leaf learn leather left lemon lesson letter level library light lily lime
    line lion list little lizard local lock long look lost loud love low lucky lunch machine magic magnet mail main
    major make mango map maple marble march market mask master match maybe meadow meal medal melody melon memory
    menu metal method middle mild milk mill mind mine minute mirror mist mix model modern moment money monkey month
    moon morning moth mother motor mountain mouse mouth movie much muffin mug music nail name narrow nation nature
    near neck needle nephew nest net never new news next nice night nine noble noise noon normal north nose note
    nothing novel now number nurse nut oak oasis object ocean office often oil old olive one onion only open orange
    orbit orchid order organ other otter oven owl own oxygen oyster page paint pair palace palm pancake panda panel
    paper parade parent park parrot part party past path pause peace peach pear pearl pebble pen pencil penguin
    people pepper perfect person phone photo piano picnic picture pie pig pilot pink pirate pizza place plain plan
    planet plant plate play please plum pocket poem point polar police pond pony pool popcorn port potato powder
    power present pretty price pride prince print prize problem promise proud public pump puppy purple purse puzzle
    queen quick quiet quilt rabbit radio rain rainbow ranch rapid rare reader ready real record red reply rest
    ribbon rice rich ride right ring river road robin robot rock rocket roof room rope rose rough round route royal
    rubber ruby rule run saddle safe sail salad salt same sand sauce school science screen sea season seat second
    secret seed seven shadow shape share shark sharp sheep sheet shelf shell shine ship shirt shoe shop short show
    shy side sign silent silk silver simple singer sister six size skate skill skin sky sleep slice slow small smart
    smile smoke smooth snack snail snake snow soap soccer sock soft soil solar song soon sound soup south space spark
    special speed spice spider spoon sport spot spring square stable stage stair stamp star start station steam steel
    stem step stone stop storm story stove street strong student study subject sugar summer sun sunset super supper
    surprise swan sweet swim swing symbol table tail talent tall tape taste taxi tea teacher team temple ten tennis
    tent test thank theater thick thin thing think third three thunder ticket tide tiger time tiny tired title toast
    today tomato tone tool tooth top topic total touch tower town toy track trade train travel treasure tree trip
    truck true trumpet trust truth tulip tunnel turtle twelve twin two uncle under unit up upper useful valley value
    velvet very victory video view village violet violin visit voice voyage wagon wait walk wall walnut warm wash
    watch water wave way weather week welcome well west whale wheat wheel whisper white whole wide wild wind window
    wine wing winter wire wise wish wolf wonder wood wool word work world worth writer yard year yellow yes yogurt
    young zebra zero zone zoo
"""
COMMON = tuple(_COMMON.split())
GOODS = (
    *("Tea", "Milk", "Rice", "Corn", "Fish", "Eggs", "Nuts", "Figs", "Plum", "Pear", "Lime", "Kiwi", "Bread", "Salt"),
    *("Soap", "Lamp", "Cake", "Juice", "Honey", "Beans", "Sugar", "Paper", "Apple", "Lemon", "Pizza", "Soup", "Coffee"),
)
PEOPLE = (
    "Ann",
    "Bob",
    "Eva",
    "Tom",
    "Mia",
    "Leo",
    "Ida",
    "Max",
    "Zoe",
    "Sam",
    "Anna",
    "Peter",
    "Maria",
    "Lucas",
    "Nina",
)
TOWNS = (
    "Rome",
    "Oslo",
    "Lima",
    "Paris",
    "Cairo",
    "Delhi",
    "Tokyo",
    "Quito",
    "Bern",
    "Kiel",
    "Berlin",
    "Madrid",
    "London",
)
LABELS = (
    *("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"),
    *("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"),
    *("Tea", "Milk", "Rice", "Corn", "Fish", "Eggs", "Nuts", "Figs", "Plum", "Pear", "Lime", "Kiwi", "Bread", "Salt"),
    *("Rome", "Oslo", "Lima", "Paris", "Cairo", "Delhi", "Tokyo", "Quito", "Bern", "Kiel"),
    *("Cats", "Dogs", "Cows", "Pigs", "Hens", "Bees", "Owls", "Ants"),
    *("North", "South", "East", "West"),
    *("Ann", "Bob", "Eva", "Tom", "Mia", "Leo", "Ida", "Max", "Zoe", "Sam"),
)
LETTERS = tuple("ABCDEFGH")
COLUMNS = ("Price", "Count", "Size", "Score", "Age", "Cost", "Sales", "Stock", "Weight", "Points", "Year", "Total")


def word(rng: Random, longest: int, shortest: int = 2) -> str:
    """A common word, or letters without sense so that reading cannot be guessing; at most `longest` letters."""
    text = ""
    if rng.random() < 0.45:
        while not shortest <= len(text) <= longest:
            text = rng.choice(COMMON)
    else:
        text = _made_up(rng, rng.randint(shortest, longest))
    style = rng.random()
    return text.upper() if style < 0.45 else text.capitalize() if style < 0.65 else text


def number(rng: Random, longest: int) -> str:
    digits = rng.randint(1, longest)
    first = rng.choice("123456789")
    return first + "".join(rng.choices(string.digits, k=digits - 1))


def labels(rng: Random, count: int, longest: int) -> list[str]:
    """Different labels of at most `longest` letters, of one kind where there are enough of it."""
    if longest < 3 or rng.random() < 0.3:
        start = rng.randrange(len(LETTERS) - count + 1)
        return list(LETTERS[start : start + count])
    if rng.random() < 0.25:
        return _odd_labels(rng, count, longest)
    fitting = [label for label in LABELS if len(label) <= longest]
    if rng.random() < 0.5:
        start = rng.randrange(len(fitting) - count + 1)
        return fitting[start : start + count]
    return rng.sample(fitting, count)


def _odd_labels(rng: Random, count: int, longest: int) -> list[str]:
    """Labels that must be read: made up, any words, or known ones but for a letter or an s at the end."""
    found: list[str] = []
    while len(found) < count:
        known, kind = rng.choice(LABELS), rng.random()
        if kind < 0.35:
            label = rng.choice(COMMON).capitalize()
        elif kind < 0.6:
            label = _made_up(rng, rng.randint(3, max(3, min(6, longest)))).capitalize()
        elif kind < 0.8:
            label = known[:-1] if known.endswith("s") else f"{known}s"
        else:
            at = rng.randrange(1, len(known))
            label = known[:at] + rng.choice(string.ascii_lowercase) + known[at + 1 :]
        if 3 <= len(label) <= longest and label not in (*found, *COLUMNS):
            found.append(label)
    return found


def headings(rng: Random, count: int) -> list[str]:
    """Different headings of columns: usual ones, or any words of up to six letters."""
    found: list[str] = []
    is_usual = rng.random() < 0.6
    while len(found) < count:
        name = rng.choice(COLUMNS) if is_usual else rng.choice(COMMON).capitalize()
        if len(name) <= 6 and name not in (*found, "Name"):  # the key of a row's label
            found.append(name)
    return found


def _made_up(rng: Random, length: int) -> str:
    if rng.random() < 0.5:
        return "".join(rng.choices(string.ascii_lowercase, k=length))
    turn = rng.randrange(2)
    return "".join(rng.choice("aeiouy" if (i + turn) % 2 else "bcdfghjklmnpqrstvwxz") for i in range(length))
