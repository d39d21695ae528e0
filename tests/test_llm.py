"""The offline face: the lab's script unchanged, its three experiments, errors that hurt only themselves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from saccade import LLM, SamplingParams
from saccade.errors import ConfigError, RequestError
from tests.helpers.media.images import make_photo, png

# The script of the lab; only its import line says saccade.
SCRIPT = """
from saccade import LLM, SamplingParams
from PIL import Image

llm = LLM(model="Qwen/Qwen2-VL-2B-Instruct", gpu_memory_utilization=0.7,
          max_model_len=4096, limit_mm_per_prompt={"image": 2})

image = Image.open("photo.jpg")
prompt = ("<|im_start|>user\\n<|vision_start|><|image_pad|><|vision_end|>"
          "Describe this image in one sentence.<|im_end|>\\n<|im_start|>assistant\\n")

out = llm.generate({"prompt": prompt, "multi_modal_data": {"image": image}},
                   SamplingParams(max_tokens=48, temperature=0))
print(out[0].outputs[0].text)
print("prompt tokens:", len(out[0].prompt_token_ids))   # the EXPANDED length
"""
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(qwen2_vl_folder: Path) -> Iterator[LLM]:
    made = LLM(
        model=str(qwen2_vl_folder),
        max_model_len=4096,
        kv_cache_gb=0.1,
        limit_mm_per_prompt={"image": 3},
        use_tqdm=False,
    )
    yield made
    assert not made.engine.has_unfinished_requests()
    made.engine.core.scheduler.check()
    made.close()


def ask(llm: LLM, text: str, images: Any = None, params: SamplingParams = GREEDY) -> Any:
    prompt: dict[str, Any] = {"prompt": text}
    if images is not None:
        prompt["multi_modal_data"] = {"image": images}
    return llm.generate(prompt, params, use_tqdm=False)[0]


def in_use(llm: LLM) -> tuple[int, int, int]:
    stats = llm.stats()
    return stats["kv"]["used"], stats["encoder_cache"]["slots_pinned"], stats["encoder_cache"]["slots_in_flight"]


# --- the lab ------------------------------------------------------------------------------------------------------


def test_the_labs_script_runs_with_only_its_import_line_changed(qwen2_vl_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(qwen2_vl_folder, tmp_path / "Qwen" / "Qwen2-VL-2B-Instruct")
    make_photo(1280, 960).save(tmp_path / "photo.jpg")
    (tmp_path / "lab.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "lab.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count = int(done.stdout.rsplit("prompt tokens:", 1)[1])
    assert 1200 < count < 1400  # 1,196 picture tokens at this checkpoint's pixel limit, and the text


def test_half_the_sides_give_about_a_quarter_of_the_tokens(llm: LLM) -> None:
    image = make_photo(1120, 840)
    full = ask(llm, IMAGE, image).bill.image_tokens
    half = ask(llm, IMAGE, image.resize((560, 420))).bill.image_tokens
    assert full / half == pytest.approx(4, rel=0.1)


def test_two_images_expand_both_placeholders(llm: LLM) -> None:
    a, b = make_photo(112, 84), make_photo(224, 168)
    one, other = ask(llm, IMAGE, a).bill.image_tokens, ask(llm, IMAGE, b).bill.image_tokens
    assert ask(llm, f"{IMAGE} and {IMAGE}", [a, b]).bill.image_tokens == one + other == 12 + 48


def test_text_alone_works_and_has_no_image_on_its_bill(llm: LLM) -> None:
    out = ask(llm, "The quick brown fox")
    assert len(out.outputs[0].token_ids) == 4
    assert out.bill.image_tokens == 0 and out.bill.items == ()


# --- inputs -------------------------------------------------------------------------------------------------------


def test_a_image_gives_the_same_answer_as_pil_path_bytes_or_array(llm: LLM, tmp_path: Path) -> None:
    image = make_photo(140, 112, seed=5)
    image.save(tmp_path / "a.png")
    sources = [image, tmp_path / "a.png", str(tmp_path / "a.png"), png(image), np.asarray(image)]
    answers = {tuple(ask(llm, IMAGE + "What?", source).outputs[0].token_ids) for source in sources}
    assert len(answers) == 1


def test_a_lazily_opened_file_is_decoded_once_however_often_it_is_sent(llm: LLM, tmp_path: Path) -> None:
    make_photo(168, 140, seed=6).save(tmp_path / "b.jpg")
    before = llm.stats()["encoder"]["decoded"]
    for _ in range(3):
        ask(llm, IMAGE + "What?", Image.open(tmp_path / "b.jpg"))
    assert llm.stats()["encoder"]["decoded"] == before + 1


def test_a_prompt_may_be_token_ids(llm: LLM) -> None:
    ids = ask(llm, "The quick brown fox").prompt_token_ids
    out = llm.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)[0]
    assert out.outputs[0].token_ids == ask(llm, "The quick brown fox").outputs[0].token_ids


def test_chat_goes_through_the_checkpoints_template(llm: LLM) -> None:
    messages = [
        {
            "role": "user",
            "content": [{"type": "image", "image": make_photo()}, {"type": "text", "text": "What is this?"}],
        }
    ]
    out = llm.chat(messages, GREEDY, use_tqdm=False)[0]
    assert out.prompt.startswith("<|im_start|>system\nYou are a helpful assistant.")
    assert out.prompt.endswith("What is this?<|im_end|>\n<|im_start|>assistant\n")
    assert out.bill.image_tokens == 12


def test_answers_come_back_in_the_order_of_the_prompts(llm: LLM) -> None:
    texts = ["fox", "The quick brown fox jumps over the lazy dog. " * 8, "dog"]
    outs = llm.generate(
        texts, [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5)], use_tqdm=False
    )
    assert [out.prompt for out in outs] == texts
    assert [len(out.outputs[0].token_ids) for out in outs] == [9, 1, 5]


# --- sampling -----------------------------------------------------------------------------------------------------


def test_n_answers_differ_and_share_the_prompts_blocks(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.5, seed=4, max_tokens=12, ignore_eos=True)
    outs = ask(llm, "The quick brown fox jumps over the lazy dog", params=params).outputs
    assert [o.index for o in outs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in outs}) == 3
    again = ask(llm, "The quick brown fox jumps over the lazy dog", params=params).outputs
    assert [o.token_ids for o in again] == [o.token_ids for o in outs]


def test_a_stop_string_ends_the_answer_before_it(llm: LLM) -> None:
    free = ask(llm, "The quick", params=SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)).outputs[0]
    stop = free.text[6:9]
    out = ask(
        llm, "The quick", params=SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=stop)
    ).outputs[0]
    assert out.text == free.text[: free.text.index(stop)]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    kept = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
    assert ask(llm, "The quick", params=kept).outputs[0].text == out.text + stop
    assert len(out.token_ids) < 24


def test_a_stop_token_ends_the_answer_and_is_not_shown(llm: LLM) -> None:
    free = ask(llm, "The lazy", params=SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)).outputs[0]
    stop = free.token_ids[5]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
    out = ask(llm, "The lazy", params=params).outputs[0]
    assert out.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    assert free.text.startswith(out.text)


def test_the_bill_is_the_number_of_tokens_the_engine_charges(llm: LLM) -> None:
    out = ask(llm, f"{IMAGE} What?", make_photo(280, 280))
    assert out.bill.prompt_tokens == len(out.prompt_token_ids)
    assert out.bill.kv_blocks == -(-len(out.prompt_token_ids) // 16)
    assert out.bill.items[0].tokens == 100
    assert {"queue", "decode", "encode", "first_token", "total"} <= set(out.bill.times_ms)


# --- errors -------------------------------------------------------------------------------------------------------

BAD = {
    "fewer pictures than placeholders": (
        {"prompt": IMAGE * 2, "multi_modal_data": {"image": [make_photo()]}},
        r"2.*1",
    ),
    "more pictures than placeholders": ({"prompt": "no", "multi_modal_data": {"image": [make_photo()]}}, r"0.*1"),
    "more pictures than the limit": (
        {"prompt": IMAGE * 4, "multi_modal_data": {"image": [make_photo()] * 4}},
        r"3.*limit_mm_per_prompt.*4",
    ),
    "a prompt longer than the context": ({"prompt_token_ids": [5] * 5000}, r"5000.*4096"),
    "an empty prompt": ({"prompt": ""}, "empty"),
    "bytes that are no picture": ({"prompt": IMAGE, "multi_modal_data": {"image": b"hello"}}, "picture|image"),
    "a missing file": ({"prompt": IMAGE, "multi_modal_data": {"image": "/nowhere/x.png"}}, "/nowhere/x.png"),
    "an unknown key": ({"prompt": "a", "pictures": []}, "pictures"),
    "a truncated picture": (
        {"prompt": IMAGE, "multi_modal_data": {"image": png(make_photo(200, 200))[:3000]}},
        "damaged or cut short",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_prompt_alone_raises_one_sentence_with_values(llm: LLM, name: str) -> None:
    prompt, pattern = BAD[name]
    with pytest.raises(RequestError, match=f"(?s){pattern}") as caught:
        llm.generate(prompt, GREEDY, use_tqdm=False)
    assert "\n" not in str(caught.value)
    assert in_use(llm) == (0, 0, 0)


def test_of_several_images_the_damaged_one_is_named(llm: LLM) -> None:
    images = [make_photo(seed=41), png(make_photo(200, 200, seed=42))[:3000], make_photo(seed=43)]
    with pytest.raises(RequestError) as caught:
        ask(llm, IMAGE * 3, images)
    assert (caught.value.code, caught.value.param) == ("image_parse_error", "multi_modal_data.image[1]")


def test_bad_prompts_in_a_batch_hurt_only_themselves(llm: LLM) -> None:
    good = {"prompt": f"{IMAGE}What?", "multi_modal_data": {"image": make_photo(seed=9)}}
    expected = llm.generate(good, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    mixed = [part for prompt, _ in BAD.values() for part in (prompt, good)]
    outs = llm.generate(mixed, GREEDY, use_tqdm=False)
    assert all(out.error is not None for out in outs[0::2])
    assert [out.outputs[0].token_ids for out in outs[1::2]] == [expected] * len(BAD)
    assert in_use(llm) == (0, 0, 0)


def test_an_unknown_model_folder_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        LLM(model="/nowhere/at/all", use_tqdm=False)


def test_without_a_model_the_built_in_one_answers() -> None:
    llm = LLM(use_tqdm=False, kv_cache_gb=0.1)
    red = Image.new("RGB", (160, 160), "white")
    ImageDraw.Draw(red).ellipse((40, 40, 120, 120), fill=(220, 30, 30))
    content = [{"type": "image", "image": red}, {"type": "text", "text": "What color is the circle?"}]
    out = llm.chat([{"role": "user", "content": content}], SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    assert "red" in out[0].outputs[0].text
    llm.close()


# --- stepping by hand ---------------------------------------------------------------------------------------------


def test_the_engine_steps_by_hand(llm: LLM) -> None:
    engine = llm.engine
    engine.add_request("a", {"prompt": "The quick"}, GREEDY)
    engine.add_request("b", {"prompt": f"{IMAGE}", "multi_modal_data": {"image": make_photo()}}, GREEDY)
    lengths: dict[str, list[int]] = {"a": [], "b": []}
    while engine.has_unfinished_requests():
        for out in engine.step():
            lengths[out.request_id].append(len(out.outputs[0].token_ids))
    assert lengths == {"a": [1, 2, 3, 4], "b": [1, 2, 3, 4]}


def test_an_aborted_request_frees_everything(llm: LLM) -> None:
    engine = llm.engine
    engine.add_request("gone", {"prompt": f"{IMAGE}", "multi_modal_data": {"image": make_photo()}}, GREEDY)
    engine.step()
    engine.abort_request("gone")
    assert not engine.has_unfinished_requests()
    assert in_use(llm) == (0, 0, 0)


def test_a_request_id_in_use_is_refused(llm: LLM) -> None:
    llm.engine.add_request("twice", {"prompt": "a"}, GREEDY)
    with pytest.raises(RequestError, match="'twice'"):
        llm.engine.add_request("twice", {"prompt": "b"}, GREEDY)
    llm.engine.abort_request("twice")


# --- many pictures ------------------------------------------------------------------------------------------------


def test_64_images_in_one_request_need_no_more_encoder_memory_than_one_budget(qwen2_vl_folder: Path) -> None:
    images = [make_photo(112, 112, seed=s) for s in range(64)]
    llm = LLM(
        model=str(qwen2_vl_folder), max_model_len=4096, kv_cache_gb=0.1, limit_mm_per_prompt={"image": 64},
        max_pixels=112 * 112, max_num_batched_tokens=64, encoder_budget=64, encoder_cache_gb=0.00002, use_tqdm=False,
    )  # fmt: skip
    out = ask(llm, IMAGE * 64, images)
    counters = llm.stats()["encoder"]
    assert len(out.outputs[0].token_ids) == 4
    assert counters["encoded"] == 64
    assert counters["peak_patches"] <= 3 * 64 * 4
    assert llm.stats()["encoder_cache"]["slots_total"] < 64 * 16  # the cache could never have held them all
    llm.close()


def test_a_conversation_about_a_image_decodes_it_once(llm: LLM) -> None:
    before = llm.stats()["encoder"]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "image", "image": png(make_photo(300, 200, seed=77))}]}
    ]
    for turn in range(4):
        llm.chat(messages, GREEDY, use_tqdm=False)
        messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": f"Question {turn}?"}]
    after = llm.stats()["encoder"]
    assert (after["decoded"] - before["decoded"], after["encoded"] - before["encoded"]) == (1, 1)


# --- interruptions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["_update_state", "_encode", "step"])
@pytest.mark.parametrize("has_image", [False, True])
def test_ctrl_c_in_a_step_leaves_nothing_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str, has_image: bool
) -> None:
    text = f"Interrupted {place} {has_image} at some point, and asked again later."
    images = make_photo(252, 196, seed=len(place)) if has_image else None
    prompt = f"{IMAGE if has_image else ''}{text}"
    runner = llm.engine.core.runner
    owner = runner.forward if place == "step" else runner
    whole = getattr(owner, place)

    def interrupt(*args: Any) -> Any:
        monkeypatch.setattr(owner, place, whole)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, place, interrupt)
    with pytest.raises(KeyboardInterrupt):
        ask(llm, prompt, images)
    assert not llm.engine.has_unfinished_requests()
    assert in_use(llm) == (0, 0, 0)
    again = ask(llm, prompt, images).outputs[0].token_ids
    llm.engine.core.scheduler.fail_all(RequestError("start over"), 0.0)  # nothing cached
    assert ask(llm, prompt, images).outputs[0].token_ids == again


def test_a_step_that_breaks_ends_its_requests_and_the_engine_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = llm.engine.core.runner.forward
    whole = forward.step

    def broken(*args: Any) -> Any:
        monkeypatch.setattr(forward, "step", whole)
        raise RuntimeError("cosmic ray")

    monkeypatch.setattr(forward, "step", broken)
    outs = llm.generate(["one", "two"], GREEDY, use_tqdm=False)
    assert [out.error.code for out in outs if out.error] == ["engine_error"] * 2
    assert not ask(llm, "one").error


def test_an_error_of_the_callers_own_leaves_no_request_open(llm: LLM) -> None:
    with pytest.raises(AttributeError):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY, "oops"], use_tqdm=False)  # type: ignore[list-item]
    assert not llm.engine.has_unfinished_requests()
    assert in_use(llm) == (0, 0, 0)


def test_generate_refuses_to_swallow_requests_added_by_hand(llm: LLM) -> None:
    llm.engine.add_request("mine", {"prompt": "a"}, GREEDY)
    with pytest.raises(RuntimeError, match="by hand"):
        llm.generate("b", GREEDY, use_tqdm=False)
    llm.engine.abort_request("mine")


# --- parameters that could hurt others ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [{"stop_token_ids": [10**6], "min_tokens": 3}, {"logit_bias": {10**6: 1.0}}], ids=["stop", "bias"]
)
def test_token_ids_outside_the_vocabulary_are_refused_with_its_size(llm: LLM, given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"1000000, but this model's ids go from 0 to 453"):
        ask(llm, "a", params=SamplingParams(max_tokens=8, **given))


def test_min_tokens_hold_back_stop_strings_too(llm: LLM) -> None:
    free = ask(llm, "The dog", params=SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)).outputs[0]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, min_tokens=8, stop=free.text[0])
    assert len(ask(llm, "The dog", params=params).outputs[0].token_ids) >= 8


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-6])
def test_a_temperature_next_to_zero_is_greedy(llm: LLM, temperature: float) -> None:
    greedy = ask(llm, "The fox", params=SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)).outputs[0]
    cold = SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True)
    assert ask(llm, "The fox", params=cold).outputs[0].token_ids == greedy.token_ids


def test_a_detail_that_is_no_string_is_refused(llm: LLM) -> None:
    part = {"type": "image", "image": make_photo(), "detail": ["low"]}
    with pytest.raises(RequestError, match=r"detail must be one of"):
        llm.chat([{"role": "user", "content": [part]}], GREEDY, use_tqdm=False)


# --- priority -----------------------------------------------------------------------------------------------------


def test_each_prompt_brings_its_priority_to_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core, added = llm.engine.core, []
    add = core.add
    monkeypatch.setattr(core, "add", lambda request: (added.append(request.priority), add(request)))
    llm.generate(["one", "two", "three"], GREEDY, use_tqdm=False, priority=[2, 0, 1])
    llm.chat([{"role": "user", "content": "four"}], GREEDY, use_tqdm=False, priority=[-1])
    assert added == [2, 0, 1, -1]


def test_priorities_for_other_than_each_prompt_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 prompts were given with 1 priorities"):
        llm.generate(["one", "two"], GREEDY, use_tqdm=False, priority=[1])


# --- what vLLM's LLM has, too -------------------------------------------------------------------------------------


def test_the_bill_is_known_without_running(llm: LLM) -> None:
    steps = llm.stats()["steps"]
    photo = make_photo(112, 84)
    prompt = {"prompt": f"{IMAGE}What?", "multi_modal_data": {"image": photo}}
    messages = [{"role": "user", "content": [{"type": "image", "image": photo}, {"type": "text", "text": "What?"}]}]
    for bill in (llm.bill(prompt), llm.bill(messages)):
        assert bill.image_tokens == 12 and bill.kv_blocks > 0
    assert llm.bill(messages, mm_processor_kwargs={"max_pixels": 3136}).image_tokens < 12
    assert llm.stats()["steps"] == steps
    out = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    assert out.bill.prompt_tokens == llm.bill(prompt).prompt_tokens == len(out.prompt_token_ids)


def test_the_tokenizer_makes_prompts_for_generate(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    messages = [{"role": "user", "content": "Hello there"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert tokenizer.decode(ids) == text and tokenizer(text)["input_ids"] == tokenizer.encode(text) == ids
    assert llm.chat(messages, GREEDY, use_tqdm=False)[0].prompt_token_ids == ids
    assert tokenizer.convert_tokens_to_ids([tokenizer.eos_token]) == [tokenizer.eos_token_id]


def test_a_reset_prefix_cache_computes_the_prompt_again(llm: LLM) -> None:
    prompt = "the same words " * 20
    ask(llm, prompt)
    assert ask(llm, prompt).num_cached_tokens > 0
    assert llm.reset_prefix_cache()
    assert ask(llm, prompt).num_cached_tokens == 0
    llm.engine.add_request("open", prompt, GREEDY)
    assert not llm.reset_prefix_cache()
    llm.engine.abort_request("open")


def test_a_model_sleeps_and_wakes_up_as_it_was(tmp_path: Path) -> None:
    llm = LLM(kv_cache_gb=0.05, use_tqdm=False, profile_dir=str(tmp_path / "traces"))
    llm.start_profile("first")
    before = ask(llm, "What is this?", params=SamplingParams(temperature=0, max_tokens=4))
    assert llm.stop_profile().name.startswith("first-") and list((tmp_path / "traces").iterdir())
    with pytest.raises(ConfigError, match="no profile is running"):
        llm.stop_profile()
    llm.sleep(level=1)
    with pytest.raises(RuntimeError, match="the engine sleeps"):
        ask(llm, "What is this?")
    llm.wake_up(tags=["weights"])
    llm.wake_up()
    after = ask(llm, "What is this?", params=SamplingParams(temperature=0, max_tokens=4))
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        ask(llm, "What is this?")


def test_calls_know_vllms_arguments(llm: LLM) -> None:
    prompt = {"prompt": f"{IMAGE}What?", "multi_modal_data": {"image": make_photo(112, 84)}}
    few = llm.generate(prompt, GREEDY, use_tqdm=False, mm_processor_kwargs={"max_pixels": 3136}, lora_request=None)[0]
    assert few.bill.image_tokens < 12
    for call in (llm.generate, llm.chat):
        with pytest.raises(RequestError, match="lora_request=1 is not supported: adapters"):
            call("x", GREEDY, lora_request=1)
        with pytest.raises(RequestError, match="unknown argument use_tqmd"):
            call("x", GREEDY, use_tqmd=False)
    with pytest.raises(RequestError, match="level must be 1 or 2, not 0"):
        llm.sleep(0)
    with pytest.raises(ConfigError, match="give profile_dir"):
        llm.start_profile()


def test_default_template_arguments_hold_where_a_chat_has_none(qwen2_vl_folder: Path) -> None:
    template = "{{ messages[0].content }} {{ tone }}"
    defaults = {"tone": "calm"}
    how = {"chat_template": template, "default_chat_template_kwargs": defaults, "kv_cache_gb": 0.05, "use_tqdm": False}
    with LLM(model=str(qwen2_vl_folder), max_model_len=256, limit_mm_per_prompt={"image": 0, "video": 0}, **how) as llm:
        messages = [{"role": "user", "content": "Hello"}]
        assert llm.chat(messages, GREEDY, use_tqdm=False)[0].prompt == "Hello calm"
        loud = llm.chat(messages, GREEDY, use_tqdm=False, chat_template_kwargs={"tone": "loud"})[0]
        assert loud.prompt == "Hello loud"
    with pytest.raises(ConfigError, match="default_chat_template_kwargs cannot set messages"):
        LLM(default_chat_template_kwargs={"messages": []}, use_tqdm=False)
