"""`saccade tune`: which settings are tried, what is measured, which one is recommended, how it is drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from saccade.apps.evaluation.chart import svg, text_chart, tuned_table
from saccade.apps.evaluation.client import ModelReply, ServerInfo
from saccade.apps.evaluation.questions import Question, QuestionSet, load_questions
from saccade.apps.evaluation.run import ScoredReply
from saccade.apps.evaluation.scoring import AnswerRule
from saccade.apps.evaluation.tune import Measurement, advise, choose_sizes, find_cliffs, paired_loss, with_images_only
from saccade.cli import main as cli
from saccade.errors import ConfigError
from tests.helpers.fakes.fake_api import FakeApi, error, fake_api, question_of

SKILLS = ("color", "words")
SACCADE = {"owned_by": "saccade", "multimodal": {"max_pixels": 8000}, "kv_cache": {"blocks": 100, "block_size": 16}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty pictures of 3,200 and 1,000 pixels; questions about colours and about words."""
    made = tmp_path / "set"
    made.mkdir()
    lines = []
    for index in range(20):
        Image.new("RGB", (80, 40) if index % 2 else (50, 20)).save(made / f"{index}.png")
        skill = SKILLS[index % 2]
        lines.append({"skill": skill, "pictures": [f"{index}.png"], "question": skill, "answer": "yes"})
    lines.append({"skill": "talk", "question": "Hello?", "answer": "yes"})
    (made / "questions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return made


def needs(**pixels: int) -> Callable[[dict[str, Any]], str]:
    """Answers right where pictures of a skill are not reduced below so many pixels."""

    def say(body: dict[str, Any]) -> str:
        return "yes" if body["mm_processor_kwargs"]["max_pixels"] >= pixels.get(question_of(body), 0) else "no"

    return say


def asked_sizes(api: FakeApi) -> list[int]:
    return list(dict.fromkeys(body["mm_processor_kwargs"]["max_pixels"] for body in api.bodies))


def run(folder: Path, url: str, *flags: str) -> int:
    return cli.main(["tune", "--url", url, "--questions", str(folder), *flags])


def measured(max_pixels: int, right: Sequence[bool], **more: Any) -> Measurement:
    """Questions take the skills in turn."""
    answered = [
        ScoredReply(Question(str(i), SKILLS[i % 2], "?", (), AnswerRule(("yes",))), ModelReply(""), is_right)
        for i, is_right in enumerate(right)
    ]
    given = {"first_token_ms": 5.0, "tokens_per_image": max_pixels / 100, "concurrency": 7, **more}
    return Measurement(max_pixels, answered, **given)


def questions_of(one: Measurement) -> QuestionSet:
    return QuestionSet("test", Path(), [answered.question for answered in one.answers])


# --- settings -----------------------------------------------------------------------------------------------------


def test_settings_halve_from_the_largest_picture_until_every_picture_is_reduced(folder: Path) -> None:
    assert choose_sizes(None, ServerInfo("m"), load_questions(str(folder))) == [3200, 1600, 800]


def test_settings_start_at_the_servers_limit_where_pictures_are_larger(folder: Path) -> None:
    assert choose_sizes(None, ServerInfo("m", max_pixels=2000), load_questions(str(folder))) == [2000, 1000]


def test_given_settings_are_tried_from_the_largest_down(folder: Path) -> None:
    questions = load_questions(str(folder))
    assert choose_sizes([100, 400, 100], ServerInfo("m", max_pixels=400), questions) == [400, 100]


def test_a_setting_above_the_servers_limit_is_refused_with_both_numbers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_api(needs(), **SACCADE) as api:
        assert run(folder, api.url, "--max-pixels", "9000,1000") == 1
    err = capsys.readouterr().err
    assert "9,000" in err and "8,000" in err and "--max-pixels 9000" in err and err.count("\n") == 1
    assert not api.bodies


def test_a_set_without_pictures_cannot_be_tuned(folder: Path) -> None:
    (folder / "questions.jsonl").write_text('{"question": "Hello?", "answer": "yes"}')
    with pytest.raises(ConfigError, match="nothing to tune"):
        with_images_only(load_questions(str(folder)))


# --- choosing -----------------------------------------------------------------------------------------------------


def test_the_smallest_setting_that_loses_nothing_is_recommended() -> None:
    tried = [measured(400, [True] * 20), measured(200, [True] * 20), measured(100, [False] * 20)]
    advice = advise(tried, questions_of(tried[0]))
    assert advice.max_pixels == 200
    assert "50% of the tokens" in advice.reason


def test_a_loss_beyond_one_standard_error_is_too_much() -> None:
    best, worse = measured(400, [True] * 20), measured(200, [True] * 17 + [False] * 3)
    loss, standard_error = paired_loss(worse, best)
    assert (loss, round(standard_error, 3)) == (0.15, 0.082)
    assert advise([best, worse], questions_of(best)).max_pixels == 400


def test_losses_that_gains_make_up_for_are_noise() -> None:
    best = measured(400, [True] * 17 + [False] * 3)
    other = measured(200, [False] * 3 + [True] * 13 + [False] * 2 + [True] * 2)  # loses four, wins two
    loss, standard_error = paired_loss(other, best)
    assert 0 < loss <= standard_error
    advice = advise([best, other], questions_of(best))
    assert advice.max_pixels == 200 and "within noise" in advice.reason


def test_a_cliff_is_named_with_its_group_and_both_sides() -> None:
    reads, half = [True] * 20, [index % 2 == 0 for index in range(20)]
    tried = [measured(400, reads), measured(200, reads), measured(100, half)]
    (cliff,) = find_cliffs(tried, questions_of(tried[0]))
    assert str(cliff) == "words: falls from 100% to 0% between 200 and 100 pixels"


def test_a_gentle_slope_is_no_cliff() -> None:
    tried = [measured(400, [True] * 40), measured(200, [True] * 38 + [False] * 2)]
    assert not find_cliffs(tried, questions_of(tried[0]))


# --- drawing ------------------------------------------------------------------------------------------------------


def test_the_plot_is_an_svg_with_a_curve_per_group_and_the_recommendation() -> None:
    tried = [measured(400, [True] * 20), measured(100, [index % 2 == 0 for index in range(20)])]
    questions = questions_of(tried[0])
    root = ElementTree.fromstring(svg(tried, advise(tried, questions), questions))
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 2
    assert {"color", "words", "recommended: 400"} <= set(texts)


def test_one_setting_can_be_drawn() -> None:
    tried = [measured(400, [True] * 4)]
    questions = questions_of(tried[0])
    assert "recommended: 400" in svg(tried, advise(tried, questions), questions)


def test_names_in_the_plot_are_escaped() -> None:
    tried = [measured(400, [True] * 4)]
    questions = QuestionSet("<me & you>", Path(), questions_of(tried[0]).questions)
    ElementTree.fromstring(svg(tried, advise(tried, questions), questions))


def test_the_chart_in_the_terminal_shows_the_groups_that_fall() -> None:
    tried = [measured(400, [True] * 20), measured(100, [index % 2 == 0 for index in range(20)])]
    questions = questions_of(tried[0])
    heading, first, second = text_chart(tried, advise(tried, questions), questions).splitlines()
    assert heading.split() == ["max_pixels", "all", "words"]
    assert first.endswith("100%  <- recommended") and second.endswith("0%")


def test_what_a_server_does_not_say_is_left_open() -> None:
    row = tuned_table([measured(400, [True] * 4, tokens_per_image=None, concurrency=None)]).splitlines()[1]
    assert row.split() == ["400", "100.0%", "color", "100%", "-", "5", "ms", "-"]


# --- the command --------------------------------------------------------------------------------------------------


def test_tune_finds_the_cliff_of_a_server(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_api(needs(words=1600), **SACCADE) as api:
        assert run(folder, api.url) == 0
    out = capsys.readouterr().out
    assert asked_sizes(api) == [3200, 1600, 800]
    assert "recommended: max_pixels 1,600" in out
    assert "words: falls from 100% to 0% between 1,600 and 800 pixels" in out


def test_tokens_and_concurrency_follow_from_what_the_server_bills(folder: Path, tmp_path: Path) -> None:
    with fake_api(needs(), **SACCADE) as api:
        run(folder, api.url, "--json", str(tmp_path / "found.json"), "--max-pixels", "3200")
    (setting,) = json.loads((tmp_path / "found.json").read_text())["settings"]
    assert setting["tokens_per_picture"] == 32
    assert setting["concurrency"] == 33  # 10 + 32 + 6 tokens are 3 of 100 blocks


def test_first_tokens_are_timed_alone_before_the_questions_are_asked(folder: Path) -> None:
    with fake_api(needs(), **SACCADE) as api:
        run(folder, api.url, "--max-pixels", "3200")
    assert api.bodies[:20] == api.streamed and len(api.bodies) == 40
    assert all(body["max_tokens"] == 1 for body in api.streamed)


def test_no_run_of_tune_meets_the_caches_of_another(folder: Path) -> None:
    with fake_api(needs(), **SACCADE) as api:
        for _ in range(2):
            run(folder, api.url, "--max-pixels", "3200")
    assert len({body["cache_salt"] for body in api.bodies}) == 2


def test_servers_of_others_get_no_field_of_ours(folder: Path) -> None:
    with fake_api(needs()) as api:
        assert run(folder, api.url, "--max-pixels", "3200") == 0
    assert "cache_salt" not in api.bodies[0]


def test_a_model_of_one_picture_size_is_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_api(lambda body: error(400, "one size only"), **SACCADE) as api:
        assert run(folder, api.url) == 1
    err = capsys.readouterr().err
    assert "refuses every request with max_pixels 3,200: 400: one size only" in err and err.count("\n") == 1


def test_the_plot_and_the_page_are_written(folder: Path, tmp_path: Path) -> None:
    plot, page = tmp_path / "tune.svg", tmp_path / "page.md"
    page.write_text("<!-- saccade tune -->\n<!-- end of saccade tune -->\n")
    with fake_api(needs(words=1600), **SACCADE) as api:
        run(folder, api.url, "--plot", str(plot), "--markdown", str(page))
    assert plot.read_text().startswith("<svg")
    assert "recommended: max_pixels 1,600" in page.read_text()


def test_sizes_that_are_no_numbers_are_a_usage_error(folder: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        run(folder, "http://127.0.0.1:9", "--max-pixels", "small")
    assert caught.value.code == 2


def test_the_built_in_model_needs_its_pixels_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real server: the smallest setting leaves words of a few pixels, which nothing can read."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = tmp_path / "found.json"
    flags = ["--limit", "14", "--max-pixels", "102400,1024", "--kv-cache-gb", "0.05", "--json", str(found)]
    assert cli.main(["tune", *flags]) == 0
    full, tiny = json.loads(found.read_text())["settings"]
    assert full["groups"]["reading"] > tiny["groups"]["reading"]
    assert full["tokens_per_picture"] > 10 * tiny["tokens_per_picture"]
    assert full["concurrency"] < tiny["concurrency"]
