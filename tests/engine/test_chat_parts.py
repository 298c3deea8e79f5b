"""Parts of a chat, found with vLLM's renderer and checked by decoding their tokens.

The templates imitate each model family: where it puts the system prompt and the tools, and the text
around them.
"""

import asyncio

import pytest

from vllm_kvcompress.engine.doctor.trial_prompt import role_spans
from vllm_kvcompress.engine.frontend.protection.chat_parts import ChatParts, PartError

CHATML = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% else %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}
{%- for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA3 = """{{ '<|begin_of_text|>' }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}
{%- set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{ 'Environment: ipython\\n' }}{% endif %}
{{- 'Cutting Knowledge Date: December 2023\\n\\n' + system + '<|eot_id|>' }}
{%- if tools %}{% set first = rest[0].content | trim %}{% set rest = rest[1:] %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nGiven the following functions, answer.\\n\\n' }}
{%- for t in tools %}{{ t | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}
{{- first + '<|eot_id|>' }}{% endif %}
{%- for m in rest %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
MISTRAL = """{{ '<s>' }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
{%- if m.role == 'user' %}
{%- if tools and loop.last %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' }}{% if loop.last and system is defined %}{{ system + '\\n\\n' }}{% endif %}
{{- m.content + '[/INST]' }}
{%- else %}{{ ' ' + m.content + '</s>' }}{% endif %}
{%- endfor %}"""
GEMMA = """{{ '<bos>' }}
{%- if messages[0].role == 'system' %}{% set prefix = messages[0].content + '\\n\\n' %}
{%- set rest = messages[1:] %}{% else %}{% set prefix = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{{- (prefix if loop.first else '') + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
TOOLS_FIRST = """{%- if tools %}{{ '<tools>' }}
{%- for t in tools %}{{ t.function.name + ': ' + t.function.description + '\\n' }}
{{- t.function.parameters | tojson + '\\n' }}{% endfor %}{{ '</tools>\\n' }}{% endif %}
{%- for m in messages %}{{ '[' + m.role + '] ' + m.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"""
FAMILIES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "tools first": TOOLS_FIRST,
}

SYSTEM = "  Never say “orange”; answer in three lines.\nQuote nothing.  "
FIRST, LAST = "What is in this text?\n" + "The lamp is blue. " * 40, "And what colour is the lamp?"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks up the {name} of a place.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
    for name in ("weather", "height", "mayor")
]


def chat(*, system=SYSTEM, last=LAST):
    first = [] if system is None else [{"role": "system", "content": system}]
    turn = [{"role": "user", "content": FIRST}, {"role": "assistant", "content": "A lamp."}]
    return [*first, *turn, {"role": "user", "content": last}]


@pytest.fixture(scope="module")
def renderer(demo_model):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers.registry import renderer_from_config

    on = {"kvcompress": {"compress": "cake"}}
    arguments = EngineArgs(model=str(demo_model), max_model_len=4096, additional_config=on)
    return renderer_from_config(arguments.create_engine_config())


def rendered_chat(renderer, template, messages, tools=None, **more):
    """Return the parts of a chat and its token ids."""
    from vllm.renderers.params import ChatParams

    kwargs = {"add_generation_prompt": True, "tools": tools, "tokenize": False, **more}
    params = ChatParams(chat_template=template, chat_template_kwargs=kwargs)
    tokenizing = renderer.default_chat_tok_params
    _, (prompt,) = renderer.render_chat([messages], params, tokenizing)
    return ChatParts(renderer, messages, params, tokenizing, prompt), prompt["prompt_token_ids"]


def decoded(renderer, ids, spans):
    return [renderer.tokenizer.decode(ids[start:stop]) for start, stop in spans]


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_spans_decode_to_the_text_of_their_part(family, with_tools, renderer):
    """At each end a span has at most one more token, which it shares with the adjacent text."""
    tools = TOOLS if with_tools and family != "gemma" else None
    parts, ids = rendered_chat(renderer, FAMILIES[family], chat(), tools)
    for word, text in (("system", SYSTEM.strip()), ("question", LAST)):
        (found,) = decoded(renderer, ids, parts.spans(word))
        assert text in found
        assert len(found) <= len(text) + 12
    if tools is None:
        assert parts.spans("tools") == ()
        return
    (found,) = decoded(renderer, ids, parts.spans("tools"))
    for tool in tools:
        assert tool["function"]["description"] in found
        assert tool["function"]["name"] in found
    assert found.rstrip().endswith(("}", "]")) or "</tools>" in found or "[INST]" in found
    assert SYSTEM.strip() not in found
    assert LAST not in found


@pytest.mark.parametrize("family", FAMILIES)
def test_async_rendering_finds_the_same_spans(family, renderer):
    from vllm.renderers.params import ChatParams

    from vllm_kvcompress.engine.frontend.protection.chat_parts import (
        install,
        needed_parts,
        parts_of,
    )

    install()
    tools = None if family == "gemma" else TOOLS
    sync_parts, ids = rendered_chat(renderer, FAMILIES[family], chat(), tools)
    kwargs = {"add_generation_prompt": True, "tools": tools, "tokenize": False}
    params = ChatParams(chat_template=FAMILIES[family], chat_template_kwargs=kwargs)

    async def render():
        needed_parts.set(("system", "question"))
        # contents may be iterators of parts, which can be read only once
        messages = [{**m, "content": iter([_text(m["content"])])} for m in chat()]
        return await renderer.render_chat_async([messages], params)

    _, (prompt,) = asyncio.run(render())
    assert prompt["prompt_token_ids"] == ids
    assert "prompt_token_offsets" not in prompt
    for word in ("system", "question"):
        assert parts_of(prompt).spans(word) == sync_parts.spans(word)


def _text(text):
    return {"type": "text", "text": text}


def test_a_default_system_prompt_is_not_a_part(renderer):
    parts, _ = rendered_chat(renderer, CHATML, chat(system=None), TOOLS)
    assert parts.spans("system") == ()


def test_system_and_developer_messages_are_both_found(renderer):
    template = TOOLS_FIRST
    messages = [*chat(), {"role": "developer", "content": "Be brief."}, *chat()[-1:]]
    parts, ids = rendered_chat(renderer, template, messages)
    first, second = decoded(renderer, ids, parts.spans("system"))
    assert SYSTEM.strip() in first
    assert "Be brief." in second


@pytest.mark.parametrize(("last_role", "rest"), [("user", "template"), ("critic", "other")])
def test_every_token_has_one_role(last_role, rest, renderer):
    developer = {"role": "developer", "content": "Now answer in two."}
    messages = [*chat()[:-1], developer, {"role": last_role, "content": LAST}]
    parts, ids = rendered_chat(renderer, TOOLS_FIRST, messages)
    spans = role_spans(parts, parts.prompt)
    assert list(spans) == ["system", "user", "assistant", rest]
    found = sorted(token for each in spans.values() for span in each for token in range(*span))
    assert found == list(range(len(ids)))
    system = "".join(decoded(renderer, ids, spans["system"]))
    assert SYSTEM.strip() in system
    assert developer["content"] in system


def test_contents_can_be_strings_in_a_list(renderer):
    """vLLM accepts them and joins them with line breaks."""
    messages = [{"role": "system", "content": [SYSTEM.strip(), "Be brief."]}, *chat(system=None)]
    parts, ids = rendered_chat(renderer, CHATML, messages)
    (found,) = decoded(renderer, ids, parts.spans("system"))
    assert SYSTEM.strip() in found
    assert "Be brief." in found


@pytest.mark.parametrize(
    ("messages", "word", "why"),
    [
        ([*chat(), {"role": "user", "content": [{"type": "refusal", "refusal": "No."}]}],
         "question", "contain more than text"),
        ([*[{"role": "system", "content": f"Rule {n}."} for n in range(33)], *chat(system=None)],
         "system", "more than 32 messages"),
        ([{**chat()[0], "tools": TOOLS}, *chat()[1:]], "tools", "some of them are in its messages"),
    ],
)  # fmt: skip
def test_parts_that_cannot_be_found_are_refused(messages, word, why, renderer):
    from vllm.renderers.params import ChatParams

    params = ChatParams(chat_template=TOOLS_FIRST, chat_template_kwargs={"tools": TOOLS})
    tokenizing = renderer.default_chat_tok_params
    _, (prompt,) = renderer.render_chat([chat()], params, tokenizing)
    parts = ChatParts(renderer, messages, params, tokenizing, prompt)
    with pytest.raises(PartError, match=why):
        parts.spans(word)


def test_both_ends_of_a_long_question_are_protected(renderer):
    """A document in the last message is not protected; the text before and after it is."""
    question = "Summarise this:\n" + "The lamp is blue. " * 300 + "\nIn one line, please."
    parts, ids = rendered_chat(renderer, CHATML, chat(last=question))
    spans = parts.spans("question")
    assert [stop - start for start, stop in spans] == [256, 256]
    first, last = decoded(renderer, ids, spans)
    assert first.startswith("Summarise this:") or "Summarise this:" in first[:30]
    assert "In one line, please." in last


def test_a_continued_assistant_message_is_found(renderer):
    messages = [*chat(), {"role": "assistant", "content": "The lamp"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    parts, ids = rendered_chat(renderer, CHATML, messages, **more)
    (found,) = decoded(renderer, ids, parts.spans("question"))
    assert LAST in found


@pytest.mark.parametrize(
    ("template", "word", "why"),
    [
        (CHATML.replace("{{ messages[0].content }}", "{{ messages[0].content * 2 }}"), "system",
         "changes other text with it"),
        (CHATML.replace("# Tools", "# Tools: {{ tools | length }}"), "tools",
         "in more than one place"),
        (TOOLS_FIRST.replace("in tools", "in tools | sort(attribute='function.name')"), "tools",
         "in another order"),
    ],
)  # fmt: skip
def test_a_template_that_repeats_a_part_is_refused(template, word, why, renderer):
    parts, _ = rendered_chat(renderer, template, chat(), TOOLS)
    with pytest.raises(PartError, match=why):
        parts.spans(word)


def test_an_exception_of_a_template_is_not_repeated(renderer):
    """Its text may contain the chat, and goes into a response and a log."""
    raises = "{% if 'kvcompress0stands' in messages[0].content %}{{ messages[0].content[9999] + 'x'"
    template = CHATML + raises + " + raise_exception(messages[1].content) }}{% endif %}"
    parts, _ = rendered_chat(renderer, template, chat())
    with pytest.raises(PartError) as refusal:
        parts.spans("system")
    assert str(refusal.value) == "the chat template cannot render a variant of the chat"


def test_a_template_that_omits_a_part_has_no_span(renderer):
    parts, _ = rendered_chat(renderer, GEMMA, chat(), TOOLS)
    assert parts.spans("tools") == ()


def test_ambiguous_text_at_part_borders(renderer):
    """Several tokens per character, and text that ends like the placeholder."""
    system = "Q🦜é—“ answer in emoji 🦜Q"
    parts, ids = rendered_chat(renderer, CHATML, chat(system=system))
    (found,) = decoded(renderer, ids, parts.spans("system"))
    assert system in found
