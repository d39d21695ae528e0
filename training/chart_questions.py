"""Further ways to ask about a bar chart, and to ask for a cell of a table by what its column means."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from training.samples import Question
from training.sheet import listed

if TYPE_CHECKING:
    from training.charts import BarScene

_MEANT = {  # what a column's name lets one ask of a row
    "Price": ("How much is {}?", "What does {} cost?", "What is the price for {}?"),
    "Cost": ("How much is {}?", "What does {} cost?"),
    "Age": ("How old is {}?", "How many years old is {}?"),
    "Weight": ("How heavy is {}?", "How much does {} weigh?"),
    "Size": ("How large is {}?", "How big is {}?"),
    "Stock": ("How many {} are in stock?", "How much {} is in stock?"),
    "Score": ("What did {} score?", "How much did {} score?"),
    "Points": ("How many points does {} have?", "How many points did {} get?"),
    "Sales": ("How many {} were sold?", "How many sales does {} have?"),
}
_ALIKE = ({"Price", "Cost"}, {"Price", "Total"}, {"Cost", "Total"}, {"Score", "Points"}, {"Size", "Weight"})


def ways_to_a_cell(row: str, column: str, columns: list[str]) -> tuple[str, ...]:
    """Questions for this cell that fit no other column."""
    is_shared = any(column in pair and pair <= {*columns} for pair in _ALIKE)
    meant = () if is_shared else _MEANT.get(column, ())
    return (f"{column} of {row}?", f"What {column.lower()} does {row} have?", *(way.format(row) for way in meant))


def ask_bars(rng: Random, chart: BarScene) -> Question | None:
    kind = rng.random()
    if kind < 0.3:
        text = rng.choice(("What are the values?", "Read all the values.", "List the values.", "What are all values?"))
        said = [f"{bar.label} {bar.value}" for bar in chart.bars]
        return Question("chart", text, f"The values are {listed(said)}.", tuple(said))
    if kind < 0.4:
        text = rng.choice(("What kind of chart is this?", "What type of chart is it?", "Which kind of chart is it?"))
        return Question("chart", text, "It is a bar chart.", ("bar chart",))
    one, two = rng.sample(chart.bars, 2)
    if not chart.is_clear(one, two):
        return None
    word = rng.choice(("larger", "higher", "smaller", "lower"))
    is_so = (one.value > two.value) == (word in ("larger", "higher"))
    text = rng.choice((f"Is {one.label} {word} than {two.label}?", f"Is the bar {one.label} {word} than {two.label}?"))
    if is_so:
        return Question("chart", text, f"Yes, {one.label} is {word} than {two.label}.", ("yes",), ("no", "not"))
    return Question("chart", text, f"No, {one.label} is not {word} than {two.label}.", ("no",), ("yes",))
