"""`python -m tests.helpers.conformance.video_list docs/models.md` writes which families read videos there."""

from __future__ import annotations

import sys
import tempfile
import textwrap
from pathlib import Path

from tests.helpers.conformance.markdown import WIDTH, quoted
from tests.helpers.conformance.videos import compare
from tests.helpers.families.zoo import ZOO
from tests.helpers.families.zoo.videos import VIDEOS

BEGIN = "<!-- videos: python -m tests.helpers.conformance.video_list -->"
END = "<!-- end of videos -->"
READ = sorted(name for name, video in VIDEOS.items() if video.refusal is None)


def listed(equal: list[str]) -> str:
    text = f"Videos are answered as by Transformers in {len(equal)}: {quoted(equal)}."
    return "\n".join(textwrap.wrap(text, WIDTH, break_on_hyphens=False))


def names_in(page: Path) -> set[str]:
    inside = page.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    return set(inside.split("`")[1::2])


def main() -> int:
    page = Path(sys.argv[1])
    equal = []
    for name in READ:
        with tempfile.TemporaryDirectory() as folder:
            differences = compare(name, ZOO[name], VIDEOS[name], Path(folder)).differences
        print(f"{name:32} {'; '.join(differences) or 'equal'}", flush=True)
        equal += [] if differences else [name]
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{listed(equal)}\n{END}{rest.partition(END)[2]}", "utf-8")
    return int(len(equal) < len(READ))


if __name__ == "__main__":
    sys.exit(main())
