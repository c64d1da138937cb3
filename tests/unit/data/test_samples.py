from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from moesaic.common.errors import MoesaicError
from moesaic.data.files import Record
from moesaic.data.recipe import SourceRecipe
from moesaic.data.samples import ChatRenderer, make_samples
from moesaic.data.tokenise import Encoder

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "  four, 四 "},
    {"role": "user", "content": "assistant and four?"},
    {"role": "assistant", "content": "eight"},
]
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like Qwen3's: the last answer is written with (empty) thinking, those before it without.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "(think)\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def encode(tokenizer, fields, **options):
    source = SourceRecipe(path="x", domain="d", **options)
    encoder = Encoder(tokenizer)
    render = encoder.render_chat if source.kind == "chat" else None
    samples = make_samples(Record("FILE:7", fields), source, render, encoder.vocab_size)
    return encoder.encode(samples) if samples else []


def runs(tokenizer, document):
    """The text that is trained on, one string per run of tokens."""
    masked = np.zeros(len(document.ids), dtype=bool)
    for start, stop in document.masked:
        masked[start:stop] = True
    pieces, current = [], []
    for token, hidden in zip(document.ids.tolist(), masked.tolist(), strict=True):
        if not hidden:
            current.append(token)
        elif current:
            pieces.append(tokenizer.decode(current))
            current = []
    return pieces + ([tokenizer.decode(current)] if current else [])


def test_text_ends_with_eos_once(tokenizer, new_tokenizer):
    (document,) = encode(tokenizer, {"text": "Two and two"})
    assert document.ids.tolist() == [*tokenizer("Two and two").input_ids, tokenizer.eos_token_id]
    assert document.masked == ()
    (document,) = encode(tokenizer, {"text": "Two<eos>"})
    assert tokenizer.decode(document.ids) == "Two<eos>"
    assert encode(tokenizer, {"text": ""}) == []


def test_the_tokenizers_own_beginning_is_kept(new_tokenizer):
    from tokenizers import processors

    tokenizer = new_tokenizer()
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    (document,) = encode(tokenizer, {"text": "Two"})
    assert tokenizer.decode(document.ids) == "<bos>Two<eos>"
    (document,) = encode(tokenizer, {"p": "Two", "c": " four"}, prompt="p", completion="c")
    assert tokenizer.decode(document.ids) == "<bos>Two four<eos>"
    assert runs(tokenizer, document) == [" four<eos>"]
    (document,) = encode(tokenizer, {"m": CHAT}, messages="m")
    assert bos not in document.ids.tolist()


def test_truncation_and_padding_set_on_the_tokenizer_do_not_matter(new_tokenizer):
    tokenizer = new_tokenizer()
    before = Encoder(tokenizer)
    tokenizer(["Two and two are four", "x"], truncation=True, max_length=2, padding="max_length")
    after = Encoder(tokenizer)
    assert after.fingerprint == before.fingerprint
    (document,) = encode(tokenizer, {"text": "Two and two are four"})
    assert tokenizer.decode(document.ids) == "Two and two are four<eos>"


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("Two and two", " are four"), ("Two and ", "two"), ("", "four"), ("Two", ""), ("Größe: ", "五 and 六")],
)
def test_only_the_completion_is_trained_on(tokenizer, prompt, completion):
    (document,) = encode(tokenizer, {"p": prompt, "c": completion}, prompt="p", completion="c")
    assert tokenizer.decode(document.ids) == prompt + completion + "<eos>"
    (trained,) = runs(tokenizer, document)
    assert trained.endswith(completion + "<eos>")
    assert len(trained) <= len(completion + "<eos>") + 1  # a token over the boundary belongs to the completion


def test_incremental_chat_trains_on_the_assistants_turns(tokenizer):
    (document,) = encode(tokenizer, {"m": CHAT}, messages="m")
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(document.ids) == whole + "<eos>"
    assert runs(tokenizer, document) == ["  four, 四 <|im_end|>", "eight<|im_end|>", "<eos>"]


def test_no_second_eos_where_the_turn_ends_with_one(new_tokenizer):
    tokenizer = new_tokenizer(eos="<|im_end|>")
    (document,) = encode(tokenizer, {"m": CHAT}, messages="m")
    assert tokenizer.decode(document.ids) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert runs(tokenizer, document) == ["  four, 四 <|im_end|>", "eight<|im_end|>"]


def test_marked_template_gives_the_mask_of_transformers(new_tokenizer):
    tokenizer = new_tokenizer(MARKED, eos="<|im_end|>")
    (document,) = encode(tokenizer, {"m": CHAT}, messages="m")
    expected = tokenizer.apply_chat_template(
        CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
    )
    masked = [True] * len(document.ids)
    for index in range(len(masked)):
        masked[index] = any(start <= index < stop for start, stop in document.masked)
    assert document.ids.tolist() == expected["input_ids"]
    assert [int(not hidden) for hidden in masked] == expected["assistant_masks"]
    assert runs(tokenizer, document) == ["  four, 四 <|im_end|>", "eight<|im_end|>"]


def test_a_template_that_rewrites_earlier_turns_gives_a_document_per_turn(new_tokenizer):
    tokenizer = new_tokenizer(FORGETFUL, eos="<|im_end|>")
    first, second = encode(tokenizer, {"m": CHAT}, messages="m")
    assert tokenizer.decode(first.ids) == tokenizer.apply_chat_template(CHAT[:3], tokenize=False)
    assert tokenizer.decode(second.ids) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert runs(tokenizer, first) == ["(think)\n\n  four, 四 <|im_end|>"]
    assert runs(tokenizer, second) == ["(think)\n\neight<|im_end|>"]
    (single,) = encode(tokenizer, {"m": CHAT[:3]}, messages="m")
    assert single.ids.tolist() == first.ids.tolist()


def test_a_template_without_an_end_of_turn_token_learns_to_stop(new_tokenizer):
    tokenizer = new_tokenizer(PLAIN)
    (document,) = encode(tokenizer, {"m": CHAT}, messages="m")
    assert runs(tokenizer, document) == ["  four, 四 \n", " eight\n<eos>"]  # " eight" is one token


def test_a_template_with_a_clock_always_shows_the_same_day(new_tokenizer):
    template = (
        "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}|{{ strftime_now('%Y-%m-%d') }}{% endif %}"
    )
    tokenizer = new_tokenizer(template + MARKED)
    (sample,) = ChatRenderer(tokenizer)(CHAT, "x")
    assert sample.text.startswith("01 Jan 2025|2025-01-01<|im_start|>system")
    assert sample.trained is not None
    assert [sample.text[a:b] for a, b in sample.trained] == ["  four, 四 <|im_end|>", "eight<|im_end|>"]
    (sample,) = ChatRenderer(new_tokenizer(template + PLAIN))(CHAT, "x")
    assert sample.text.startswith("01 Jan 2025|2025-01-01system: Be brief.")


def test_given_tokens_are_taken_as_they_are(tokenizer):
    (document,) = encode(tokenizer, {"t": [5, 6, 7]}, tokens="t")
    assert document.ids.tolist() == [5, 6, 7, tokenizer.eos_token_id]
    (document,) = encode(tokenizer, {"t": [5, tokenizer.eos_token_id]}, tokens="t")
    assert document.ids.tolist() == [5, tokenizer.eos_token_id]
    assert encode(tokenizer, {"t": []}, tokens="t") == []


TEXT, CHATS, TOKENS = {}, {"messages": "m"}, {"tokens": "t"}
BAD = [
    ({"body": "a", "id": 1}, TEXT, "FILE:7: no field 'text'; the record has body, id"),
    ({}, TEXT, "FILE:7: no field 'text'; the record has none"),
    ({"text": 5}, TEXT, "FILE:7: field 'text' must be a string, found int"),
    ({"text": None}, TEXT, "FILE:7: field 'text' must be a string, found null"),
    ({"text": "a\ud800"}, TEXT, "FILE:7: field 'text' is not valid Unicode (a lone surrogate at character 1)"),
    ({"p": "a"}, {"prompt": "p", "completion": "c"}, "FILE:7: no field 'c'; the record has p"),
    ({"p": "a", "c": []}, {"prompt": "p", "completion": "c"}, "FILE:7: field 'c' must be a string, found list"),
    ({"t": "5"}, TOKENS, "FILE:7: field 't' must be a list of token ids, found str"),
    ({"t": [1, True]}, TOKENS, "FILE:7: field 't' must be a list of token ids"),
    ({"t": [1, -2]}, TOKENS, "FILE:7: token id -2 is not in the tokenizer's vocabulary"),
    ({"t": [1, 10**6]}, TOKENS, "FILE:7: token id 1000000 is not in the tokenizer's vocabulary"),
    ({"m": "hi"}, CHATS, "FILE:7: field 'm' must be a list of {role, content}, found str"),
    ({"m": []}, CHATS, "FILE:7: field 'm' must be a list of {role, content}, found an empty list"),
    ({"m": [{"content": "a"}]}, CHATS, "FILE:7: field 'm': message 0 has no role"),
    ({"m": [{"role": "user", "content": [{"type": "text"}]}]}, CHATS, "FILE:7: field 'm[0].content' must be a string"),
    ({"m": [{"role": "user", "content": "a"}]}, CHATS, "FILE:7: the chat has no assistant message"),
    ({"m": [{"role": "assistant", "content": "a"}]}, CHATS, "FILE:7: the chat begins with the assistant"),
]


@pytest.mark.parametrize(("fields", "options", "message"), BAD)
def test_bad_records_are_one_line_with_the_place(tokenizer, fields, options, message):
    with pytest.raises(MoesaicError) as caught:
        encode(tokenizer, fields, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_templates_that_cannot_be_used(new_tokenizer):
    with pytest.raises(MoesaicError, match="has no chat template"):
        encode(new_tokenizer(None), {"m": CHAT}, messages="m")
    raising = "{{ raise_exception('only two roles\nplease') }}"
    with pytest.raises(MoesaicError, match=r"^FILE:7: the chat template refuses the chat \(only two roles\)$"):
        encode(new_tokenizer(raising), {"m": CHAT}, messages="m")
    other_prompt = PLAIN.replace("%}assistant: {%", "%}Answer: {%")
    with pytest.raises(MoesaicError, match="FILE:7: the chat template does not put the answer after"):
        encode(new_tokenizer(other_prompt), {"m": CHAT}, messages="m")
    nothing_marked = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    )
    with pytest.raises(MoesaicError, match="FILE:7: the chat template marks nothing"):
        encode(new_tokenizer(nothing_marked), {"m": CHAT}, messages="m")


def test_tokenizers_that_cannot_be_used(new_tokenizer):
    tokenizer = new_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(MoesaicError, match="no end-of-sequence token"):
        Encoder(tokenizer)
    with pytest.raises(MoesaicError, match="not a fast tokenizer"):
        Encoder(cast(PreTrainedTokenizerBase, SimpleNamespace(name_or_path="slow")))
