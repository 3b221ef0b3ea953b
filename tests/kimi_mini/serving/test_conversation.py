"""A conversation as token ids: what was said is sent again as it was."""

import dataclasses

import pytest

from kimi_mini import SamplingParams
from kimi_mini.serving.caches import CacheOptions
from kimi_mini.serving.conversation import Conversation, read_turns, turn_by_turn
from kimi_mini.serving.open_model import around
from tests.kimi_mini.serving.alone import oracle_engine, script, small_model

BOS = 1


def told(text):
    return [ord(letter) + 3 for letter in text]


def answer(engine, prompt, count=5):
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return engine.generate([prompt], params)[0].outputs[0]


def test_each_turn_goes_behind_all_that_was_said_answers_included():
    engine = oracle_engine(context=400, prefix_cache="radix", state_slots=9, kv_pages=40)
    talk = Conversation(engine.opened)
    expected = [BOS]
    for turn in ("How long is a state?", "And a page?", "Who cuts it"):
        prompt = talk.ask(turn)
        expected += told(turn)
        assert prompt == expected
        own = answer(engine, prompt)
        talk.hear(own)
        expected += own.token_ids
    assert talk.ids == expected


def test_what_is_sampled_is_kept_as_ids_even_where_it_is_no_text():
    """Half a character, a special token, the end of sequence: as text they would not come back."""
    ids = [0xC3 + 3, 2, 0, 0xFF + 3]
    engine = oracle_engine(script(3, ids))
    talk = Conversation(engine.opened)
    own = answer(engine, talk.ask("ab"), 4)
    assert list(own.token_ids) == ids
    talk.hear(own)
    assert talk.ask("c") == [BOS, *told("ab"), *ids, *told("c")]


def test_a_prompt_is_the_callers_own_list():
    talk = Conversation(around(small_model()))
    prompt = talk.ask("ab")
    prompt.append(9)
    assert talk.ids == [BOS, *told("ab")]
    start = [BOS, 7]
    talk = Conversation(around(small_model()), start)
    talk.ask("a")
    assert start == [BOS, 7]


def test_it_may_begin_with_the_ids_of_a_system_prompt():
    """Which has its bos, or has none on purpose: no second one is put behind it."""
    talk = Conversation(around(small_model()), [7, 8])
    assert talk.ask("ab") == [7, 8, *told("ab")]


def test_an_empty_turn_adds_nothing():
    talk = Conversation(around(small_model()), [7, 8])
    assert talk.ask("") == [7, 8]


def test_a_model_without_text_says_so_and_nothing_is_changed():
    opened = dataclasses.replace(around(small_model()), tokenizer=None, no_text="no vocabulary")
    talk = Conversation(opened, [7])
    with pytest.raises(ValueError, match="use token ids: no vocabulary"):
        talk.ask("ab")
    assert talk.ids == [7]


@pytest.mark.parametrize(
    "cache, options",
    [("radix", {}), ("blocks", dict(state_block=16, retention=16))],
    ids=["radix", "blocks"],
)
def test_later_turns_read_what_earlier_ones_have_left(cache, options):
    """Each is resumed from the last page that was computed for the one before it."""
    engine = oracle_engine(
        context=600, prefix_cache=cache, cache_options=CacheOptions(**options), state_slots=60,
        kv_pages=60,
    )  # fmt: skip
    talk = Conversation(engine.opened)
    computed = 0
    for turn in range(6):
        own = answer(engine, talk.ask(f"turn {turn}, some more words to it"), 20)
        assert own.cached_tokens == computed // 16 * 16
        talk.hear(own)
        computed = len(talk.ids) - 1  # the last token never runs
    assert engine.totals.prefill_tokens < len(talk.ids)


@pytest.mark.parametrize(
    "content, turns",
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\r\ntwo", ["one", "two"]),
        (b"\n\n  one\n \t\n\r\n\ntwo  \n", ["  one", "two  "]),
        (b"a\rb\x0bc\x0cd\x1ce\n", ["a\rb\x0bc\x0cd\x1ce"]),
        ("a\u2028b\u2029c\u0085d\nzwei \u00e4".encode(), ["a\u2028b\u2029c\u0085d", "zwei \u00e4"]),
        (b"a\r\r\n", ["a\r"]),
        (b"\xffa\n", ["\udcffa"]),
    ],
)
def test_a_turn_is_a_line_and_only_a_line_feed_ends_one(content, turns, tmp_path):
    (tmp_path / "chat.txt").write_bytes(content)
    assert read_turns(tmp_path / "chat.txt") == turns


@pytest.mark.parametrize("content", [b"", b"\n", b" \r\n\t\n"])
def test_a_file_without_a_turn_is_refused(content, tmp_path):
    (tmp_path / "chat.txt").write_bytes(content)
    with pytest.raises(ValueError, match="there is no turn in .*chat.txt"):
        read_turns(tmp_path / "chat.txt")


def test_a_turn_that_does_not_fit_is_named_and_those_before_it_have_run():
    """Turn 3 would be the first to pass the context: 1 + 40 + 5 + 40 + 5 + 40 of 100 tokens."""
    engine = oracle_engine(context=100)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    talk, heard = turn_by_turn(engine, [], ["x" * 40] * 3, params), []
    with pytest.raises(ValueError, match="turn 3: .*131 tokens"):
        for requests in talk:
            for _ in engine.run(requests):
                pass
            heard += [request.output() for request in requests]
    assert [len(output.prompt_token_ids) for output in heard] == [41, 86]
