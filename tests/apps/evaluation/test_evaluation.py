"""Question sets, scoring, and `saccade eval` against servers that do as they are told and against a real one."""

from __future__ import annotations

import base64
import io
import json
import signal
import subprocess
import sys
import threading
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from saccade.apps.evaluation import commands
from saccade.apps.evaluation.client import ModelReply, _reply
from saccade.apps.evaluation.image_noise import Grain, add_grain, field_from_image, field_to_image
from saccade.apps.evaluation.questions import load_questions
from saccade.apps.evaluation.report import rewrite, scores
from saccade.apps.evaluation.run import AskSettings, request_body, score
from saccade.apps.evaluation.scoring import OTHER_NUMBER, OTHER_QUOTE, AnswerRule, chance, json_fields
from saccade.apps.evaluation.serving import serving
from saccade.cli import main as cli
from saccade.errors import ConfigError
from tests.helpers.fakes.fake_api import error, fake_api, question_of
from tests.helpers.media.images import make_photo
from tests.helpers.servers.serving import until

LINES: list[dict[str, Any]] = [
    {"id": "a", "skill": "color", "pictures": ["red.png"], "question": "Which colour?", "answer": "red"},
    {"id": "b", "skill": "color", "pictures": ["blue.png"], "question": "And this?", "answers": ["blue", "navy"]},
    {"id": "c", "skill": "count", "pictures": [], "question": "How many?", "answer": "3", "forbidden": ["#"]},
]
RIGHT = {"Which colour?": "It is red.", "And this?": "Navy.", "How many?": "There are 3."}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "set"
    made.mkdir()
    for color in ("red", "blue"):
        Image.new("RGB", (40, 30), color).save(made / f"{color}.png")
    write_lines(made, LINES)
    return made


def write_lines(folder: Path, lines: list[Any]) -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "questions.jsonl").write_text("\n".join(texts))


def knows(body: dict[str, Any]) -> str:
    return RIGHT[question_of(body)]


def run(folder: Path, url: str, *flags: str) -> int:
    return cli.main(["eval", "--url", url, "--questions", str(folder), *flags])


# --- scoring ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [
        (AnswerRule(("red",), forbidden=("green", "blue")), "It is red.", "It is red or blue."),
        (AnswerRule(("3",), forbidden=(OTHER_NUMBER,)), "There are 3 shapes.", "There are 3 or 4 shapes."),
        (AnswerRule(("HELLO",), forbidden=(OTHER_QUOTE,)), 'It says "hello".', 'It says "hello" or "hallo".'),
    ],
)
def test_a_reply_that_hedges_is_wrong(rule: AnswerRule, right: str, wrong: str) -> None:
    assert rule.is_right(right)
    assert not rule.is_right(wrong)


def test_an_answer_must_stand_as_whole_words() -> None:
    assert not AnswerRule(("3",)).is_right("There are 33 shapes.")
    assert not AnswerRule(("red",)).is_right("I am bored.")


@pytest.mark.parametrize(
    ("match", "expected"), [("any", [True, True, True]), ("all", [True, False, False]), ("exact", [False, True, True])]
)
def test_match_says_how_much_must_be_there(match: Any, expected: list[bool]) -> None:
    rule = AnswerRule(("a ring", "a star"), match)
    assert [rule.is_right(reply) for reply in ("A star and a ring", "A star.", "a  ring")] == expected


def test_json_replies_are_compared_as_bags() -> None:
    rule = AnswerRule(('[{"shape": "star", "color": "red"}, {"shape": "ring", "color": "blue"}]',), "json")
    assert rule.is_right('[{"color":"blue","shape":"ring"},{"shape":"star","color":"red"}]')
    assert not rule.is_right('[{"color":"blue","shape":"ring"}]')
    assert not rule.is_right("a red star and a blue ring")


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ('{"total": 3.5, "items": [{"name": "Tea"}, {"name": "Rice"}]}', (3, 3, True)),
        ('{"items": [{"name": "Tea"}, {"name": "Corn"}], "total": 3.50, "more": 1}', (2, 3, True)),
        ('{"total": "3.5", "items": []}', (0, 3, True)),
        ('{"total": 3.5, "items": [', (0, 3, False)),
        ("<tool_call>{}</tool_call>", (0, 3, True)),
    ],
)
def test_json_is_scored_value_by_value(reply: str, found: tuple[int, int, bool]) -> None:
    assert json_fields('{"total": 3.5, "items": [{"name": "Tea"}, {"name": "Rice"}]}', reply) == found


def test_a_call_is_right_only_as_a_call() -> None:
    rule = AnswerRule(('<tool_call>\n{"name": "save", "arguments": {"paid": true}}\n</tool_call>',), "json")
    assert rule.is_right('<tool_call>{"name": "save", "arguments": {"paid": true}}</tool_call>')
    assert not rule.is_right('{"name": "save", "arguments": {"paid": true}}')


def test_chance_is_what_the_best_constant_reply_gets() -> None:
    assert chance([AnswerRule((answer,)) for answer in ("yes", "yes", "no", "yes")]) == 0.75


# --- question sets ------------------------------------------------------------------------------------------------


def test_the_built_in_set_has_a_thousand_questions_over_all_skills() -> None:
    questions = load_questions()
    first = Counter(question.skill for question in questions.questions[:1000])
    assert len(first) == 14 and set(first.values()) == {71, 72}
    later = Counter(question.skill for question in questions.questions[1000:])
    assert not first.keys() & later.keys() and {"document", "extract", "tool", "refuse", "video"} <= later.keys()
    parts = {f"{skill} {part}" for skill in later for part in ("fields", "valid")}
    assert questions.goals.keys() <= {*first, *later, *parts, *questions.groups, "not refused"}


def test_every_rule_of_the_built_in_set_takes_its_own_answer() -> None:
    for question in load_questions().questions:
        assert question.rule.is_right(question.rule.reply), question
        assert not question.rule.is_right("I do not know."), question


def test_every_kind_of_picture_of_the_built_in_set_can_be_read() -> None:
    questions = load_questions(limit=28)
    for question in questions.questions:
        for ref in question.images:
            with Image.open(io.BytesIO(questions.image(ref).data)) as image:
                assert image.width * image.height >= 8000


def test_grain_is_the_same_from_its_file_as_from_memory() -> None:
    field = np.random.default_rng(3).normal(0, 16, (80, 90, 3)).astype(np.int16)
    stream = io.BytesIO()
    field_to_image(field).save(stream, "PNG")
    image, grain = make_photo(50, 40), Grain(30, 20, 7)
    read = field_from_image(Image.open(stream))
    assert add_grain(image, read, grain).tobytes() == add_grain(image, field, grain).tobytes() != image.tobytes()


@pytest.mark.parametrize("prefix", ["", "my-set/"])
def test_a_zip_file_is_read_like_its_folder(folder: Path, tmp_path: Path, prefix: str) -> None:
    packed = tmp_path / "packed.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for file in folder.iterdir():
            archive.write(file, prefix + file.name)
    here, there = load_questions(str(folder)), load_questions(str(packed))
    assert here.questions == there.questions
    ref = here.questions[0].images[0]
    assert here.image(ref) == there.image(ref)


def test_a_question_needs_only_a_text_and_an_answer(folder: Path) -> None:
    write_lines(folder, [{"question": "How many?", "answer": "3"}])
    (question,) = load_questions(str(folder)).questions
    assert (question.id, question.skill, question.images) == ("1", "all", ())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "a question is a JSON object"),
        ({"answer": "x"}, "question must be text, but it is missing"),
        ({"question": 7, "answer": "x"}, "question must be text, not 7"),
        ({"question": "?"}, "either answer or answers"),
        ({"question": "?", "answer": "x", "answers": ["x"]}, "either answer or answers"),
        ({"question": "?", "answer": " "}, "an empty answer"),
        ({"question": "?", "answers": []}, "an empty answer"),
        ({"question": "?", "answer": "x", "match": "fuzzy"}, "match must be one of any, all, exact, json, not 'fuzzy'"),
        ({"question": "?", "answer": "x", "anwser": "y"}, "anwser is no field of a question"),
        ({"question": "?", "answer": "x", "pictures": "red.png"}, "pictures must be a list"),
        ({"question": "?", "answer": "x", "pictures": ["gone.png"]}, "the picture gone.png is not in the set"),
        ({"question": "?", "answer": "x", "pictures": ["../secret.png"]}, "inside the set"),
        ({"question": "?", "answer": "x", "pictures": ["/etc/hostname"]}, "inside the set"),
        ({"question": "?", "answer": "x", "pictures": [{"file": "red.png"}]}, "an object with file and grain"),
        ({"question": "?", "answer": "x", "pictures": [{"file": "red.png", "grain": {"field": "x"}}]}, "whole numbers"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(
    folder: Path, line: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(folder, [LINES[0], line])
    assert run(folder, "http://127.0.0.1:9") == 1
    err = capsys.readouterr().err
    assert err.startswith(f"saccade: {folder}/questions.jsonl:2: ") and said in err and err.count("\n") == 1


def test_a_folder_without_questions_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "nowhere", Path(__file__)):
        assert run(path, "http://127.0.0.1:9") == 1
        err = capsys.readouterr().err
        assert str(path) in err and "questions.jsonl" in err and err.count("\n") == 1


def test_a_set_may_have_a_name_goals_and_groups(folder: Path) -> None:
    about = {"name": "mine", "goals": {"color": 0.5}, "groups": {"seeing": ["color", "size"]}}
    (folder / "set.json").write_text(json.dumps(about))
    questions = load_questions(str(folder))
    assert (questions.name, questions.goals) == ("mine", {"color": 0.5})
    assert questions.grouped() == {"seeing": ["color"], "count": ["count"]}


@pytest.mark.parametrize("text", ["{", "[]", '{"goals": {"color": "high"}}', '{"gaols": {}}'])
def test_a_bad_description_of_a_set_is_one_sentence(folder: Path, text: str) -> None:
    (folder / "set.json").write_text(text)
    with pytest.raises(ConfigError, match=r"set\.json"):
        load_questions(str(folder))


# --- asking -------------------------------------------------------------------------------------------------------


def test_a_server_that_knows_gets_everything_right(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_api(knows) as api:
        assert run(folder, api.url) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:4] for row in rows[1:4]] == [
        ["color", "2", "2", "100.0%"],
        ["count", "1", "1", "100.0%"],
        ["all", "3", "3", "100.0%"],
    ]


def test_pictures_are_sent_as_they_are_before_the_text_and_greedily(folder: Path) -> None:
    with fake_api(knows) as api:
        run(folder, api.url, "--limit", "1")
    (body,) = api.bodies
    picture, text = body["messages"][0]["content"]
    assert base64.b64decode(picture["image_url"]["url"].split(",")[1]) == (folder / "red.png").read_bytes()
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")
    assert (text["text"], body["temperature"], body["model"]) == ("Which colour?", 0, "fake")


def test_a_question_may_bring_fields_of_its_request(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {
            "skill": "form",
            "question": "As JSON?",
            "answer": '{"a": 1, "b": 2}',
            "match": "json",
            "request": {"seed": 7},
        },
        {"skill": "form", "question": "Again?", "answer": '{"a": 1}', "match": "json", "request": {"max_tokens": 9}},
    ]
    write_lines(folder, lines)
    with fake_api(lambda body: '{"a": 1, "b": 3}' if question_of(body) == "As JSON?" else "no") as api:
        run(folder, api.url)
    bodies = {question_of(body): body for body in api.bodies}
    assert bodies["As JSON?"]["seed"] == 7 and bodies["Again?"]["max_tokens"] == 9
    rows = {line[:12].strip(): line[12:].split()[:2] for line in capsys.readouterr().out.splitlines()}
    assert rows["form fields"] == ["1", "3"] and rows["form valid"] == ["1", "2"] and rows["all"] == ["0", "2"]


def test_the_request_of_a_question_has_no_messages(folder: Path) -> None:
    write_lines(folder, [{"question": "Why?", "answer": "so", "request": {"messages": []}}])
    with pytest.raises(ConfigError, match="without messages, model, stream"):
        load_questions(str(folder))


def test_calls_of_tools_are_read_as_hermes_writes_them() -> None:
    call = {"function": {"name": "save", "arguments": '{"total": 3}'}}
    answer = {"choices": [{"message": {"content": None, "tool_calls": [call]}}]}
    assert _reply(answer).text == '<tool_call>{"name": "save", "arguments": {"total": 3}}</tool_call>'


def test_goals_are_met_or_missed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "set.json").write_text('{"goals": {"color": 0.9, "count": 0.9}}')
    with fake_api(lambda body: "3") as api:
        assert run(folder, api.url) == 1
    printed = capsys.readouterr()
    _, color, count, *_ = printed.out.splitlines()
    assert color.endswith("90% missed") and count.endswith("90% met")
    assert printed.err.endswith("saccade: goals missed: color\n")


def test_a_refused_question_counts_as_wrong_and_the_others_go_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_api(lambda body: error(400, "no such colour") if "Which" in str(body) else knows(body)) as api:
        assert run(folder, api.url) == 0
    out = capsys.readouterr().out
    assert "1 refused by the server" in out and "a: 400: no such colour" in out
    assert out.splitlines()[3].split() == ["all", "2", "3", "66.7%"]


def test_a_busy_server_is_asked_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = iter([error(429, "later"), error(503, "later")])
    with fake_api(lambda body: next(said, knows(body))) as api:
        assert run(folder, api.url, "--concurrency", "1") == 0
    assert "100.0%" in capsys.readouterr().out.splitlines()[3]
    assert len(api.bodies) == 5


def test_a_connection_that_breaks_off_once_costs_no_question(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = iter([None])
    with fake_api(lambda body: next(said, knows(body))) as api:
        assert run(folder, api.url, "--concurrency", "1") == 0
    assert len(api.bodies) == 4
    assert "100.0%" in capsys.readouterr().out.splitlines()[3]


def test_a_wrong_key_ends_the_run_with_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_api(lambda body: error(401, "no such key")) as api:
        assert run(folder, api.url, "--api-key", "secret") == 1
    err = capsys.readouterr().err
    assert "401: no such key; give the key with --api-key" in err and err.count("\n") == 1
    assert api.keys[0] == "Bearer secret"


def test_a_server_that_is_not_there_is_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "http://127.0.0.1:9") == 1
    err = capsys.readouterr().err
    assert "http://127.0.0.1:9 cannot be reached" in err and err.count("\n") == 1


@pytest.mark.parametrize("flags", [["--limit", "0"], ["--concurrency", "0"], ["--kv-cache-gb", "1"]])
def test_flags_that_cannot_work_are_one_sentence(
    folder: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "http://127.0.0.1:9", *flags) == 1
    err = capsys.readouterr().err
    assert flags[0] in err and err.count("\n") == 1


def test_another_models_name_is_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_api(knows) as api:
        assert cli.main(["eval", "other", "--url", api.url + "/v1/", "--questions", str(folder)]) == 1
    assert "serves no model 'other'; it names fake" in capsys.readouterr().err


def _hear_interrupts() -> None:
    """Whoever was started in the background ignores them, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_prints_the_table_so_far(folder: Path) -> None:
    hold = threading.Event()

    def say(body: dict[str, Any]) -> str:
        if "many" in question_of(body):
            hold.wait(120)
        return knows(body)

    with fake_api(say) as api:
        command = ["eval", "--url", api.url, "--questions", str(folder), "--concurrency", "1"]
        child = subprocess.Popen(
            [sys.executable, "-m", "saccade.cli", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=_hear_interrupts,
        )  # fmt: skip
        assert until(lambda: len(api.bodies) == 3)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=120)
        hold.set()
    assert child.returncode == 130
    assert "interrupted after 2 of 3 questions" in err
    assert out.splitlines()[-1].split() == ["all", "2", "2", "100.0%"]


# --- reports ------------------------------------------------------------------------------------------------------


def test_json_has_every_reply(folder: Path, tmp_path: Path) -> None:
    with fake_api(lambda body: "Navy or 3.") as api:
        run(folder, api.url, "--json", str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["right"] == 2 and found["skills"]["color"]["accuracy"] == 0.5
    assert found["answers"][0] == {"id": "a", "skill": "color", "right": False, "reply": "Navy or 3."}


def test_wrong_answers_are_shown_on_request(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_api(lambda body: "Green.") as api:
        run(folder, api.url, "--show-wrong", "2", "--concurrency", "1")
    out = capsys.readouterr().out
    assert "a: Which colour?\n  expected 'red', got 'Green.'" in out and out.count("expected") == 2


def test_markdown_is_rewritten_between_its_markers(folder: Path, tmp_path: Path) -> None:
    card = tmp_path / "card.md"
    card.write_text("before\n<!-- saccade eval -->\nold\n<!-- end of saccade eval -->\nafter\n")
    with fake_api(knows) as api:
        assert run(folder, api.url, "--markdown", str(card)) == 0
    text = card.read_text()
    assert text.startswith("before\n<!-- saccade eval -->\n```\nskill") and text.endswith("\nafter\n")
    assert "100.0%" in text and "old" not in text


def test_markdown_keeps_what_looks_like_a_pattern(tmp_path: Path) -> None:
    card = tmp_path / "card.md"
    card.write_text("<!-- x -->\n<!-- end of x -->\n")
    rewrite(str(card), "x", r"a \1 b")
    assert r"a \1 b" in card.read_text()


def test_a_file_without_markers_is_refused_before_anything_is_asked(folder: Path, tmp_path: Path) -> None:
    card = tmp_path / "card.md"
    card.write_text("no place for a table")
    with fake_api(knows) as api:
        assert run(folder, api.url, "--markdown", str(card)) == 1
    assert not api.bodies


# --- a server of our own ------------------------------------------------------------------------------------------

SMALL = ("--kv-cache-gb", "0.05", "--max-num-seqs", "8", "--encoder-cache-gb", "0.01")


def test_without_a_url_a_server_is_started_and_asked_and_is_gone_afterwards(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = []

    @contextmanager
    def noted(*given: Any, **named: Any) -> Iterator[str]:
        with serving(*given, **named) as url:
            urls.append(url)
            yield url

    monkeypatch.setattr(commands, "serving", noted)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SACCADE_API_KEY", "of another server")
    assert cli.main(["eval", "--limit", "14", *SMALL]) == 0
    *_, total, summary = capsys.readouterr().out.splitlines()
    assert int(total.split()[1]) >= 12
    assert summary.startswith("14 questions, 32 at a time")
    (url,) = urls
    assert cli.main(["eval", "--url", url, "--limit", "1"]) == 1


def test_a_server_that_does_not_start_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", "/nowhere/model", "--limit", "1"]) == 1
    err = capsys.readouterr().err
    assert "the server did not start: " in err and "/nowhere/model" in err and err.count("\n") == 1


def test_skills_may_have_a_goal_together(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "set.json").write_text('{"goals": {"seeing": 0.5}, "groups": {"seeing": ["color", "count"]}}')
    with fake_api(knows) as api:
        run(folder, api.url)
    *_, seeing, whole, _ = capsys.readouterr().out.splitlines()
    assert seeing.split()[:3] == ["seeing", "3", "3"] and seeing.endswith("50% met")
    assert whole.split()[:3] == ["all", "3", "3"]  # nobody is counted twice


# --- videos and refusals ------------------------------------------------------------------------------------------


def test_frames_of_a_video_are_sent_as_one_video(folder: Path) -> None:
    write_lines(folder, [{"video": ["red.png", "blue.png"], "question": "What changes?", "answer": "color"}])
    questions = load_questions(str(folder))
    video, text = request_body(questions, questions.questions[0], AskSettings("m"))["messages"][0]["content"]
    head, *frames = video["video_url"]["url"].split(",")
    assert (video["type"], head, text["text"]) == ("video_url", "data:video/png;base64", "What changes?")
    assert [base64.b64decode(frame) for frame in frames] == [
        (folder / f"{c}.png").read_bytes() for c in ("red", "blue")
    ]


def test_refusals_are_counted_where_there_is_an_answer(folder: Path) -> None:
    lines = [{"pictures": ["red.png"], "question": "Colour?", "answer": "red"}] * 3
    write_lines(folder, [*lines, {"pictures": ["blue.png"], "question": "Who?", "answer": "I cannot"}])
    (folder / "set.json").write_text('{"refusal": "I cannot", "goals": {"not refused": 0.9}}')
    questions = load_questions(str(folder))
    replies = ("It is red.", "Blue.", "I cannot tell.", "I cannot tell.")
    answered = [score(q, ModelReply(text)) for q, text in zip(questions.questions, replies, strict=True)]
    line = scores(answered, questions)[-1]
    assert (line.skill, line.right, line.total, line.verdict) == ("not refused", 2, 3, "90% missed")


def test_a_refusal_is_text(folder: Path) -> None:
    (folder / "set.json").write_text('{"refusal": 1}')
    with pytest.raises(ConfigError, match=r"set\.json holds name and refusal"):
        load_questions(str(folder))
