"""Every part of a conversation reaches the prompt once, in a form that the template reads, or the
conversation is refused."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import dropwhile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.errors import ChatTemplateFailed, CheckpointInvalid
from inference.text.conversation import CallIds, Form
from inference.text.template_sandbox import utc_text
from inference.text.tokenizer import ChatMessage, Tokenizer
from inference.text.tools import Tool, ToolCall
from tests.inference.checkpoints import write_tokenizer
from tests.inference.tool_checkpoints import TOOL_TEMPLATE

Load = Callable[[str], Tokenizer]

SHOWN = "system=Sys1;user=Ask1;assistant=Ans1;user=Ask2;"
PARTS = "{% for part in m.content %}{{ part.text }}{% endfor %}"
RAISES = "{{ raise_exception('The system message comes first.') }}"
IN_TURN = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content | trim }}"
)
NINE = "{% if {id}|length != 9 or not {id}.isalnum() %}{{ raise_exception('nine!') }}{% endif %}"
CALLS = """
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
CHECK_RESULT[R {{ m.tool_call_id }} {{ m.content }}]
{%- elif m.tool_calls -%}
ONE
{%- for call in m.tool_calls -%}
CHECK_CALL[C {{ call.id }} {{ call.function.name }} ARGUMENTS]
{%- endfor -%}
{%- else -%}
[{{ m.role }} {{ m.content }}]
{%- endif -%}
{%- endfor -%}
"""
SHORT = Form(ids=CallIds.SHORT)
CLIENT_IDS = [
    "call_abc123DEF456ghi789",
    "call_1",
    "1",
    "toolu_01ABCdef",
    "functions.get_weather:0",
    "a1B2c3D4e",
    "chatcmpl-tool-7e2f0d6c0f6b4d0f8d8a3c2b1a09f8e7",
    "é🙂 <|end|>",
    "x" * 128,
]
THOUGHT_AND_TEXT = (
    "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}"
    "{{ raise_exception('both') }}{% endif %}{% endfor %}"
)
ONE_CALL = {
    "raises": "{% if m.tool_calls | length > 1 %}{{ raise_exception('single!') }}{% endif %}",
    "shows the first": "{% set m = {'tool_calls': m.tool_calls[:1], 'content': m.content} %}",
}
ALTERNATING = (
    "{% set ns = namespace(i=0) %}{% for m in messages %}{% if m.role != 'tool' and not"
    " m.tool_calls %}{% if (m.role == 'user') != (ns.i % 2 == 0) %}"
    "{{ raise_exception('must alternate') }}{% endif %}{% set ns.i = ns.i + 1 %}{% endif %}"
    "{% endfor %}"
)
ROUND = (
    "{% for m in messages %}{% if m.tool_calls and (m.tool_calls | length > 1 or not loop.first and"
    " messages[loop.index0 - 1].role != 'user') %}{{ raise_exception('one call!') }}{% endif %}"
    "{% endfor %}"
)
ARGUMENTS = {
    "printed text": "{{ call.function.arguments }}",
    "objects": "{{ call.function.arguments | tojson }}",
    "text": "{{ '```' + call.function.arguments + '```' }}",
    "items": "{% for key, value in call.function.arguments.items() %}{{ key }}: {{ value }}"
    "{% endfor %}",
    "either": "{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}"
    "{{ call.function.arguments | tojson }}{% endif %}",
}
MOMENT = datetime(2026, 3, 1, 9, 5, 7, 123456, UTC)
LAYOUTS = {
    "%d %b %Y": "01 Mar 2026",
    "%A, %B %-d": "Sunday, March 1",
    "%a %h": "Sun Mar",
    "%I:%M %p": "09:05 AM",
    "%P %#p": "am am",
    "%^a %^B": "SUN MARCH",
    "%c": "Sun Mar  1 09:05:07 2026",
    "%x %X %r": "03/01/26 09:05:07 09:05:07 AM",
    "%Ec|%EY|%Od": "Sun Mar  1 09:05:07 2026|2026|01",
    "%s": "1772355907",
    "%Z %z": "UTC +0000",
    "%j %U %w %y %H %f %%": "060 09 0 26 09 123456 %",
    "%e|%_d|%k": " 1| 1| 9",
    "today: 100 %": "today: 100 %",
}
TALK = [
    ChatMessage("system", "Sys1"),
    ChatMessage("user", "Ask1"),
    ChatMessage("assistant", "Ans1"),
    ChatMessage("user", "Ask2"),
]
LOST = {
    "the system": "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}"
    "{% endfor %}",
    "all but the last turn": "{{ messages[-1].content }}",
    "all but the first two turns": "{% for m in messages[:2] %}{{ m.content }}{% endfor %}",
    "answers": "{% for m in messages %}{% if m.role in ['user', 'system'] %}{{ m.content }}"
    "{% endif %}{% endfor %}",
    "everything": "Hello!",
    "the rest of the text": "{% for m in messages %}{{ m.content[:3] }}{% endfor %}",
    "every second turn": "{% for m in messages %}{% if loop.index0 % 2 %}{{ m.content }}{% endif %}"
    "{% endfor %}",
    "parts of answers": "{% for m in messages %}{{ m.role }}="
    "{% if m.role == 'assistant' %}{{ m.content.plan }}{% else %}{{ m.content }}{% endif %};"
    "{% endfor %}",
}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Return the loader of a tokenizer with a template."""

    def load(template: str) -> Tokenizer:
        write_tokenizer(tmp_path, template)
        return Tokenizer(tmp_path)

    return load


def conversation_of(*turns: str) -> list[ChatMessage]:
    """Return a conversation from texts like "user: Hi"."""
    split = (turn.split(": ", 1) for turn in turns)
    return [ChatMessage(role, content) for role, content in split]


def each(content: str) -> str:
    """Return a template that shows each turn's content by this expression or statement."""
    return "{% for m in messages %}{{ m.role }}=" + content + ";{% endfor %}"


CONTENTS = {
    "string": each("{{ m.content }}"),
    "concatenated string": each("{{ '' + m.content }}"),
    "parts": each(PARTS),
    "parts by type": each(
        "{% for part in m.content %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
        "{% endfor %}"
    ),
    "first part": each("{{ m.content[0].text }}"),
    "first part, subscripted": each("{{ m['content'][0]['text'] }}"),
    "mapped parts": each("{{ m.content | map(attribute='text') | join }}"),
    "only parts": each(
        "{% if m.content is string %}{{ raise_exception('parts!') }}{% endif %}" + PARTS
    ),
    "only strings": each(
        "{% if m.content is not string %}{{ raise_exception('strings!') }}{% endif %}"
        "{{ m.content }}"
    ),
    "either": each("{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}"),
    "strings of the system, parts of others": each(
        "{% if m.role == 'system' %}{{ m.content }}{% else %}" + PARTS + "{% endif %}"
    ),
    "strings of the assistant, parts of others": each(
        "{% if m.role == 'assistant' %}{{ m.content }}{% else %}" + PARTS + "{% endif %}"
    ),
    "parts of the user, strings of others": each(
        "{% if m.role != 'user' %}{{ m.content }}{% else %}" + PARTS + "{% endif %}"
    ),
}


@pytest.mark.parametrize("template", CONTENTS.values(), ids=CONTENTS)
def test_content_is_a_string_or_parts_as_the_template_reads_it(template: str, load: Load) -> None:
    tokenizer = load(template)

    assert tokenizer.render_chat(TALK) == SHOWN
    ids = tokenizer.encode_chat([*TALK, *conversation_of("assistant: <|end|>")])
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{SHOWN}assistant=<|end|>;"


@pytest.mark.parametrize("template", LOST.values(), ids=LOST)
def test_text_that_a_template_leaves_out_is_refused(template: str, load: Load) -> None:
    tokenizer = load(template)

    with pytest.raises(ChatTemplateFailed, match=r"leaves out text of the role '\w+'"):
        tokenizer.render_chat(TALK)
    with pytest.raises(ChatTemplateFailed, match="leaves out text"):
        tokenizer.encode_chat(TALK)
    assert tokenizer.template_faults()


def test_a_system_message_that_only_a_last_question_shows_moves_to_the_question(
    load: Load,
) -> None:
    """Like Mistral: the system message disappears as soon as a tool has answered."""
    tokenizer = load(
        "{% for m in messages %}{% if m.role == 'user' and loop.last and messages[0].role =="
        " 'system' %}[{{ messages[0].content }}\n\n{{ m.content }}]{% elif m.role != 'system' %}"
        "[{{ m.content }}{% for c in m.tool_calls %}{{ c.function }}{% endfor %}]{% endif %}"
        "{% endfor %}"
    )
    made = call("a")
    requested = conversation_of("system: S", "user: Q")

    rendered = tokenizer.render_chat([*requested, called(made), result(made, "r")])

    assert rendered.startswith(tokenizer.render_chat(requested) + "[")
    assert rendered.startswith("[S\n\nQ][")
    with pytest.raises(ChatTemplateFailed, match="at the beginning only"):
        tokenizer.render_chat(conversation_of("system: S", "user: Q", "system: S2", "assistant: A"))


def test_text_that_a_template_repeats_is_refused(load: Load) -> None:
    twice = load("{{ messages[0].content }}" + each("{{ m.content }}"))

    with pytest.raises(ChatTemplateFailed, match="repeats text of the role 'system'"):
        twice.render_chat(TALK)


def test_only_the_conversations_that_lose_text_are_refused(load: Load) -> None:
    """Later system messages are lost; a first one is shown."""
    tokenizer = load(each("{% if m.role != 'system' or loop.first %}{{ m.content }}{% endif %}"))

    assert tokenizer.render_chat(TALK) == SHOWN
    assert tokenizer.render_chat(conversation_of("system: a", "system: b", "user: c")) == (
        "system=a\n\nb;user=c;"
    )
    for talk, index in (
        (conversation_of("system: a", "user: c", "system: b"), 2),
        (conversation_of("user: a", "system: b", "user: c"), 1),
        ([*TALK, *conversation_of("user: u", "system: z")], 5),
    ):
        with pytest.raises(ChatTemplateFailed, match="at the beginning only") as refused:
            tokenizer.render_chat(talk)
        assert refused.value.index == index


ONE_SYSTEM = {
    "raises at a second one": each(
        "{% if m.role == 'system' and not loop.first %}" + RAISES + "{% endif %}{{ m.content }}"
    ),
    "knows no developer": each(
        "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('Unknown') }}"
        "{% elif m.role == 'system' and not loop.first %}" + RAISES + "{% endif %}{{ m.content }}"
    ),
    "shows the first": each("{% if m.role == 'user' or loop.first %}{{ m.content }}{% endif %}"),
}


@pytest.mark.parametrize("template", ONE_SYSTEM.values(), ids=ONE_SYSTEM)
def test_first_system_messages_are_joined_if_need_be(template: str, load: Load) -> None:
    tokenizer = load(template)

    rendered = tokenizer.render_chat(conversation_of("system: a", "system: b", "user: c"))

    assert rendered == "system=a\n\nb;user=c;"
    with pytest.raises(ChatTemplateFailed, match="at the beginning only") as refused:
        tokenizer.render_chat(conversation_of("system: a", "system: b", "user: c", "system: d"))
    assert refused.value.index == 3


def test_a_developer_is_the_system_for_a_template_that_does_not_know_the_role(load: Load) -> None:
    tokenizer = load(ONE_SYSTEM["knows no developer"])

    assert tokenizer.render_chat(conversation_of("developer: a", "user: b")) == "system=a;user=b;"
    for roles in (("system", "developer"), ("developer", "system"), ("developer", "developer")):
        talk = [ChatMessage(role, text) for role, text in zip(roles, "ab", strict=True)]
        rendered = tokenizer.render_chat([*talk, *conversation_of("user: c")])
        assert rendered == "system=a\n\nb;user=c;"


def test_several_system_messages_stay_as_they_are_where_a_template_takes_them(load: Load) -> None:
    talk = conversation_of(
        "system: a", "developer: b", "system: c", "user: d", "system: e", "user: f"
    )

    rendered = load(each("{{ m.content }}")).render_chat(talk)

    assert rendered == "system=a;developer=b;system=c;user=d;system=e;user=f;"


@pytest.mark.parametrize(
    ("turns", "shown"),
    [
        (["user: a", "user: b"], "user=a\n\nb;"),
        (
            ["user: a", "assistant: b", "assistant: c", "user: d", "user: e", "user: f"],
            "user=a;assistant=b\n\nc;user=d\n\ne\n\nf;",
        ),
        (["user: a", "assistant: ", "assistant: b", "user: c"], "user=a;assistant=b;user=c;"),
    ],
)
def test_turns_of_one_role_are_joined_where_a_template_wants_them_to_alternate(
    turns: Sequence[str], shown: str, load: Load
) -> None:
    assert load(each(IN_TURN)).render_chat(conversation_of(*turns)) == shown


def test_a_joined_turn_is_continued_and_others_stay_as_they_are(load: Load) -> None:
    *before, last = conversation_of("user: a", "assistant: b", "assistant: c")
    talk = [*before, replace(last, is_unfinished=True)]

    assert load(each(IN_TURN)).render_chat(talk) == "user=a;assistant=b\n\nc"
    assert load(each("{{ m.content }}")).render_chat(talk) == "user=a;assistant=b;assistant=c"
    with pytest.raises(ChatTemplateFailed, match="roles must alternate"):
        load(each(IN_TURN)).render_chat(conversation_of("assistant: a", "user: b"))


@given(st.lists(st.sampled_from(["user", "assistant", "system"]), min_size=1, max_size=40))
def test_a_conversation_is_shown_whole_or_refused(roles: Sequence[str]) -> None:
    """The template shows system messages in the first place only, whatever surrounds them."""
    later = [*dropwhile(lambda role: role == "system", roles)]
    messages = [ChatMessage(role, f"w{index}w") for index, role in enumerate(roles)]

    try:
        rendered = FIRST_SYSTEM.render_chat(messages)
    except ChatTemplateFailed:
        assert "system" in later
    else:
        assert "system" not in later
        assert all(rendered.count(message.content) == 1 for message in messages)


@pytest.fixture(scope="module", autouse=True)
def first_system(tmp_path_factory: pytest.TempPathFactory) -> None:
    global FIRST_SYSTEM  # hypothesis calls a test many times with one fixture
    directory = tmp_path_factory.mktemp("first")
    write_tokenizer(
        directory, each("{% if m.role != 'system' or loop.first %}{{ m.content }}{% endif %}")
    )
    FIRST_SYSTEM = Tokenizer(directory)


FIRST_SYSTEM: Tokenizer

# Tool calls.


def calls_template(
    *,
    nine: bool = False,
    one: str = "",
    text: str = "{{ m.content }}",
    arguments: str = "{{ call.function.arguments | tojson }}",
) -> str:
    """Return a template. one: statement before calls. text: shows that of turns with calls.

    arguments: shows those of a call.
    """
    return (
        CALLS.replace("CHECK_RESULT", NINE.replace("{id}", "m.tool_call_id") if nine else "")
        .replace("CHECK_CALL", NINE.replace("{id}", "call.id") if nine else "")
        .replace("ONE", one + text)
        .replace("ARGUMENTS", arguments)
    )


def call(call_id: str, name: str = "f", arguments: str = '{"a": 1}') -> ToolCall:
    return ToolCall(call_id, name, arguments)


def called(*calls: ToolCall, text: str = "") -> ChatMessage:
    return ChatMessage("assistant", text, calls)


def result(of: ToolCall, text: str) -> ChatMessage:
    return ChatMessage("tool", text, (), of)


@pytest.mark.parametrize("client_id", CLIENT_IDS)
def test_templates_that_demand_nine_characters_get_them(client_id: str, load: Load) -> None:
    tokenizer = load(calls_template(nine=True))
    first, second = call(client_id), call(client_id + "2")
    talk = [
        *conversation_of("user: Q"),
        called(first, second),
        result(second, "r2"),
        result(first, "r1"),
    ]

    rendered = tokenizer.render_chat(talk)
    later = tokenizer.render_chat([*talk, *conversation_of("assistant: A", "user: Q2")])

    ids = [part.split()[1] for part in rendered.split("[") if part[:1] in ("C", "R")]
    assert ids[:2] == ids[3:1:-1]
    assert len(set(ids)) == 2
    assert all(len(each) == 9 and each.isalnum() and each.isascii() for each in ids)
    assert later.startswith(rendered), "the prefix cache has the beginning"
    assert talk[1].tool_calls[0].id == client_id
    assert client_id not in ids or len(client_id) == 9
    prompt = tokenizer.decode(tokenizer.encode_chat(talk), skip_special_tokens=False)
    assert prompt == rendered


def test_templates_that_accept_any_id_get_the_clients(load: Load) -> None:
    tokenizer = load(calls_template())

    for client_id in CLIENT_IDS:
        made = call(client_id)
        rendered = tokenizer.render_chat(
            [*conversation_of("user: Q"), called(made), result(made, "r")]
        )

        assert f"[C {client_id} f" in rendered
        assert f"[R {client_id} r]" in rendered


def test_templates_that_show_names_by_ids_only_get_ids_with_names(load: Load) -> None:
    """Like Kimi K2, whatever the ids of the client are, even if they are used again."""
    tokenizer = load(calls_template().replace(" {{ call.function.name }}", ""))
    for ids in (["call_1", "toolu_2", "x" * 40], ["call_0", "call_1", "call_0"]):
        a, b, c = (call(each, name) for each, name in zip(ids, "fgh", strict=True))
        talk = [
            *conversation_of("user: Q"),
            called(a, b),
            result(b, "rb"),
            result(a, "ra"),
            called(c),
        ]

        rendered = tokenizer.render_chat([*talk, result(c, "rc")])

        assert rendered.replace(' {"a": 1}', "") == (
            "[user Q][C functions.f:0][C functions.g:1][R functions.g:1 rb][R functions.f:0 ra]"
            "[C functions.h:2][R functions.h:2 rc]"
        )
        assert rendered.startswith(tokenizer.render_chat(talk[:-1]))


def test_thinking_text_and_a_call_are_shown_where_a_template_takes_two_of_them(load: Load) -> None:
    """Like GPT-OSS: the text becomes a turn, or part of the answer."""
    tokenizer = load(
        THOUGHT_AND_TEXT + calls_template(text="{{ m.content }}{{ m.thinking and '(thought)' }}")
    )
    made = call("a")
    answer = ChatMessage("assistant", "Look:", (made,), reasoning="Hm")

    rendered = tokenizer.render_chat([*conversation_of("user: Q"), answer, result(made, "r")])

    assert rendered == '[user Q][assistant Look:](thought)[C a f {"a": 1}][R a r]'


def test_thinking_is_left_out_where_a_template_refuses_it(load: Load) -> None:
    tokenizer = load(
        each("{% if m.reasoning %}{{ raise_exception('no thoughts') }}{% endif %}{{ m.content }}")
    )
    talk = [
        *conversation_of("user: Q"),
        ChatMessage("assistant", "A", reasoning="Hm"),
        *conversation_of("user: Q2"),
    ]

    assert tokenizer.render_chat(talk) == "user=Q;assistant=A;user=Q2;"


@pytest.mark.parametrize("cut", ["[:9]", "[-9:]", "[5:14]"])
def test_ids_are_not_cut_so_that_they_collide(cut: str, load: Load) -> None:
    shown = calls_template().replace(".id }}", f".id{cut} }}}}")
    tokenizer = load(shown.replace("tool_call_id }}", f"tool_call_id{cut} }}}}"))
    calls = [call(f"call_{'x' * 20}{index}{'y' * 20}") for index in range(4)]
    talk = [*conversation_of("user: Q"), called(*calls), *[result(each, "r") for each in calls]]

    rendered = tokenizer.render_chat(talk)

    assert len({part.split()[0] for part in rendered.split("[C ")[1:]}) == len(calls)


@given(st.lists(st.text(min_size=1, max_size=20) | st.sampled_from(CLIENT_IDS), max_size=20))
def test_short_ids_differ_and_depend_on_earlier_ones_only(ids: list[str]) -> None:
    messages = [called(call(each)) for each in ids]
    short = [turn.tool_calls[0].id for turn in SHORT.arranged(messages)]

    assert len(set(short)) == len(set(ids))
    assert len(set(zip(ids, short, strict=True))) == len(set(ids))
    for end in range(len(ids)):
        begun = SHORT.arranged(messages[:end])
        assert [turn.tool_calls[0].id for turn in begun] == short[:end]
    # An id that is short already stays, unless an earlier one has become the same.
    again = SHORT.arranged([called(call(each)) for each in dict.fromkeys(short)])
    assert [turn.tool_calls[0].id for turn in again] == list(dict.fromkeys(short))


def test_a_short_id_that_an_earlier_one_became_is_changed() -> None:
    [turn] = SHORT.arranged([called(call("call_1"))])
    taken = turn.tool_calls[0].id

    one, other = SHORT.arranged([called(call("call_1")), called(call(taken))])

    assert one.tool_calls[0].id == taken != other.tool_calls[0].id


@pytest.mark.parametrize("one", ONE_CALL.values(), ids=ONE_CALL)
@pytest.mark.parametrize("nine", [False, True])
def test_calls_become_turns_of_their_own_if_need_be(one: str, nine: bool, load: Load) -> None:
    tokenizer = load(calls_template(one=one, nine=nine))
    a, b, c = (call(each * 9, arguments=f'{{"{each}": 1}}') for each in "abc")
    talk = [
        *conversation_of("user: Q"),
        called(a, b, c, text="Let me see."),
        result(c, "rc"),
        result(a, "ra"),
        *conversation_of("assistant: A", "user: Q2"),
        called(b),
        result(b, "rb"),
    ]

    rendered = tokenizer.render_chat(talk)

    def shown(made: ToolCall) -> str:
        return f"[C {made.id} f {made.arguments}]"

    assert rendered == (
        f"[user Q]Let me see.{shown(a)}[R {a.id} ra]{shown(b)}{shown(c)}[R {c.id} rc]"
        f"[assistant A][user Q2]{shown(b)}[R {b.id} rb]"
    )


def test_calls_stay_together_where_a_template_takes_several(load: Load) -> None:
    rendered = load(calls_template()).render_chat(
        [*conversation_of("user: Q"), called(call("a"), call("b")), result(call("a"), "ra")]
    )

    assert rendered == '[user Q][C a f {"a": 1}][C b f {"a": 1}][R a ra]'


def test_text_beside_calls_is_a_turn_where_the_template_would_drop_it(load: Load) -> None:
    tokenizer = load(calls_template(text=""))
    made = call("a")

    rendered = tokenizer.render_chat(
        [*conversation_of("user: Q"), called(made, text="Let me see."), result(made, "r")]
    )

    assert rendered == '[user Q][assistant Let me see.][C a f {"a": 1}][R a r]'


def test_text_beside_calls_goes_to_the_answer_where_turns_alternate(load: Load) -> None:
    """Like Mistral: turns alternate, and a turn with calls has no text."""
    tokenizer = load(ALTERNATING + calls_template(text=""))
    one, two = call("a"), call("b", "g")
    begun = [*conversation_of("user: Q"), called(one, text="Let me see."), result(one, "r")]
    more = [called(two, text="And this."), result(two, "s")]
    shown = '[C a f {"a": 1}][R a r]'
    shown_more = '[C b g {"a": 1}][R b s]'

    def rendered(*turns: ChatMessage) -> str:
        return tokenizer.render_chat([*begun, *turns])

    assert rendered() == f"[user Q][assistant Let me see.]{shown}"
    assert (
        rendered(*conversation_of("user: Q2")) == f"[user Q][assistant Let me see.]{shown}[user Q2]"
    )
    assert tokenizer.render_chat(
        [begun[0], called(one), begun[2], *conversation_of("user: Q2")]
    ) == (f"[user Q]{shown}[assistant ][user Q2]")
    assert rendered(*conversation_of("assistant: A", "user: Q2")) == (
        f"[user Q]{shown}[assistant Let me see.\n\nA][user Q2]"
    )
    assert rendered(*more) == (f"[user Q][assistant Let me see.\n\nAnd this.]{shown}{shown_more}")
    assert rendered(*more, *conversation_of("assistant: A")) == (
        f"[user Q]{shown}{shown_more}[assistant Let me see.\n\nAnd this.\n\nA]"
    )


def test_text_beside_calls_is_refused_where_no_form_shows_it(load: Load) -> None:
    tokenizer = load(
        "{% for m in messages %}{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}"
        "{{ raise_exception('must alternate') }}{% endif %}{% endfor %}" + calls_template(text="")
    )
    made = call("a")

    with pytest.raises(ChatTemplateFailed, match="leaves out text of the role 'assistant'"):
        tokenizer.render_chat(
            [*conversation_of("user: Q"), called(made, text="Let me see."), result(made, "r")]
        )


def test_a_template_may_take_one_call_only(load: Load) -> None:
    assert not load(calls_template()).takes_one_call_only()
    assert not load(calls_template(one=ONE_CALL["raises"])).takes_one_call_only()
    assert not load(each("{{ m.content }}")).takes_one_call_only(), "it shows no calls"
    assert load(ROUND + calls_template()).takes_one_call_only()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_objects_or_text_as_the_template_reads_them(name: str, load: Load) -> None:
    tokenizer = load(calls_template(arguments=ARGUMENTS[name]))
    made = call("a", arguments='{"near": "Ulm"}')

    rendered = tokenizer.render_chat([*conversation_of("user: Q"), called(made), result(made, "r")])

    expected = {"text": '```{"near": "Ulm"}```', "items": "near: Ulm"}.get(name, made.arguments)
    assert f"[C a f {expected}]" in rendered


def test_turns_with_calls_have_null_content_where_the_template_tests_it(load: Load) -> None:
    """Like DeepSeek: a turn whose content is a string is an answer, and its calls are dropped."""
    template = calls_template().replace("elif m.tool_calls", "elif m.content is none")
    made = call("a")
    talk = [*conversation_of("user: Q"), called(made), result(made, "r")]

    assert load(template).render_chat(talk) == '[user Q]None[C a f {"a": 1}][R a r]'


@pytest.mark.parametrize(
    "lost",
    ["{{ call.function.name }}", "ARGUMENTS", "{{ m.content }}]\n{%- elif"],
)
def test_calls_and_results_that_a_template_leaves_out_are_refused(lost: str, load: Load) -> None:
    remaining = "]\n{%- elif" if lost.endswith("elif") else ""
    template = CALLS.replace(lost, remaining)
    if "name" in lost:  # otherwise an id shows it
        template = template.replace("{{ call.id }}", "").replace("{{ m.tool_call_id }}", "")
    for mark, text in (
        ("CHECK_RESULT", ""),
        ("CHECK_CALL", ""),
        ("ONE", ""),
        ("ARGUMENTS", ARGUMENTS["objects"]),
    ):
        template = template.replace(mark, text)
    made = call("a")

    with pytest.raises(ChatTemplateFailed, match="no place for tool calls and their results"):
        load(template).render_chat([*conversation_of("user: Q"), called(made), result(made, "r")])


@pytest.mark.parametrize("lost", ["name", "description", "parameters"])
def test_tools_are_shown_whole_or_refused(lost: str, load: Load) -> None:
    shown = "".join(
        "{{ t.function." + part + " | tojson }}"
        for part in ("name", "description", "parameters")
        if part != lost
    )
    tokenizer = load(
        "{% for t in tools or [] %}" + shown + "{% endfor %}" + each("{{ m.content }}")
    )

    assert not tokenizer.shows_tools()
    with pytest.raises(ChatTemplateFailed, match="no place for tools"):
        tokenizer.render_chat(TALK, [Tool("f", "Does it", '{"type": "object"}')])


def test_tools_that_some_conversations_hide_are_refused_with_them(load: Load) -> None:
    """Like Mistral: tools stand before the last question, so there must be one."""
    tokenizer = load(
        "{% for m in messages %}{% if m.role == 'user' and loop.last and tools %}"
        "{{ tools | tojson }}{% endif %}{{ m.content }}{% endfor %}"
    )
    tool = Tool("f", "Does it", '{"type": "object"}')

    assert '"f"' in tokenizer.render_chat(TALK, [tool])
    with pytest.raises(ChatTemplateFailed, match="leaves out a part of the tools"):
        tokenizer.render_chat([*TALK, *conversation_of("assistant: A")], [tool])


def test_a_template_that_shows_everything_has_no_faults(load: Load) -> None:
    assert load(TOOL_TEMPLATE).template_faults() == []


# Dates.


@pytest.fixture(params=["Pacific/Kiritimati", "Etc/GMT+12", "UTC"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Set the process's time zone."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield request.param
    time.tzset()


def test_the_date_in_a_prompt_is_that_of_utc(zone: str, load: Load) -> None:
    tokenizer = load(
        "{{ strftime_now('%Y-%m-%d') }} {{ strftime_now('%s') }} {{ messages[0].content }}"
    )

    before = datetime.now(UTC)
    day, seconds, _ = tokenizer.render_chat(conversation_of("user: Q")).split()
    after = datetime.now(UTC)

    assert os.environ["TZ"] == zone
    assert day in {f"{before:%Y-%m-%d}", f"{after:%Y-%m-%d}"}
    assert int(before.timestamp()) <= int(seconds) <= int(after.timestamp())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dates_are_english_and_utc_in_any_zone(layout: str, zone: str) -> None:
    assert utc_text(MOMENT, layout) == LAYOUTS[layout]


def test_names_of_days_and_months_are_those_of_the_c_locale() -> None:
    for month in range(1, 13):
        moment = MOMENT.replace(month=month, day=month)
        layout = "%a %A %b %B %h %p %c %x %X %r"
        assert utc_text(moment, layout) == moment.strftime(layout), "tests run in the C locale"


def test_one_prompt_has_one_moment(load: Load) -> None:
    tokenizer = load(
        "{% for i in range(5000) %}{{ strftime_now('%f') }} {% endfor %}{{ messages[0].content }}"
    )

    assert len(set(tokenizer.render_chat(conversation_of("user: Q")).split())) == 2


def test_a_template_that_draws_at_random_is_refused(load: Load) -> None:
    with pytest.raises(CheckpointInvalid, match="random"):
        load("{{ [1, 2] | random }}" + each("{{ m.content }}"))


def test_a_wide_date_is_refused(load: Load) -> None:
    with pytest.raises(ChatTemplateFailed, match="width or count"):
        load("{{ strftime_now('%999999999Y') }}").render_chat(conversation_of("user: Q"))
