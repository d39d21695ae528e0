"""The time of day jumps when a clock is set. It is for what people read and what a folder keeps; waits never use it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2] / "saccade"
WALL_CLOCK = re.compile(r"\btime\.time\b|\btime_ns\b|\bdatetime\.(now|today|utcnow)\b|\bdate\.today\b")
ALLOWED = {
    "apps/batch/batch_store.py": "moments of files and batches, shown and kept on disk",
    "engine/encoders/socket_folder.py": "the age of a folder of another process, on disk",
    "engine/ipc/kv_event_publisher.py": "the moment of an event, shown",
    "processor/template.py": "the date in a prompt",
    "runner/embedding_tiers/folder.py": "ages of files, which processes share; a wrong one is evicted early or late",
    "server/api/chunks.py": "`created`, shown",
    "server/api/pooling.py": "`created`, shown",
    "server/api/responses.py": "`created`, shown",
    "server/batch_jobs.py": "`expires_at`, which outlives a restart; read once per start",
    "server/service.py": "`created`, shown",
    "server/tracing.py": "moments of spans, shown",
}


def test_the_time_of_day_is_read_only_where_it_is_shown_or_kept() -> None:
    files = sorted(ROOT.rglob("*.py"))
    found = {str(path.relative_to(ROOT)) for path in files if WALL_CLOCK.search(path.read_text("utf-8"))}
    assert found == set(ALLOWED), "durations and deadlines use time.monotonic()"
