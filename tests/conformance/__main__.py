"""`python -m tests.conformance [FAMILY ...]`: what each family of the zoo answers beside Transformers."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.conformance.modes import compare
from tests.helpers.families.zoo import ZOO


def main(names: list[str]) -> int:
    failed = 0
    for name in names or list(ZOO):
        start = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = compare(name, ZOO[name], Path(folder))
                said = "; ".join(result.differences) or f"EQUAL ({len(result.prompts)} prompts)"
                failed += bool(result.differences)
            except Exception as error:
                said = f"{type(error).__name__}: {error}".replace("\n", " ")[:400]
                failed += 1
        print(f"{name:32} {time.process_time() - start:5.1f} s  {said}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
