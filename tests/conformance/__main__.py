"""`python -m tests.conformance [FAMILY ...]`: what each family of the zoo answers beside Transformers."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.conformance.modes import compare
from tests.helpers.families.zoo import ZOO


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("families", nargs="*", choices=[*ZOO, []], metavar="FAMILY", help="all if none is named")
    parser.add_argument("--trace", action="store_true", help="the whole traceback of what fails")
    options = parser.parse_args()
    failed = 0
    for name in options.families or list(ZOO):
        start = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = compare(name, ZOO[name], Path(folder))
                said = "; ".join(result.differences) or f"EQUAL ({len(result.prompts)} prompts)"
                failed += bool(result.differences)
            except Exception as error:
                said = f"{type(error).__name__}: {error}".replace("\n", " ")[:400]
                failed += 1
                if options.trace:
                    traceback.print_exc()
        print(f"{name:32} {time.process_time() - start:5.1f} s  {said}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
