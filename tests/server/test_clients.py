"""Client libraries against a running server: agents with images, thinking, and what each library makes of our answers.

The model says what tests/helpers/fakes/scripted.py writes. Libraries that take seconds to import are imported
where used.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel

from tests.helpers.fakes import scripted
from tests.helpers.media.images import make_photo, png
from tests.helpers.servers.later import Later
from tests.helpers.servers.serving import (
    MODEL,
    RunningServer,
    as_url,
    image_part,
    photo_part,
    running_server,
    text_part,
)

if TYPE_CHECKING:
    import anthropic
    import openai
else:
    anthropic, openai = Later("anthropic"), Later("openai")

pytestmark = pytest.mark.transformers

PHOTO = png(make_photo(128, 96))
CROPPED = png(make_photo(56, 84, seed=3))
THINK = {"chat_template_kwargs": {"enable_thinking": True}}


class Crop(BaseModel):
    left: int
    right: int


class Measure(BaseModel):
    name: str


class Sight(BaseModel):
    animal: Literal["dog", "cat"]
    count: Literal[1, 2]


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(scripted.scripted(tmp_path_factory.mktemp("scripted")), *scripted.FLAGS) as server:
        yield server


def messages(text: str = "What is this?") -> Any:
    return [{"role": "user", "content": text}]


def vision(text: str = "What is this?") -> Any:
    return [{"role": "user", "content": [text_part(text), photo_part(128, 96)]}]


# --- openai -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(actor: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{actor.url}/v1", api_key="EMPTY", max_retries=0)


@cache
def tools() -> Any:
    return [openai.pydantic_function_tool(Crop, name="crop"), openai.pydantic_function_tool(Measure, name="measure")]


def test_openai_parses_the_arguments_of_a_call(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=vision(), tools=tools())
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Crop(**scripted.CROP)


def test_openai_streams_a_call_to_the_same_arguments(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=vision(), tools=tools()) as stream:
        kinds = {event.type for event in stream}
        choice = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds and choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.function.parsed_arguments == Crop(**scripted.CROP)


def test_openai_reads_thinking_beside_the_text(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(model=MODEL, messages=vision(), stream=True, extra_body=THINK)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == scripted.THOUGHT
    assert "".join(delta.content or "" for delta in deltas) == scripted.AFTER_THOUGHT


def test_a_response_has_its_thinking_as_an_item(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="What is this?", extra_body=THINK) as stream:
        streamed = stream.get_final_response()
    whole = client.responses.create(model=MODEL, input="What is this?", extra_body=THINK)
    for answer in (streamed, whole):
        thought = answer.output[0]
        assert thought.type == "reasoning" and thought.content and thought.content[0].text == scripted.THOUGHT
        assert answer.output_text == scripted.AFTER_THOUGHT


def test_an_agent_over_responses_sends_back_items_and_images(client: openai.OpenAI) -> None:
    flat_tools: Any = [{"type": "function", "name": tool["function"]["name"], **flat(tool)} for tool in tools()]
    results: Any = {"crop": [{"type": "input_image", "image_url": as_url(CROPPED)}], "measure": "40"}
    turns: Any = messages("How wide is it?")
    asked = []
    for _ in results:
        answer = client.responses.create(model=MODEL, input=turns, tools=flat_tools)
        (call,) = answer.output
        assert call.type == "function_call"
        asked.append((call.name, json.loads(call.arguments)))
        turns += [call, {"type": "function_call_output", "call_id": call.call_id, "output": results[call.name]}]
    final = client.responses.create(model=MODEL, input=turns, tools=flat_tools)
    assert asked == [("crop", scripted.CROP), ("measure", scripted.MEASURE)]
    assert final.output_text == scripted.AFTER_TOOLS and final.usage is not None
    assert final.usage.input_tokens_details.image_tokens > 0  # type: ignore[attr-defined]


def flat(tool: Any) -> dict[str, Any]:
    return {"parameters": tool["function"]["parameters"], "strict": True}


# --- anthropic ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def claude(actor: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=actor.url, api_key="EMPTY", max_retries=0)


def block(data: bytes) -> Any:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def test_anthropic_reads_thinking_and_sends_it_back(claude: anthropic.Anthropic) -> None:
    turns: Any = [{"role": "user", "content": [block(PHOTO), {"type": "text", "text": "What is this?"}]}]
    ask = partial(claude.messages.stream, model=MODEL, max_tokens=1100)
    with ask(messages=turns, thinking={"type": "enabled", "budget_tokens": 1024}) as stream:
        first = stream.get_final_message()
    thought, said = first.content
    assert thought.type == "thinking" and thought.thinking == scripted.THOUGHT
    assert said.type == "text" and said.text.strip() == scripted.AFTER_THOUGHT
    with ask(messages=[*turns, {"role": "assistant", "content": first.content}, *messages("Sure?")]) as stream:
        assert stream.get_final_text() == scripted.ANSWER


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_tool_runner_of_anthropic_runs_both_tools(claude: anthropic.Anthropic, stream: bool) -> None:
    ran = []

    @anthropic.beta_tool
    def crop(left: int, right: int) -> Any:
        """Cut a column out of the image."""
        ran.append({"left": left, "right": right})
        return [block(CROPPED)]

    @anthropic.beta_tool
    def measure(name: str) -> str:
        """Measure what is in the image."""
        ran.append({"name": name})
        return "40"

    asked: Any = [{"role": "user", "content": [block(PHOTO), {"type": "text", "text": "How wide is it?"}]}]
    runner = claude.beta.messages.tool_runner(
        model=MODEL, max_tokens=100, tools=[crop, measure], messages=asked, stream=stream
    )
    final = runner.until_done()
    assert ran == [scripted.CROP, scripted.MEASURE] and final.content[0].to_dict()["text"] == scripted.AFTER_TOOLS


# --- langchain and langgraph --------------------------------------------------------------------------------------


@pytest.fixture
def langchain(actor: RunningServer) -> Callable[..., Any]:
    from langchain_openai import ChatOpenAI

    return partial(ChatOpenAI, base_url=f"{actor.url}/v1", api_key="EMPTY", model=MODEL)


def test_langchain_answers_about_a_image(langchain: Callable[..., Any]) -> None:
    answer = langchain().invoke([{"role": "user", "content": vision()[0]["content"]}])
    assert answer.content == scripted.ANSWER and answer.usage_metadata["output_tokens"] == 4


def test_langchain_streams(langchain: Callable[..., Any]) -> None:
    chunks = [chunk.content for chunk in langchain().stream("What is this?")]
    assert "".join(chunks) == scripted.ANSWER and len(chunks) > 2


def test_langchain_gets_structured_output(langchain: Callable[..., Any]) -> None:
    assert isinstance(langchain().with_structured_output(Sight).invoke("Read it."), Sight)


def test_an_agent_of_langgraph_looks_at_what_its_tools_return(langchain: Callable[..., Any]) -> None:
    from langchain_core.tools import tool
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    @tool
    def crop(left: int, right: int) -> Any:
        """Cut a column out of the image."""
        return [image_part(as_url(CROPPED))]

    @tool
    def measure(name: str) -> str:
        """Measure what is in the image."""
        return "40"

    model = langchain().bind_tools([crop, measure])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([crop, measure]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    said = graph.compile().invoke({"messages": vision("How wide is it?")})["messages"]
    assert [turn.type for turn in said] == ["human", "ai", "tool", "ai", "tool", "ai"]
    assert [call["args"] for turn in said[1:4:2] for call in turn.tool_calls] == [scripted.CROP, scripted.MEASURE]
    assert said[-1].content == scripted.AFTER_TOOLS
    images = [turn.response_metadata["token_usage"]["prompt_tokens_details"]["image_tokens"] for turn in said[1::2]]
    assert images[0] > 0 and images[1] == images[2] == images[0] + 6  # 56x84 pixels more


# --- litellm ------------------------------------------------------------------------------------------------------


@pytest.fixture
def litellm(actor: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else the import asks the network for prices
    from litellm import completion

    return partial(completion, api_base=f"{actor.url}/v1", api_key="EMPTY")


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_reads_images_thinking_and_calls(litellm: Callable[..., Any], provider: str) -> None:
    """Without `_skip_mcp_handler` litellm 1.106 looks for MCP servers first, and needs the package `mcp` to do so."""
    ask = partial(litellm, model=f"{provider}/{MODEL}", messages=vision())
    thinking = ask(extra_body=THINK).choices[0].message
    assert (thinking.reasoning_content, thinking.content) == (scripted.THOUGHT, scripted.AFTER_THOUGHT)
    (call,) = ask(tools=tools(), _skip_mcp_handler=True).choices[0].message.tool_calls
    assert call.function.name == "crop" and json.loads(call.function.arguments) == scripted.CROP


def test_litellm_speaks_to_messages_too(actor: RunningServer, litellm: Callable[..., Any]) -> None:
    answer = litellm(model=f"anthropic/{MODEL}", api_base=actor.url, messages=vision(), max_tokens=50)
    assert answer.choices[0].message.content == scripted.ANSWER


def test_litellm_streams_with_usage(litellm: Callable[..., Any]) -> None:
    usage = {"stream_options": {"include_usage": True}}
    chunks = list(litellm(model=f"openai/{MODEL}", messages=messages(), stream=True, **usage))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == scripted.ANSWER
    assert chunks[-1].usage.completion_tokens == 4


# --- llama-index --------------------------------------------------------------------------------------------------


def test_llama_index_asks_about_images_and_calls_tools(actor: RunningServer) -> None:
    from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=MODEL,
        api_base=f"{actor.url}/v1",
        api_key="EMPTY",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=4096,
        max_retries=0,
    )
    asked = ChatMessage(role="user", blocks=[ImageBlock(image=PHOTO), TextBlock(text="What is this?")])
    answer = model.chat([asked])
    assert answer.message.content == scripted.ANSWER and answer.raw.usage.prompt_tokens_details.image_tokens > 0
    assert [chunk.message.content for chunk in model.stream_chat([asked])][-1] == scripted.ANSWER

    def crop(left: int, right: int) -> str:
        """Cut a column out of the image."""
        return f"{right - left} pixels"

    result = model.predict_and_call([FunctionTool.from_defaults(crop)], user_msg=asked)
    assert str(result) == "40 pixels"
