from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from saccade.cli import main as cli
from saccade.cli import serve
from saccade.cli.conversation import Conversation, OfflineEngine
from tests.helpers.media.images import make_photo
from tests.helpers.media.videos import film

pytestmark = pytest.mark.transformers


@pytest.fixture
def images(tmp_path: Path) -> list[str]:
    paths = []
    for width, height in ((640, 480), (320, 240)):
        path = tmp_path / f"{width}.png"
        make_photo(width, height).save(path)
        paths.append(str(path))
    return paths


def test_count_prints_the_bill_of_each_image_as_json(
    images: list[str], qwen2_vl_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["count", "--model", str(qwen2_vl_folder), "--json", *images]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first == {
        "file": images[0], "width": 640, "height": 480, "resized_width": 644, "resized_height": 476,
        "tokens": 391, "kv_blocks": 25, "encoder_cache_bytes": 0, "pruned": 0,
    }  # fmt: skip
    assert second["tokens"] == 99


def test_count_works_without_a_model_and_adds_up(images: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["count", *images]) == 0
    out = capsys.readouterr().out
    assert "391" in out and "490" in out.splitlines()[-1]


def test_count_obeys_max_pixels(images: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["count", "--max-pixels", "100352", "--json", images[0]]) == 0
    assert json.loads(capsys.readouterr().out)[0]["tokens"] <= 128


@pytest.fixture
def video(tmp_path: Path) -> str:
    path = tmp_path / "a.mp4"
    path.write_bytes(film(30, size=(112, 84)))  # 3 s: 3 groups of 4 x 3 tokens
    return str(path)


def test_count_shows_what_pruning_saves_of_a_video(
    video: str, images: list[str], qwen2_vl_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = ["count", "--model", str(qwen2_vl_folder), "--video-pruning", "0.5"]
    assert cli.main([*counted, "--json", video]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["tokens"], row["pruned"], row["kv_blocks"]) == (12 + 6 + 6, 12, 2)
    assert cli.main([*counted, video, images[0]]) == 0
    head, first, _, total = capsys.readouterr().out.splitlines()
    assert head.split()[-1] == "pruned" and first.split()[-1] == total.split()[-1] == "12"
    assert cli.main(["count", video]) == 0
    assert "pruned" not in capsys.readouterr().out


def test_count_refuses_a_share_that_the_engine_would_refuse(video: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["count", "--video-pruning", "1", video]) == 2
    assert "video_pruning must be at least 0 and below 1" in capsys.readouterr().err


def test_max_pixels_are_those_of_frames_too(video: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["count", "--max-pixels", "3136", "--json", video]) == 0
    assert json.loads(capsys.readouterr().out)[0]["tokens"] == 3 * 2


@pytest.mark.parametrize("flags", [["--max-pixels", "0"], ["--max-pixels", "-5"], ["--min-pixels", "-5"]])
def test_pixel_limits_out_of_range_are_one_line(
    images: list[str], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["count", *flags, images[0]]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "must be a whole number of 1 or more" in err


def test_a_device_is_no_image(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["count", "/dev/zero"]) == 1
    assert "not a regular file" in capsys.readouterr().err


def test_count_never_imports_torch(images: list[str], qwen2_vl_folder: Path) -> None:
    code = (
        "import sys; from saccade.cli.main import main; "
        f"code = main(['count', '--model', {str(qwen2_vl_folder)!r}, {images[0]!r}]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_a_file_that_is_no_image_is_one_line_and_does_not_hide_the_others(
    images: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "notes.txt"
    bad.write_text("hello")
    assert cli.main(["count", "--json", str(bad), images[0]]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)[0]["tokens"] == 391
    assert captured.err.count("\n") == 1 and "notes.txt" in captured.err


def test_a_missing_model_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "/nowhere/model", "What?"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("saccade: ") and err.count("\n") == 1


@pytest.mark.parametrize(("model", "named", "chosen"), [("", None, None), (None, "b", "b"), ("a", None, "a")])
def test_a_model_that_is_an_empty_variable_is_none(model: str | None, named: str | None, chosen: str | None) -> None:
    args = argparse.Namespace(model=model, named_model=named)
    serve._find_model(args)
    assert args.model == chosen


def test_ctrl_c_while_a_command_is_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupted)
    assert cli.main(["count", "a.png"]) == 130


def test_a_usage_error_is_status_2() -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["count", "--max-pixels", "many", "x.png"])
    assert caught.value.code == 2


def test_every_option_is_a_flag_with_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "saccade.cli", "chat", "--help"], capture_output=True, text=True, check=True
    )
    for flag in (
        "--max-model-len",
        "--encoder-budget",
        "--no-prefix-caching",
        "--limit-mm-per-prompt",
        "--kv-cache-gb",
    ):
        assert flag in done.stdout


def test_chat_answers_one_question_and_prints_the_bill(
    images: list[str], qwen2_vl_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--max-tokens", "5", "--kv-cache-gb", "0.1", "--limit-mm-per-prompt", "image=2"]
    assert cli.main(["chat", str(qwen2_vl_folder), "--image", images[0], "What is this?", *flags]) == 0
    captured = capfd.readouterr()
    assert captured.out.strip()
    assert "640x480 = 391 tokens" in captured.err


def test_chat_without_a_model_asks_the_built_in_one(images: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    for words in (["--image", images[1], "What is this?"], ["What is this?", "--image", images[1]]):
        assert cli.main(["chat", *words, "--max-tokens", "3", "--kv-cache-gb", "0.05"]) == 0
        assert "320x240" in capfd.readouterr().err


def test_a_conversation_goes_on_after_a_bad_image_and_ctrl_c(
    qwen2_vl_folder: Path, images: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(
        [f"/image {images[1]}", "/image /nowhere.png", "ctrl-c", "And this?", "And now?", "ctrl-c here", "/quit"]
    )

    def typed(_: str) -> str:
        if (line := next(lines)) == "ctrl-c":
            raise KeyboardInterrupt
        return line

    def ask(conversation: Conversation, question: str) -> None:
        if question == "ctrl-c here":
            monkeypatch.setattr(OfflineEngine, "step", interrupted)
        usual(conversation, question)

    def interrupted(_: OfflineEngine) -> NoReturn:
        raise KeyboardInterrupt

    usual = Conversation.ask
    monkeypatch.setattr(Conversation, "ask", ask)
    monkeypatch.setattr("builtins.input", typed)
    assert cli.main(["chat", str(qwen2_vl_folder), "--max-tokens", "3", "--kv-cache-gb", "0.1"]) == 0
    err = capfd.readouterr().err
    assert "saccade: the picture file '/nowhere.png' cannot be read" in err
    assert err.count("99 tokens") == 2  # the second question still carries the picture
    assert "0 from the prefix cache" in err and "[ended early" in err


def test_chat_looks_for_the_picture_before_it_loads_the_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("saccade.cli.conversation.OfflineEngine")
    assert cli.main(["chat", "--image", "/nowhere.png", "What is this?"]) == 1
    assert "/nowhere.png" in capsys.readouterr().err


def test_a_result_that_cannot_be_written_is_found_out_first(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["eval", "--json", "/nowhere/x.json"], ["tune", "--plot", "/nowhere/x.svg"]):
        assert cli.main([*args, "--url", "http://127.0.0.1:9"]) == 1
        assert capsys.readouterr().err == f"saccade: {args[1]} {args[2]} cannot be written: No such file or directory\n"


def test_count_says_whose_rules_it_used(images: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["count", images[1]]) == 0
    assert "rules of Qwen2-VL" in capsys.readouterr().err
    assert cli.main(["count", "--model", "saccade-builtin", images[1]]) == 0
    printed = capsys.readouterr()
    assert " 300 " in printed.out and not printed.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["serve", "--max-model-len", "-3"], "saccade: max_model_len must be a whole number of 1 or more, not -3"),
        (["chat", "--kv-cache-gb", "-1", "hi"], "saccade: kv_cache_gb must be a number of 0 or more, not -1.0"),
    ],
)
def test_a_value_out_of_range_is_one_line_and_status_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(args) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_an_unknown_option_is_named_with_the_nearest_and_the_commands_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--gpu-memory-utilisation", "0.5"])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("usage: saccade serve") and "do you mean --gpu-memory-utilization?" in err
