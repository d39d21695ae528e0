"""Question sets: a folder or zip file with images and `questions.jsonl`, in the format of docs/evaluation.md.

A set is checked when it is loaded; errors name file and line.
"""

from __future__ import annotations

import io
import json
import mimetypes
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from PIL import Image, UnidentifiedImageError

from saccade.apps.evaluation.image_noise import Field, Grain, add_grain, field_from_image
from saccade.apps.evaluation.scoring import MATCHES, AnswerRule, Match
from saccade.errors import ConfigError, is_int_within
from saccade.types.media import Size

BUILTIN = Path(__file__).parent / "held_out.zip"
"""A thousand questions that the built-in model was not trained on."""

QUESTIONS = "questions.jsonl"
ABOUT = "set.json"
_FIELDS = frozenset(
    {"id", "skill", "pictures", "video", "question", "answer", "answers", "match", "forbidden", "request"}
)
_OWN_FIELDS = frozenset({"model", "messages", "stream"})  # of a request: the command's, not the question's

Root = Path | zipfile.Path


class ImageRef(NamedTuple):
    """An image of a set: its file, and the noise to add."""

    file: str
    field: str | None = None  # the file with the noise
    grain: Grain | None = None


@dataclass(frozen=True, slots=True)
class Question:
    id: str
    skill: str
    text: str
    images: tuple[ImageRef, ...]
    rule: AnswerRule
    request: Mapping[str, Any] = field(default_factory=dict)  # further fields of its request
    video: tuple[ImageRef, ...] = ()  # frames, shown after the images


class EncodedImage(NamedTuple):
    data: bytes
    media_type: str


@dataclass(frozen=True, slots=True)
class QuestionSet:
    name: str
    root: Root
    questions: Sequence[Question]
    goals: Mapping[str, float] = field(default_factory=dict)  # skill or group -> accuracy to reach
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)  # name -> skills
    refusal: str = ""  # what a reply holds that refuses to answer

    def image(self, ref: ImageRef) -> EncodedImage:
        data = (self.root / ref.file).read_bytes()
        if ref.field is None or ref.grain is None:
            return EncodedImage(data, mimetypes.guess_type(ref.file)[0] or "image/png")
        image = Image.open(io.BytesIO(data)).convert("RGB")
        noisy = add_grain(image, _field(self.root, ref.field), ref.grain)
        stream = io.BytesIO()
        noisy.save(stream, "PNG", compress_level=1)  # noise does not compress
        return EncodedImage(stream.getvalue(), "image/png")

    def sizes(self) -> list[Size]:
        """Sizes of all images, from their headers."""
        return [self._size(ref) for question in self.questions for ref in question.images]

    def _size(self, ref: ImageRef) -> Size:
        try:
            with (self.root / ref.file).open("rb") as stream, Image.open(cast(io.BytesIO, stream)) as image:
                return Size(*image.size)
        except (UnidentifiedImageError, OSError):
            raise ConfigError(f"{self.root / ref.file} is no picture that can be read") from None

    def grouped(self) -> Mapping[str, Sequence[str]]:
        """The groups, and each other skill as a group of its own; only skills that have questions."""
        skills_there = list(dict.fromkeys(question.skill for question in self.questions))
        groups = {
            name: [skill for skill in skills_there if skill in skills] for name, skills in self.groups.items()
        }
        grouped = {skill for skills in groups.values() for skill in skills}
        nonempty = {name: skills for name, skills in groups.items() if skills}
        return nonempty | {skill: [skill] for skill in skills_there if skill not in grouped}


@lru_cache(maxsize=4)
def _field(root: Root, name: str) -> Field:
    with Image.open(io.BytesIO((root / name).read_bytes())) as image:
        return field_from_image(image)


def load_questions(path: str | None = None, limit: int | None = None) -> QuestionSet:
    """The set at `path`, or the built-in one."""
    where = BUILTIN if path is None else Path(path)
    root = _root(where)
    file = root / QUESTIONS
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not UTF-8 text") from None
    questions = [_question(root, f"{file}:{i}", line) for i, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise ConfigError(f"{file} has no questions")
    return QuestionSet(root=root, questions=questions[:limit], **_about(root, where))


def _root(where: Path) -> Root:
    """The folder with questions.jsonl; in a zip file it may be the only folder at the top."""
    if not where.exists():
        message = f"{where} does not exist; a question set is a folder or a zip file with {QUESTIONS}"
        raise ConfigError(message)
    root: Root = where
    if where.is_file():
        if not zipfile.is_zipfile(where):
            message = f"{where} is neither a folder nor a zip file; give the folder that has {QUESTIONS}"
            raise ConfigError(message)
        root = zipfile.Path(where)
        inner = [entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("__")]
        if len(inner) == 1 and not (root / QUESTIONS).exists():
            root = inner[0]
    if not (root / QUESTIONS).is_file():
        raise ConfigError(f"{where} has no {QUESTIONS}, so it is not a question set; see docs/evaluation.md")
    return root


def _question(root: Root, at: str, line: str) -> Question:
    try:
        raw = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{at}: this line is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{at}: a question is a JSON object, but this line is {line[:60]!r}")
    unknown = sorted(set(raw) - _FIELDS)
    if unknown:
        names = ", ".join(sorted(_FIELDS))
        raise ConfigError(f"{at}: {', '.join(unknown)} is no field of a question; they are {names}")
    return Question(
        id=_text(raw, "id", at, default=at.rpartition(":")[2]),
        skill=_text(raw, "skill", at, default="all"),
        text=_text(raw, "question", at),
        images=tuple(_image(root, entry, at) for entry in _list(raw, "pictures", at)),
        rule=_rule(raw, at),
        request=_request(raw, at),
        video=tuple(_image(root, entry, at) for entry in _list(raw, "video", at)),
    )


def _rule(raw: Mapping[str, Any], at: str) -> AnswerRule:
    if ("answer" in raw) == ("answers" in raw):
        raise ConfigError(f"{at}: give either answer or answers")
    answers = (_text(raw, "answer", at),) if "answer" in raw else _texts(raw, "answers", at)
    match = raw.get("match", "any")
    if match not in MATCHES:
        raise ConfigError(f"{at}: match must be one of {', '.join(MATCHES)}, not {match!r}")
    if not answers or not all(answer.strip() for answer in answers):
        raise ConfigError(f"{at}: an empty answer would be right whatever the reply; write what it must hold")
    return AnswerRule(answers, cast(Match, match), _texts(raw, "forbidden", at))


def _request(raw: Mapping[str, Any], at: str) -> Mapping[str, Any]:
    request = raw.get("request", {})
    if not isinstance(request, dict) or _OWN_FIELDS & set(request):
        names = ", ".join(sorted(_OWN_FIELDS))
        message = f"{at}: request is an object of further fields of the request, without {names}"
        raise ConfigError(f"{message}, not {request!r}")
    return request


def _image(root: Root, entry: Any, at: str) -> ImageRef:
    if isinstance(entry, str):
        return ImageRef(_file(root, entry, at))
    match entry:
        case {"file": file, "grain": dict() as grain, **more} if not more:
            pass
        case _:
            kinds = "the name of a file, or an object with file and grain"
            raise ConfigError(f"{at}: a picture is {kinds}, not {entry!r}")
    numbers: list[Any] = [grain.get(name) for name in Grain._fields]
    if set(grain) != {"field", *Grain._fields} or not all(is_int_within(n, 0) for n in numbers):
        names = ", ".join(Grain._fields)
        message = f"{at}: grain has field, the name of a file, and {names}, whole numbers, not {grain!r}"
        raise ConfigError(message)
    return ImageRef(_file(root, file, at), _file(root, grain["field"], at), Grain(*numbers))


def _file(root: Root, name: Any, at: str) -> str:
    """A set is sent to servers, so it may refer only to files inside it."""
    if not isinstance(name, str) or not name or name.startswith("/") or ".." in name.split("/"):
        raise ConfigError(f"{at}: a picture is the name of a file inside the set, not {name!r}")
    if not (root / name).is_file():
        raise ConfigError(f"{at}: the picture {name} is not in the set")
    return name


def _text(raw: Mapping[str, Any], name: str, at: str, default: str | None = None) -> str:
    value = raw.get(name, default)
    if not isinstance(value, str):
        problem = f"not {value!r}" if name in raw else "but it is missing"
        raise ConfigError(f"{at}: {name} must be text, {problem}")
    return value


def _list(raw: Mapping[str, Any], name: str, at: str) -> list[Any]:
    value = raw.get(name, [])
    if not isinstance(value, list):
        raise ConfigError(f"{at}: {name} must be a list, not {value!r}")
    return value


def _texts(raw: Mapping[str, Any], name: str, at: str) -> tuple[str, ...]:
    values = _list(raw, name, at)
    if not all(isinstance(value, str) for value in values):
        raise ConfigError(f"{at}: {name} must be a list of texts, not {values!r}")
    return tuple(values)


def _about(root: Root, where: Path) -> dict[str, Any]:
    """The set's optional name, goals, groups and refusal."""
    file = root / ABOUT
    if not file.is_file():
        return {"name": where.name}
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    about = {"name": where.name, **raw} if isinstance(raw, dict) else {}
    if not _is_about(about):
        fields = "name and refusal (texts), goals (skill or group: share) and groups (name: [skills])"
        raise ConfigError(f"{file} holds {fields}, not {raw!r}")
    return about


def _is_about(about: dict[str, Any]) -> bool:
    match {"refusal": "", "goals": {}, "groups": {}, **about}:
        case {"name": str(), "refusal": str(), "goals": dict() as goals, "groups": dict() as groups, **more}:
            are_shares = all(isinstance(goal, (int, float)) for goal in goals.values())
            return not more and are_shares and all(isinstance(skills, list) for skills in groups.values())
    return False
