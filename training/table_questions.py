"""Questions about the places of rows and columns: steps on the way to finding a cell by two names."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from saccade.apps.evaluation.scoring import OTHER_NUMBER
from training.samples import Question
from training.shape_questions import counted
from training.sheet import listed, others

if TYPE_CHECKING:
    from training.charts import TableScene

ORDINALS = ("first", "second", "third", "fourth", "fifth")


def ask_places(rng: Random, table: TableScene) -> Question | None:
    return rng.choice((_row, _row, _column, _headings, _nth, _which, _cell, _count, _rows))(rng, table)


def _row(rng: Random, table: TableScene) -> Question:
    y = rng.randrange(len(table.rows))
    row = table.rows[y]
    text = rng.choice((f"Read the row {row}.", f"What is in the row {row}?", f"What are the values of {row}?"))
    named = [f"{column} {cell}" for column, cell in zip(table.columns, table.cells[y], strict=True)]
    return Question("table", text, f"{row} has {listed(named)}.", tuple(str(cell) for cell in table.cells[y]))


def _column(rng: Random, table: TableScene) -> Question:
    x = rng.randrange(len(table.columns))
    column = table.columns[x]
    cells = [str(cells[x]) for cells in table.cells]
    text = rng.choice((f"Read the column {column}.", f"What is in the column {column}?"))
    return Question("table", text, f"The column {column} has {listed(cells)}.", tuple(cells))


def _headings(rng: Random, table: TableScene) -> Question:
    text = rng.choice(("Which columns does the table have?", "What are the columns?", "Name the columns."))
    noun = "columns are" if len(table.columns) > 1 else "column is"
    return Question("table", text, f"The {noun} {listed(table.columns)}.", tuple(table.columns))


def _nth(rng: Random, table: TableScene) -> Question:
    x = rng.randrange(len(table.columns))
    place, column = ORDINALS[x], table.columns[x]
    text = rng.choice((f"What is the {place} column?", f"What is the {place} column called?"))
    wrong = tuple(name for name in table.columns if name != column)
    return Question("table", text, f"The {place} column is {column}.", (column,), wrong)


def _which(rng: Random, table: TableScene) -> Question:
    x = rng.randrange(len(table.columns))
    place, column = ORDINALS[x], table.columns[x]
    text = rng.choice((f"Which column is {column}?", f"Where is the column {column}?"))
    return Question("table", text, f"{column} is the {place} column.", (place,), others(ORDINALS, place))


def _cell(rng: Random, table: TableScene) -> Question | None:
    """Which column of a row holds a value."""
    y, x = rng.randrange(len(table.rows)), rng.randrange(len(table.columns))
    value = table.cells[y][x]
    if table.cells[y].count(value) > 1:
        return None
    column, row = table.columns[x], table.rows[y]
    wrong = tuple(name for name in table.columns if name != column)
    return Question(
        "table", f"Which column of {row} has the value {value}?", f"The column {column} has it.", (column,), wrong
    )


def _count(rng: Random, table: TableScene) -> Question:
    """Rows below the headings. Columns may be counted with the labels or without, so nobody is asked."""
    count = len(table.rows)
    text = rng.choice(("How many rows are there?", "How many rows does the table have?", "Count the rows."))
    return Question("table", text, f"{counted(count, 'row')}.", (str(count),), (OTHER_NUMBER,))


def _rows(rng: Random, table: TableScene) -> Question:
    text = rng.choice(("Which rows does the table have?", "What are the rows?", "Name the rows."))
    noun = "rows are" if len(table.rows) > 1 else "row is"
    return Question("table", text, f"The {noun} {listed(table.rows)}.", tuple(table.rows))
