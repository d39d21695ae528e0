"""Chat templates that never end, fill the memory or break: one sentence for the chat that met them, and no one else.

The templates here misbehave when a message says so, as one in a hostile checkpoint would.
"""

from __future__ import annotations

import errno
import gc
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from saccade import LLM, SamplingParams
from saccade.errors import ConfigError, EngineUnavailable, RequestError
from saccade.helpers.process import thread_seconds
from saccade.options.engine import Options
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.input_processor import Processor
from saccade.processor.template import RESERVED, _environment
from saccade.processor.template_pool import MAX_SLOW, THREADS, TemplateEnded, TemplatePool
from tests.helpers.media.images import make_photo, png
from tests.helpers.media.prompts import POLICY, chat_refusal, make
from tests.helpers.servers.hostile import watching
from tests.helpers.servers.serving import (
    RunningServer,
    chat_body,
    error_of,
    image_part,
    image_url,
    running_builtin,
    running_server,
    text_part,
    until,
)

pytestmark = pytest.mark.transformers

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DEEDS = {
    "loops": LOOP,
    "recurses": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "writes": "{% for a in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
    "fills": "{% set n = namespace(x='x') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "counts": "{{ (messages | length + 9) ** (messages | length + 99999999) }}",  # one operation of the interpreter
    "fails": "{{ messages[0].nothing.at_all }}",
    "adds": "{{ messages[0].content + 1 }}",
    "escapes": "{{ messages.append(messages) }}",
    "scolds": "{{ raise_exception('no ' * 9999) }}",
    "rants": "{{ raise_exception(said * 9999999) }}",
}
ENDED = ("loops", "fills", "counts")
LIBRARY_WORDS = ("jinja", "undefined", "object", "attribute", "concatenate", "argument", "Error", "sandbox", "\n")


def template_of(deeds: dict[str, str]) -> str:
    """Does what the last message says; any other message is shown."""
    cases = "".join(f"{{% if said == '{name}' %}}{deed}{{% endif %}}" for name, deed in deeds.items())
    return "{% set said = messages[-1].content %}" + cases + "<|im_start|>user\n{{ said }}<|im_end|>\n"


TEMPLATE = template_of(DEEDS)


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def template_pool() -> Iterator[TemplatePool]:
    made = TemplatePool(TEMPLATE, 0.3, 1 << 20)
    yield made
    made.close()


def workers(pid: int | None = None) -> set[int]:
    """Processes that render, below this one."""
    below = psutil.Process(pid).children(recursive=True)
    return {child.pid for child in below if _is_worker(child)}


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "saccade.processor.template_worker" in process.cmdline()
    except psutil.Error:  # it has just ended
        return False


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:  # and was waited for
        return True


# --- one chat -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deed", DEEDS)
def test_a_template_that_misbehaves_ends_its_chat_and_no_other(template_pool: TemplatePool, deed: str) -> None:
    with pytest.raises(RequestError, match="the model's chat template") as caught:
        template_pool.render(messages=said(deed))
    assert isinstance(caught.value, TemplateEnded) == (deed in ENDED)
    assert caught.value.param == "messages"
    assert "hello" in template_pool.render(messages=said("hello"))


@pytest.fixture(scope="module")
def hostile_processor(qwen2_vl_folder: Path) -> Iterator[Processor]:
    checkpoint = replace(open_checkpoint(str(qwen2_vl_folder)), chat_template=TEMPLATE)
    processor = Processor(checkpoint, replace(POLICY, template_seconds=0.2))
    yield processor
    processor.close()


@pytest.mark.parametrize("deed", DEEDS)
def test_what_went_wrong_is_one_short_sentence_of_ours(hostile_processor: Processor, deed: str) -> None:
    message = chat_refusal(hostile_processor, said(deed)).message
    assert len(message) <= 500 and not any(word in message for word in LIBRARY_WORDS)


def test_a_template_that_cannot_be_compiled_is_the_operators_and_costs_one_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for broken in ("{% if %}", "{{ " + "(" * 50_000, "{% for a in [1] %}" * 50 + "{% endfor %}" * 50):
        template_pool = TemplatePool(broken, 1.0, 1 << 20)
        for _ in range(3):
            with pytest.raises(ConfigError, match=r"^the checkpoint's chat template cannot be compiled"):
                template_pool.render(messages=said("hello"))
        template_pool.close()
    assert len(caplog.records) == 3 and "line 1" in caplog.text


def test_the_time_of_a_slow_chat_counts_in_both_lanes(template_pool: TemplatePool) -> None:
    start = thread_seconds()
    with pytest.raises(TemplateEnded):
        template_pool.render(messages=said("loops"))
    assert thread_seconds() - start > 0.2  # of 0.05 and 0.3, as the kernel measures them


def test_a_process_that_cannot_be_started_is_the_servers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    template_pool = TemplatePool(TEMPLATE, 1.0, 1 << 20)
    with monkeypatch.context() as patch, pytest.raises(EngineUnavailable, match="cannot be started"):
        patch.setattr(subprocess, "Popen", _without_descriptors)
        template_pool.render(messages=said("hello"))
    assert "hello" in template_pool.render(messages=said("hello"))
    template_pool.close()


def _without_descriptors(*_: Any, **__: Any) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def test_what_cannot_fit_is_not_even_sent() -> None:
    before, template_pool = workers(), TemplatePool(TEMPLATE, 1.0, 1000)
    with pytest.raises(RequestError, match=r"have 5\d\d\d bytes, more than the context can hold") as caught:
        template_pool.render(messages=said("x" * 5000))
    assert caught.value.code == "context_length_exceeded" and workers() == before


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_names_that_a_template_relies_on_cannot_be_given(qwen2_vl_folder: Path, name: str) -> None:
    error = chat_refusal(make(qwen2_vl_folder), said("x"), chat_template_kwargs={name: 1})
    assert (error.message, error.param) == (f"chat_template_kwargs cannot set {name}", f"chat_template_kwargs.{name}")


def test_all_that_templates_find_is_reserved() -> None:
    assert set(_environment().globals) < RESERVED


def test_images_never_travel_to_the_process(qwen2_vl_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    plain = TemplatePool._body
    monkeypatch.setattr(
        TemplatePool, "_body", lambda self, context: sent.append(len(body := plain(self, context))) or body
    )
    processor, photo = make(qwen2_vl_folder), make_photo(600, 400)
    for image in ({"type": "image", "image": photo}, image_part(image_url(600, 400)), image_part(png(photo))):
        processor.from_chat([{"role": "user", "content": [image, text_part("What is this?")]}])
    assert len(sent) == 5 and max(sent) < 400
    processor.close()


@pytest.mark.parametrize("seconds", [0, -1, 601, float("nan"), float("inf")])
def test_the_time_of_a_template_has_bounds(seconds: float) -> None:
    with pytest.raises(ConfigError, match="chat_template_timeout must be above 0 and at most 600 seconds"):
        Options(chat_template_timeout=seconds)


# --- many chats ---------------------------------------------------------------------------------------------------


def test_slow_chats_wait_for_each_other_and_others_do_not_wait_for_them() -> None:
    """More slow chats than there are threads for them, sent first; then a quick one."""
    template_pool = TemplatePool(TEMPLATE, 0.3, 1 << 20)
    with ThreadPoolExecutor(THREADS) as pool:
        slow = [pool.submit(template_pool.render, messages=said("loops")) for _ in range(2 * MAX_SLOW)]
        quick = pool.submit(template_pool.render, messages=said("hello"))
        assert "hello" in quick.result(60)
        assert sum(not chat.done() for chat in slow) > 2  # it has overtaken those that wait, too
        errors = [chat.exception(60) for chat in slow]
    template_pool.close()
    refused = [error for error in errors if isinstance(error, RequestError) and error.code == "overloaded"]
    assert refused and all(isinstance(error, TemplateEnded) for error in errors if error not in refused)


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_chat_that_was_given_up_leaves_no_answer_for_the_next(
    template_pool: TemplatePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    template_pool.render(messages=said("hello"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("saccade.helpers.process._Child._receive_into", _interrupted)
        template_pool.render(messages=said("first"))
    assert "second" in template_pool.render(messages=said("second"))


def test_a_process_that_was_killed_is_started_again(template_pool: TemplatePool) -> None:
    template_pool.render(messages=said("hello"))
    killed = [psutil.Process(pid) for pid in workers()]
    for process in killed:
        process.kill()
    assert until(lambda: all(map(_has_ended, killed)))
    assert "hello" in template_pool.render(messages=said("hello"))


# --- no process is left -------------------------------------------------------------------------------------------


def test_closing_ends_the_processes_and_whoever_waits_for_them() -> None:
    before, template_pool = workers(), TemplatePool(TEMPLATE, 600.0, 1 << 20)
    with ThreadPoolExecutor(1) as pool:
        endless = pool.submit(template_pool.render, messages=said("loops"))
        assert until(lambda: len(workers() - before) == 2)  # quick, then slow
        template_pool.close()
        assert isinstance(endless.exception(30), TemplateEnded)
    assert workers() == before
    with pytest.raises(RuntimeError, match="closed"):
        template_pool.render(messages=said("hello"))


def test_a_renderer_that_nobody_has_any_more_leaves_no_process() -> None:
    before, template_pool = workers(), TemplatePool(TEMPLATE, 1.0, 1 << 20)
    template_pool.render(messages=said("hello"))
    assert len(workers() - before) == 1
    del template_pool
    gc.collect()
    assert workers() == before


def test_a_chat_in_python_leaves_no_process(qwen2_vl_folder: Path) -> None:
    before = workers()
    with LLM(str(qwen2_vl_folder), max_model_len=512, kv_cache_gb=0.02, device="cpu", use_tqdm=False) as llm:
        assert workers() == before
        llm.chat(said("hello"), SamplingParams(max_tokens=1), use_tqdm=False)
        assert len(workers() - before) == 1
    assert workers() == before


def test_counting_starts_none_and_loads_no_template_library(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(make_photo()))
    code = (
        "import subprocess, sys\n"
        "subprocess.Popen = None\n"
        "from saccade.cli.main import main\n"
        f"sys.argv = ['saccade', 'count', {str(tmp_path / 'a.png')!r}]\n"
        "status = main()\n"
        "sys.exit(status or 'jinja2' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize("deed", ["hello", "loops"])
def test_a_parent_that_is_killed_leaves_no_process(deed: str) -> None:
    """Idle or in the middle of a chat."""
    code = (
        "import sys, threading\n"
        "from saccade.processor.template_pool import TemplatePool\n"
        f"renderer = TemplatePool({TEMPLATE!r}, 1.0, 1 << 20)\n"
        "renderer.render(messages=[{'role': 'user', 'content': 'first'}])\n"
        f"ask = lambda: renderer.render(messages=[{{'role': 'user', 'content': {deed!r}}}])\n"
        "threading.Thread(target=ask).start()\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        children = [psutil.Process(pid) for pid in workers(parent.pid)]
        assert children
        parent.kill()
    assert until(lambda: not any(child.is_running() for child in children))


# --- a running server ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile(qwen2_vl_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("hostile") / "checkpoint"
    shutil.copytree(qwen2_vl_folder, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with running_server(folder, "--chat-template-timeout", "0.5") as server:
        yield server


def test_other_clients_are_answered_while_templates_run_without_end(hostile: RunningServer) -> None:
    """Three times as many endless chats as there are threads that make prompts, all at once."""
    ask = partial(hostile.chat, "hello", max_tokens=1)
    assert ask().status_code == 200
    with watching(hostile, ask) as watch, ThreadPoolExecutor(12) as pool:
        attacks = [pool.submit(hostile.chat, "loops") for _ in range(12)]
        assert until(lambda: len(workers(hostile.process.pid)) > 2)  # some are among the slow ones
        answered = ask()
        num_open = sum(not attack.done() for attack in attacks)
        ended = [attack.result(60) for attack in attacks]
    assert answered.status_code == 200 and num_open > 1
    assert watch.failures == [] and watch.api_growth_mb < 100
    assert {response.status_code for response in ended} <= {400, 429}
    assert any("took more than 0.5 s" in error_of(response)["message"] for response in ended)


def test_what_a_template_took_is_charged_to_its_client(hostile: RunningServer) -> None:
    before = hostile.stats("saccade:tenant_processor_seconds_total")
    assert hostile.chat("loops").status_code == 400
    assert hostile.stats("saccade:tenant_processor_seconds_total") - before > 0.25


@pytest.mark.parametrize("deed", [name for name in DEEDS if name != "loops"])
def test_a_template_that_misbehaves_is_a_400_and_no_memory_of_the_server(hostile: RunningServer, deed: str) -> None:
    with watching(hostile) as watch:
        response = hostile.chat(deed)
    assert response.status_code == 400 and error_of(response)["param"] == "messages"
    assert watch.failures == [] and watch.api_growth_mb < 100 and watch.engine_growth_mb < 100


@pytest.mark.parametrize("name", ["self", "caller", "range"])
def test_names_of_the_template_engine_are_refused_by_name(hostile: RunningServer, name: str) -> None:
    response = hostile.chat(chat_template_kwargs={name: 1})
    assert response.status_code == 400
    assert error_of(response)["param"] == f"chat_template_kwargs.{name}"


def test_clients_are_not_told_where_a_checkpoint_lies_and_a_stop_in_a_chat_without_end_leaves_no_process(
    qwen2_vl_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "my-model"
    shutil.copytree(qwen2_vl_folder, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    times = ("--chat-template-timeout", "600", "--drain-timeout", "0")
    with running_builtin(str(folder), *times) as server:  # without a name
        card = server.get("/v1/models").json()["data"][0]
        assert card["id"] == card["root"] == "my-model"
        wrong = server.chat(model="another")
        assert wrong.status_code == 404 and str(tmp_path) not in wrong.text
        assert server.chat(model="my-model").status_code == 200
        assert server.chat(model=str(folder)).json()["model"] == "my-model"
        assert server.get(f"/v1/models/{folder}").json()["id"] == "my-model"
        assert str(tmp_path) not in server.get("/metrics").text

        endless = chat_body("loops", model="my-model")
        threading.Thread(target=lambda: server.post("/v1/bill", endless), daemon=True).start()
        assert until(lambda: len(workers(server.process.pid)) == 2)
        pids = workers(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(120) == 0
        assert not any(psutil.pid_exists(pid) for pid in pids)
