"""DeepSeek: V3 and R1, V3.1 and, with tags, V3.2. The first two stand between marks of all calls.

V3     <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, then {...} as a block of JSON, <｜tool▁call▁end｜>
V3.1   <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
V3.2   <｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from saccade.processor.dialects.argument_text import ArgumentWriter
from saccade.processor.dialects.arguments import types_of
from saccade.processor.dialects.call_grammar import BREAK, Function, GrammarWriter, Member, members_of
from saccade.processor.dialects.events import EventSink
from saccade.processor.dialects.json_calls import checked_name, read_each
from saccade.processor.dialects.json_text import copy_value
from saccade.processor.dialects.reader import Reading, TextReader

CALLS = "<｜tool▁calls▁begin｜>"
_CALLS_END = "<｜tool▁calls▁end｜>"
CALL = "<｜tool▁call▁begin｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
MARKERS = (CALLS, _CALLS_END, CALL, _CALL_END, _SEPARATOR)
_FENCE = "```"

DSML = "｜DSML｜"
_INVOKE = f"<{DSML}invoke"
_INVOKE_END = f"</{DSML}invoke>"
_PARAMETER = f"<{DSML}parameter"
_PARAMETER_END = f"</{DSML}parameter>"
_FRAME = (f"<{DSML}function_calls>", f"</{DSML}function_calls>")


def _call(reader: TextReader, sink: EventSink) -> Reading[None]:
    name, _ = yield from reader.name_until((_SEPARATOR,))
    is_fenced = name == "function"
    if is_fenced:
        name, _ = yield from reader.name_until(("\n",))
        yield from reader.skip_space()
        yield from reader.expect(f"{_FENCE}json")
    name = checked_name(name, sink)
    yield from reader.skip_space()
    sink.start(name)
    yield from copy_value(reader, sink.arguments)
    yield from reader.skip_space()
    if is_fenced:
        yield from reader.skips(_FENCE)
        yield from reader.skip_space()
    yield from reader.skips(_CALL_END)
    sink.end()


def _invoke(reader: TextReader, sink: EventSink) -> Reading[None]:
    yield from reader.expect(' name="')
    name, _ = yield from reader.name_until(('">',))
    writer = ArgumentWriter(sink, checked_name(name, sink))
    yield from reader.skip_space()
    while (yield from reader.skips(_PARAMETER)):
        yield from reader.expect(' name="')
        key, _ = yield from reader.name_until(('" string="',))
        kind, _ = yield from reader.name_until(('">',))
        writer.key(key)
        yield from writer.copy_text(reader, (_PARAMETER_END,), is_string=kind == "true")
        yield from reader.skip_space()
    yield from reader.expect(_INVOKE_END)
    writer.close()


read_deepseek = partial(read_each, CALL, _call, _CALL_END, frame=(CALLS, _CALLS_END))
read_deepseek_tags = partial(read_each, _INVOKE, _invoke, _INVOKE_END, frame=_FRAME)


def write_deepseek(writer: GrammarWriter, functions: Sequence[Function], many: bool) -> str:
    """The form of V3 or of V3.1: the model takes the one that it knows."""
    options = []
    for name, parameters in functions:
        arguments = writer.rule(writer.json(parameters))
        fence = writer.literal(f"function{_SEPARATOR}{name}\n{_FENCE}json\n")
        close = writer.literal(f"\n{_FENCE}")
        options += [f"{fence} {arguments} {close}", f"{writer.literal(name + _SEPARATOR)} {arguments}"]
    call = writer.rule(f"{writer.literal(CALL)} {writer.any_of(options)} {writer.literal(_CALL_END)}")
    calls = writer.repeated(call, BREAK, many)
    return f"{writer.literal(CALLS)} {calls} {writer.literal(_CALLS_END)}"


def write_deepseek_tags(writer: GrammarWriter, functions: Sequence[Function], many: bool) -> str:
    call = writer.any_of([_written(writer, function) for function in functions])
    calls = writer.repeated(call, BREAK, many)
    return f"{writer.literal(_FRAME[0])} {BREAK} {calls} {BREAK} {writer.literal(_FRAME[1])}"


def _written(writer: GrammarWriter, function: Function) -> str:
    def parameter(member: Member) -> str:
        kind = "true" if "string" in types_of(member.schema, function.parameters) else "false"
        begin = writer.literal(f'{_PARAMETER} name="{member.key}" string="{kind}">')
        return f"{begin} {writer.value(member.schema, function.parameters, _PARAMETER_END)} {BREAK}"

    begin = writer.literal(f'{_INVOKE} name="{function.name}">')
    parameters = writer.in_turn(members_of(function.parameters), parameter)
    return f"{begin} {BREAK} {parameters} {writer.literal(_INVOKE_END)}"
