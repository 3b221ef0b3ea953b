"""One sample: which logits it wants, what it makes of them, where its text ends."""

from dataclasses import replace

import pytest
import torch

from cache.leases import CacheRequest
from kimi_mini import SamplingParams
from kimi_mini.serving.sampling import TokenSampler
from kimi_mini.serving.sequence import Sequence
from kimi_mini.serving.text.byte_level import ByteTokenizer
from tests.kimi_mini.serving.alone import VOCAB, assert_logprobs, prefix_hash, scored_prompt

PROMPT = [1, 75, 108]


def make(prompt=PROMPT, room=None, end_ids=(2,), tokenizer=True, **params):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 30} | params)
    sampler = TokenSampler(params, prompt, vocab_size=VOCAB, end_ids=end_ids)
    return Sequence(
        "r", 0, prompt, params, sampler, room=params.max_tokens if room is None else room,
        end_ids=end_ids, tokenizer=ByteTokenizer() if tokenizer else None,
    )  # fmt: skip


def say(sequence, token):
    """One step in which the whole of what is known runs, and this is the likeliest next token."""
    positions = sequence.logits_wanted(sequence.computed, len(sequence.tokens))
    logits = torch.zeros(len(positions), VOCAB)
    logits[-1, token] = 9.0
    return sequence.receive(logits, positions, len(sequence.tokens))


def say_text(sequence, text):
    """Byte by byte until the sequence ends; all deltas."""
    deltas = []
    for byte in text if isinstance(text, bytes) else text.encode():
        deltas.append(say(sequence, byte + 3))
        if sequence.finish_reason is not None:
            break
    return deltas


def text_of(deltas):
    return "".join(delta.text for delta in deltas)


# --- logits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("start, end, wanted", [(0, 3, [2]), (0, 2, []), (2, 3, [2]), (1, 2, [])])
def test_only_the_last_known_token_gives_logits(start, end, wanted):
    assert list(make().logits_wanted(start, end)) == wanted


def test_a_scored_prompt_wants_all_until_it_is_scored():
    sequence = make(prompt_logprobs=0)
    assert list(sequence.logits_wanted(0, 2)) == [0, 1]
    assert sequence.storage_request().key_cap == 0  # a prefix that was not run gives no logits
    sequence.receive(torch.zeros(2, VOCAB), range(2), 2)
    assert not sequence.scores_prompt and sequence.storage_request().key_cap is None
    assert list(sequence.logits_wanted(2, 3)) == [2]


@pytest.mark.parametrize("prompt", [[5], [5, 6], list(range(3, 23))], ids=len)
@pytest.mark.parametrize(
    "rounds",
    [[[]], [[1]], [[7, 8]], [[1, 2, 3]], [[5], [9, 15]], [[9, 15], [5]], [[18], []]],
    ids=str,
)
def test_a_prompt_is_scored_once_whatever_the_pieces_and_preemptions(prompt, rounds):
    """Ends of pieces; after a preemption all runs again, in other pieces."""
    sequence = make(prompt, prompt_logprobs=2)
    deltas = []
    for number, own in enumerate(rounds):
        ends = [end for end in own if end < len(prompt)]
        if number == len(rounds) - 1:
            ends.append(len(prompt))
        start = sequence.computed = 0
        for end in ends:
            positions = sequence.logits_wanted(start, end)
            rows = [prefix_hash(prompt[: p + 1]) for p in positions]
            logits = torch.stack(rows) if rows else torch.empty(0, VOCAB)
            deltas.append(sequence.receive(logits, positions, end))
            start = end
    expected = scored_prompt(prefix_hash, prompt, 2)
    assert len(sequence.prompt_logprobs) == len(prompt)
    for one, other in zip(sequence.prompt_logprobs, expected, strict=True):
        assert_logprobs(one, other)
    assert sequence.output_ids == [int(prefix_hash(prompt).argmax())]
    assert [d.prefilled for d in deltas][-1] == len(prompt)


def test_what_is_asked_of_a_cache_is_all_that_is_known_then():
    sequence = make()
    say(sequence, 70)
    request = sequence.storage_request()
    assert request == CacheRequest("r.0", [*PROMPT, 70], prompt=len(PROMPT), must_fit=True)
    say(sequence, 71)
    assert request.ids == (*PROMPT, 70)


def test_a_piece_that_is_not_the_last_brings_progress_only():
    sequence = make()
    delta = sequence.receive(torch.empty(0, VOCAB), range(0), 2)
    assert (delta.prefilled, delta.prompt_tokens, delta.token_ids, delta.text) == (2, 3, (), "")
    assert delta.finish_reason is None and sequence.output_ids == []


def test_logprobs_are_told_with_the_token_they_belong_to():
    sequence = make(logprobs=1)
    deltas = [say(sequence, token) for token in (70, 300)]
    assert [[*own] for d in deltas for own in d.logprobs] == [[70], [300]]
    assert [[*own] for own in sequence.output().logprobs] == [[70], [300]]
    assert say(make(), 70).logprobs is None and make().output().logprobs is None


@pytest.mark.parametrize("scored", [None, 0])
def test_unusable_logits_end_it_with_an_error_and_keep_what_was_said(scored):
    sequence = make(prompt_logprobs=scored)
    say_text(sequence, "ab")
    positions = sequence.logits_wanted(4, 5)
    delta = sequence.receive(torch.full((1, VOCAB), float("nan")), positions, 5)
    assert delta.finish_reason == "error" and "the logits are not finite" in delta.error
    own = sequence.output()
    assert (own.text, own.error, own.token_ids) == ("ab", delta.error, (100, 101))


def test_a_prompt_of_unusable_logits_is_not_half_scored_and_sampled():
    sequence = make(prompt_logprobs=0)
    logits = torch.zeros(3, VOCAB)
    logits[0] = float("nan")
    delta = sequence.receive(logits, range(3), 3)
    assert (delta.finish_reason, delta.token_ids) == ("error", ())
    assert sequence.prompt_logprobs == [None]


# --- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["中🙂", "a中b🙂c", " lead", "é"])
def test_br53_a_character_is_told_when_its_last_byte_is_there(text):
    sequence = make(max_tokens=len(text.encode()))
    deltas = say_text(sequence, text)
    assert text_of(deltas) == sequence.output().text == text
    told = [delta.text for delta in deltas if delta.text]
    assert told == list(text)
    assert sequence.finish_reason == "length"


@pytest.mark.parametrize("cut", [1, 2, 4, 5, 6])
def test_br53_an_unfinished_character_is_one_replacement_at_the_very_end(cut):
    data = "中🙂".encode()[:cut]
    sequence = make(max_tokens=cut)
    deltas = say_text(sequence, data)
    whole = "" if cut < 3 else "中"
    assert text_of(deltas[:-1]) == whole
    assert text_of(deltas) == sequence.output().text == whole + "\ufffd"
    assert text_of(deltas) == ByteTokenizer().decode(sequence.output_ids)


@pytest.mark.parametrize("skip", [True, False])
def test_br53_specials_are_silent_or_shown(skip):
    sequence = make(end_ids=(), skip_special_tokens=skip, max_tokens=4)
    text = text_of([say(sequence, token) for token in (68, 2, 1, 69)])
    assert text == ("AB" if skip else "A<eos><bos>B")


@pytest.mark.parametrize(
    "text, stop, shown, reason",
    [
        ("Hello, world", ["lo, w"], "Hel", "lo, w"),
        ("aaab", ["aab"], "a", "aab"),  # begun twice
        ("abcabd", ["abd"], "abc", "abd"),
        ("x中🙂y", ["🙂"], "x中", "🙂"),  # four tokens, no byte of which may slip through
        ("x中🙂y", ["中🙂"], "x", "中🙂"),
        ("one two", ["two", "one t"], "", "one t"),  # what starts first
    ],
)
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_ends_it_and_never_shows_in_part(
    text, stop, shown, reason, include
):
    sequence = make(stop=stop, include_stop_str_in_output=include)
    deltas = say_text(sequence, text)
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", reason)
    assert text_of(deltas) == sequence.output().text == shown + (reason if include else "")
    before = text_of(deltas[:-1])
    assert shown.startswith(before)
    assert len(sequence.output_ids) == len((shown + reason).encode())


def test_the_beginning_of_a_stop_string_is_let_go_at_the_end():
    sequence = make(stop=["END"], max_tokens=5)
    deltas = say_text(sequence, "abcEN")
    assert [delta.text for delta in deltas] == ["a", "b", "c", "", "EN"]
    assert (sequence.finish_reason, sequence.stop_reason) == ("length", None)


def test_a_stop_string_that_only_the_end_completes_counts():
    """The replacement of half a character."""
    sequence = make(stop=["a\ufffd"], max_tokens=2)
    deltas = say_text(sequence, b"a\xe4")
    assert text_of(deltas) == ""
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", "a\ufffd")


def test_without_a_tokenizer_there_are_tokens_and_no_text():
    sequence = make(tokenizer=False, max_tokens=2)
    deltas = say_text(sequence, "ab")
    assert text_of(deltas) == sequence.output().text == ""
    assert sequence.output().token_ids == (100, 101) and sequence.finish_reason == "length"


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("token, reason", [(2, None), (70, 70), (71, 71)])
def test_end_tokens_and_stop_tokens_end_it_and_are_kept_as_tokens(token, reason, include):
    sequence = make(stop_token_ids=[70, 71], include_stop_str_in_output=include)
    say(sequence, 68)
    delta = say(sequence, token)
    assert (delta.finish_reason, delta.stop_reason, delta.token_ids) == ("stop", reason, (token,))
    assert sequence.output().token_ids == (68, token)
    shown = ByteTokenizer().decode([token]) if include else ""
    assert sequence.output().text == "A" + shown


def test_an_id_that_is_both_counts_as_an_end_token():
    assert say(make(stop_token_ids=[2]), 2).stop_reason is None
    assert say(make(stop_token_ids=[2], ignore_eos=True), 2).stop_reason == 2


def test_before_min_tokens_nothing_ends_it():
    """The sampler masks end tokens; a stop string that ends there is not one."""
    sequence = make(min_tokens=4, stop=["b"])
    deltas = say_text(sequence, "abcbcb")
    assert [delta.finish_reason for delta in deltas] == [None] * 5 + ["stop"]
    assert sequence.output().text == "abcbc"
    masked = make(min_tokens=2)
    assert [say(masked, 2).token_ids[0] == 2 for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    "text, min_tokens, tokens, told, shown",
    [
        ("xabcd", 3, 4, ["x", "", "", ""], "x"),  # begins in the second token, ends in the fourth
        ("xabcd", 4, 5, ["x", "", "", "abc", "d"], "xabcd"),  # ends with the last that may not
        ("xabxabc", 3, 7, ["x", "", "", "abx", "", "", ""], "xabx"),
        ("abcabc", 3, 6, ["", "", "abc", "", "", ""], "abc"),
    ],
)
def test_a_stop_string_counts_that_begins_among_min_tokens_and_ends_after_them(
    text, min_tokens, tokens, told, shown
):
    sequence = make(min_tokens=min_tokens, stop=["abc"], max_tokens=len(text))
    deltas = say_text(sequence, text)
    assert [delta.text for delta in deltas] == told and len(deltas) == tokens
    assert sequence.output().text == shown
    assert sequence.stop_reason == (None if shown == text else "abc")


def test_what_begins_as_a_stop_string_among_min_tokens_is_told_if_all_of_it_is_there():
    """No stop string ends within so many tokens, not even at the very end."""
    sequence = make(min_tokens=3, stop=["abc", "a\ufffd"], max_tokens=3)
    assert text_of(say_text(sequence, "abc")) == "abc"
    assert (sequence.finish_reason, sequence.stop_reason) == ("length", None)
    sequence = make(min_tokens=2, stop=["a\ufffd"], max_tokens=2)
    assert text_of(say_text(sequence, b"a\xe4")) == "a\ufffd"
    assert (sequence.finish_reason, sequence.stop_reason) == ("length", None)


@pytest.mark.parametrize("room", [1, 2, 5])
def test_it_ends_with_its_room(room):
    sequence = make(room=room)
    deltas = [say(sequence, 70) for _ in range(room)]
    assert [delta.finish_reason for delta in deltas] == [None] * (room - 1) + ["length"]


def test_an_end_token_in_the_last_place_is_a_stop():
    sequence = make(room=1)
    assert say(sequence, 2).finish_reason == "stop"


def test_a_prompt_that_was_only_to_be_scored_samples_nothing():
    sequence = make(max_tokens=0, prompt_logprobs=0)
    delta = sequence.receive(torch.zeros(3, VOCAB), range(3), 3)
    assert (delta.finish_reason, delta.token_ids, sequence.output_ids) == ("length", (), [])
    assert sequence.sampler.num_sampled == 0


def test_what_was_held_back_is_told_when_it_is_cancelled():
    sequence = make(stop=["END"])
    say_text(sequence, "aEN")
    delta = sequence.end("abort")
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("EN", "abort", None)
    assert sequence.output().text == "aEN"


def test_an_output_does_not_change_with_its_sequence():
    sequence = make()
    say_text(sequence, "a")
    before = sequence.output()
    kept = replace(before, timings=replace(before.timings))
    sequence.timings.decode += 1
    say_text(sequence, "b")
    assert before == kept
