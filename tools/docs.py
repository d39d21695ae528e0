"""Writes the generated parts of the documentation: `python -m tools.docs`; `--check` fails if one is stale.

docs/modules.md comes from the docstrings of packages, docs/options.md from `saccade.options.engine`, the lists of
docs/coming_from_vllm.md from `saccade.options.vllm.table`, docs/metrics.md from
`saccade.server.metrics`, docs/python.md from the public classes, the example of docs/plan.md from
`saccade plan`, and the result tables from docs/results/*.json, which the benchmarks write with `--json`.
In other files only what stands between
`<!-- generated: NAME -->` and `<!-- end of generated: NAME -->` is replaced.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import io
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from benchmarks.gpu_rows import ROWS
from benchmarks.results import cell
from saccade.cli.main import main as run_command
from saccade.engine.encoders.encoder_set import EncoderView
from saccade.engine.ipc.client import EngineStatus, ReplicaView
from saccade.options.engine import Options
from saccade.options.server import ServerOptions
from saccade.options.vllm.table import CALLS, TABLE, Keyword
from saccade.server.engine_metrics import REMOTE_COUNTERS, TIER_COUNTERS, TIER_GAUGES
from saccade.server.metrics import Metrics
from tools.python_reference import python_page

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
PLAN = "saccade plan Qwen/Qwen3-VL-8B --gpu h200 --rate 50 --slo-ttft-ms 500 --repeated 0.3"
_BLOCK = re.compile(r"<!-- generated: (\S+) -->\n.*?<!-- end of generated: \1 -->", re.DOTALL)
_NOTE = "<!-- Written by `python -m tools.docs`; change the source it names, then run that again. -->"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a file is stale")
    args = parser.parse_args(argv)
    for path, text in stale_files().items():
        print(f"{'stale' if args.check else 'written'}: {path.relative_to(ROOT)}")
        if not args.check:
            path.write_text(text, encoding="utf-8")
    return 1 if args.check and stale_files() else 0


def stale_files() -> dict[Path, str]:
    """Files that differ from what their sources give, with the text they should have."""
    stale = {}
    for path, text in generated_files():
        if not path.exists() or path.read_text("utf-8") != text:
            stale[path] = text
    return stale


def generated_files() -> Iterator[tuple[Path, str]]:
    yield ROOT / "docs" / "modules.md", modules_page()
    yield ROOT / "docs" / "options.md", options_page()
    yield ROOT / "docs" / "metrics.md", metrics_page()
    yield ROOT / "docs" / "python.md", python_page(_NOTE)
    tables = {**result_tables(), "plan": plan_example()}
    tables |= {f"vllm-{fate}": vllm_list(fate) for fate in ("supported", "renamed", "inert", "refused")}
    tables["vllm-calls"] = vllm_list("refused", CALLS)
    for name in ("README.md", "docs/benchmarks.md", "docs/plan.md", "docs/coming_from_vllm.md"):
        path = ROOT / name
        yield path, with_tables(path.read_text("utf-8"), tables)


def plan_example() -> str:
    """What `saccade plan` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_command(PLAN.split()[1:])
    return f"```\n$ {PLAN}\n{printed.getvalue()}```"


def with_tables(text: str, tables: Mapping[str, str]) -> str:
    """The text with each marked block replaced. A block of an unknown name is an error."""

    def block(match: re.Match[str]) -> str:
        name = match.group(1)
        return f"<!-- generated: {name} -->\n{tables[name]}\n<!-- end of generated: {name} -->"

    return _BLOCK.sub(block, text)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# --- modules ------------------------------------------------------------------------------------------------


def modules_page() -> str:
    """Each package, and the first sentence of its docstring."""
    rows = []
    for path in sorted((ROOT / "saccade").rglob("__init__.py"), key=lambda path: path.parent):
        folder = path.parent.relative_to(ROOT)
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        rows.append((f"[`{folder}/`](../{folder})", _cell(first_sentence(docstring))))
    parts = [
        "# Packages",
        _NOTE,
        "Each package with the first sentence of its docstring. [architecture.md](architecture.md) says\n"
        "how they work together, the docstring of a module what that module is.",
        table(("package", "what is in it"), rows),
    ]
    return "\n\n".join(parts) + "\n"


def first_sentence(docstring: str) -> str:
    """Up to the first full stop before white space or the end."""
    return re.split(r"(?<=\.)\s", docstring, maxsplit=1)[0]


# --- options ------------------------------------------------------------------------------------------------


def options_page() -> str:
    parts = [
        "# Options",
        _NOTE,
        "Every option of `saccade serve`, from `saccade/options/engine.py` and\n"
        "`saccade/options/server.py`. The engine's are keyword arguments of\n"
        "`LLM(...)` too, with underscores. An option is also an environment variable\n"
        "(`SACCADE_MAX_MODEL_LEN`) and a line of the file that `--config` names (`max_model_len: 4096`).\n"
        "Flags win over the environment, the environment over the file. An *automatic* value is chosen at\n"
        "start, and the log gives the reason.",
    ]
    for title, options in (("Engine", Options), ("Server", ServerOptions)):
        rows = [_option_row(option) for option in dataclasses.fields(options)]
        parts += [f"## {title}", table(("flag", "default", "what it does"), rows)]
    return "\n\n".join(parts) + "\n"


def _option_row(option: dataclasses.Field[Any]) -> tuple[str, str, str]:
    """As `saccade.cli.main` makes flags: a switch that is on by default has a flag that turns it off."""
    factory = option.default_factory
    default = option.default if factory is dataclasses.MISSING else factory()
    flag = f"--{option.name.replace('_', '-')}"
    if option.name == "model":
        flag = "MODEL"
    what = option.metadata["help"]
    if default is True:
        flag = f"--no-{flag.removeprefix('--').removeprefix('enable-')}"
        what = f"do not {what}"
    return f"`{flag}`", _default(default, "automatic" in what), _cell(what)


def _default(value: Any, is_automatic: bool) -> str:
    if isinstance(value, bool):
        return "not set"
    if value in (None, ()) or value == {}:
        return "*automatic*" if is_automatic else "none"
    if isinstance(value, dict):
        return f"`{','.join(f'{key}={count}' for key, count in value.items())}`"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, str):
        return f"`{value}`"
    return str(value)


# --- arguments of vLLM --------------------------------------------------------------------------------------


def vllm_list(fate: str, table: Mapping[str, Keyword] = TABLE) -> str:
    """The arguments of one fate, with one line for those of which the same is said."""
    names_by_text: dict[str, list[str]] = {}
    for row in table.values():
        if row.fate == fate:
            names_by_text.setdefault(row.what, []).append(f"`{row.name}`")
    lines = [f"- {', '.join(names)}: {what}" for what, names in names_by_text.items()]
    return "\n".join(fill(line, 130, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


# --- metrics ------------------------------------------------------------------------------------------------

_STATS = {
    "running": 0,
    "waiting": 0,
    "steps": 0,
    "preemptions": 0,
    "kv": {"used": 0, "idle": 0, "total": 1},
    "prefix_cache": {"queries": 0, "hits": 0},
    "kv_offload": {"total": 0, "used": 0, "blocks_out": 0, "blocks_in": 0, "hits": 0},
    "encoder_cache": {"hits": 0, "misses": 0, "slots_used": 0, "slots_total": 0},
    "tenants": {"": {"running": 0, "waiting": 0, "service": 0}},
    "gpu_memory": {"used": 0, "total": 0},
    "kv_events": {"batches": 0, "overflows": 0, "dropped": 0},
    "embedding_tiers": {"": dict.fromkeys((*TIER_COUNTERS, *TIER_GAUGES), 0)},
    "remote_encoders": dict.fromkeys(REMOTE_COUNTERS, 0),
    "encoder_cache_tenants": {"": {"hits": 0, "misses": 0, "slots": 0}},
}


class _Metric(NamedTuple):
    name: str
    kind: str
    labels: tuple[str, ...]
    what: str


def metrics_page() -> str:
    metrics = sorted(_metrics())
    parts = [
        "# Metrics",
        _NOTE,
        "What `GET /metrics` exposes, from `saccade/server/metrics.py`. `docs/grafana.json` is a dashboard\n"
        "over the `saccade:` names. The `vllm:` names carry the same values for dashboards made for vLLM. A\n"
        "counter's sample has the suffix `_total`; a histogram has `_bucket`, `_sum` and `_count`. The labels\n"
        "`replica` and `engine`, and the metrics of replicas, are there with `--replicas` above 1 only;\n"
        "those of encoder workers with `--encoders` only, those of GPU memory with a GPU only. Beside them\n"
        "are the usual metrics of the server's own process: `process_resident_memory_bytes`,\n"
        "`process_cpu_seconds_total`, `process_open_fds`, `process_max_fds`, `process_start_time_seconds`.",
    ]
    for prefix in ("saccade", "vllm"):
        rows = [
            (f"`{m.name}`", m.kind, ", ".join(f"`{label}`" for label in m.labels), _cell(m.what))
            for m in metrics
            if m.name.startswith(f"{prefix}:")
        ]
        parts += [f"## `{prefix}:`", table(("metric", "type", "labels", "what it counts"), rows)]
    return "\n\n".join(parts) + "\n"


def _metrics() -> Iterator[_Metric]:
    status = EngineStatus("ready", 0.0, 0, None, None)
    metrics = Metrics(
        "MODEL",
        lambda: _STATS,
        replicas=lambda: [ReplicaView(status, _STATS, 0)],
        encoders=lambda: [EncoderView(status, 0, 0)],
        status=lambda: status,
    )
    registries = (metrics.registry, metrics.tenants.registry)
    for collector in [one for registry in registries for one in registry._collector_to_names]:  # no public list
        own_labels = tuple(getattr(collector, "_labelnames", ()))
        for family in collector.collect():
            of_samples = (label for sample in family.samples[:1] for label in sample.labels if label != "le")
            labels = own_labels or tuple(of_samples)
            yield _Metric(family.name, family.type, labels, family.documentation)


# --- results ------------------------------------------------------------------------------------------------

Result = dict[str, Any]


class _Column(NamedTuple):
    title: str
    values: Mapping[str, float]


class _Row(NamedTuple):
    title: str
    keys: tuple[str, ...]  # values that stand in one cell, with slashes between them


_SHORT_ROWS = (
    _Row("decode step of 1 / 32 / 128 requests, 1k context, ms", ("decode_1", "decode_32", "decode_128")),
    _Row("first token of a text of 64 / 1,600 tokens, ms", ("text_64", "text_1600")),
    _Row("first token of a new 1280x960 JPEG / of the same again, ms", ("new_1280x960", "again_1280x960")),
    _Row("64 requests of one 1280x720 image each, images/s", ("throughput_64x720p",)),
    _Row("8 images of 1280x720 in one request, ms", ("many_8x720p",)),
)


def result_tables() -> dict[str, str]:
    """The tables by the name of their markers."""
    results = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("*.json"))}
    vllm = _Column("vLLM 0.26", results["gpu_vllm"]["qwen2_vl_2b"]["vllm"])
    ours = [_of_commit(results[name]) for name in ("gpu_earlier", "gpu_a96421b", "gpu")]
    floor = _Column("floor", results["gpu"]["qwen2_vl_2b"]["floor"])
    return {
        "cpu": _goals_table(results["cpu"]),
        "server": _goals_table(results["server"]),
        "gpu": _gpu_table(_SHORT_ROWS, [vllm, ours[-1]._replace(title="Saccade")]),
        "gpu-all": _gpu_table([_Row(title, (key,)) for key, title in ROWS.items()], [floor, vllm, *ours]),
    }


def _of_commit(result: Result) -> _Column:
    return _Column(f"Saccade {result['commit']}", result["qwen2_vl_2b"]["ours"])


def _gpu_table(rows: Iterable[_Row], columns: Sequence[_Column]) -> str:
    cells = []
    for row in rows:
        numbers = [" / ".join(cell(column.values.get(key)) for key in row.keys) for column in columns]
        cells.append((row.title, *numbers))
    return table(("work", *(column.title for column in columns)), cells)


def _goals_table(result: Result) -> str:
    """Rows of `benchmarks.cpu` or `benchmarks.server` that have a goal."""
    rows = [(row["name"], f"{row['value']:.3g}", row["goal"]) for row in result["rows"] if row["goal"]]
    return table(("measure", f"Saccade {result['commit']}", "goal"), rows)


if __name__ == "__main__":
    sys.exit(main())
