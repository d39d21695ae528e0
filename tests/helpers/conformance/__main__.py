"""What each family of the zoo answers beside Transformers; `--markdown docs/models.md` writes it there."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.helpers.conformance.markdown import write
from tests.helpers.conformance.modes import compare
from tests.helpers.families.zoo import ZOO


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.helpers.conformance", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="all if none is named")
    parser.add_argument("--trace", action="store_true", help="the whole traceback of what fails")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="rewrite the list in this page")
    options = parser.parse_args()
    served = [name for name in options.families or ZOO if ZOO[name].refusal is None]
    results = answers(served, trace=options.trace)
    if options.markdown is not None:
        write(options.markdown, [name for name in served if not results[name]])
    return int(any(results.values()))


def answers(names: Sequence[str], *, trace: bool) -> Mapping[str, str]:
    """By family: what differs, or nothing."""
    found: dict[str, str] = {}
    for name in names:
        start = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[name] = "; ".join(compare(name, ZOO[name], Path(folder)).differences)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}".replace("\n", " ")
                if trace:
                    traceback.print_exc()
        print(f"{name:32} {time.process_time() - start:5.1f} s  {found[name] or 'equal'}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
