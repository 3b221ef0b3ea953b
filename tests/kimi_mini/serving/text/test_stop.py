"""Stop strings: a property of the text, not of its cuts."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kimi_mini.serving.text.stop import StopStrings

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4).map(tuple)
PARTS = st.lists(st.text("ab", max_size=4), max_size=8)


def first_stop(text, stops):
    """By trying every place: (start, stop) of the earliest start, then the shortest; or None."""
    places = [
        (start, len(stop), stop)
        for stop in stops
        for start in range(len(text))
        if text[start : start + len(stop)] == stop
    ]
    return (min(places)[0], min(places)[2]) if places else None


def held_back(text, stops):
    """By trying every end: how much of a text without a stop string may still become one."""
    return max(
        (size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])),
        default=0,
    )


def run(watch, parts):
    return [*map(watch.push, parts), watch.finish()]


@settings(deadline=None, max_examples=300)
@given(STOPS, PARTS, st.booleans())
@example(("abab", "ba"), ["aba", "a"], False)
@example(("aab", "ab", "b"), ["a", "aab"], True)
def test_the_result_is_that_of_the_whole_text_under_any_cuts(stops, parts, include):
    text = "".join(parts)
    watch = StopStrings(stops, include)
    got = "".join(run(watch, parts))
    found = first_stop(text, stops)
    if found is None:
        assert (got, watch.matched) == (text, None)
    else:
        start, stop = found
        assert watch.matched == stop
        assert got == text[:start] + (stop if include else "")


@settings(deadline=None, max_examples=300)
@given(STOPS, PARTS)
@example(("aab",), ["aa", "a"])
def test_exactly_what_may_become_a_stop_string_is_held_back(stops, parts):
    watch, seen, shown = StopStrings(stops), "", ""
    for part in parts:
        seen += part
        if first_stop(seen, stops):
            return
        shown += watch.push(part)
        assert shown == seen[: len(seen) - held_back(seen, stops)]


@settings(deadline=None, max_examples=300)
@given(STOPS, PARTS, PARTS, st.booleans())
@example(("ab",), ["aba"], ["b"], False)
@example(("ab", "abb"), ["ab"], ["b"], False)
@example(("a", "aa"), ["aa"], ["a"], False)
def test_a_stop_string_counts_if_it_ends_in_the_watched_part(stops, before, after, include):
    border = len("".join(before))
    text = "".join(before + after)
    places = [
        (start, len(stop), stop)
        for stop in stops
        for start in range(len(text))
        if text[start : start + len(stop)] == stop and start + len(stop) > border
    ]
    watch, shown = StopStrings(stops, include), ""
    for part in before:
        shown += watch.push(part, watched=False)
        begun = held_back("".join(before)[: len(shown) + len(watch._held)], stops)
        assert len(watch._held) == begun and watch.matched is None
    shown += "".join(run(watch, after))
    if not places:
        assert (shown, watch.matched) == (text, None)
    else:
        start, _, stop = min(places)
        assert (shown, watch.matched) == (text[:start] + (stop if include else ""), stop)


def test_a_stop_string_may_span_any_number_of_tokens():
    """BR-53."""
    watch = StopStrings(("</end>",))
    assert [watch.push(part) for part in ("a <", "/", "en")] == ["a ", "", ""]
    assert watch.matched is None
    assert watch.push("d> more") == ""
    assert watch.matched == "</end>"
    assert (watch.push("x"), watch.finish()) == ("", "")


def test_text_that_only_looked_like_a_stop_string_comes_back():
    watch = StopStrings(("</end>",))
    assert run(watch, ["a</e", "</en", "x", "</"]) == ["a", "</e", "</enx", "", "</"]
    assert watch.matched is None


def test_a_stop_in_the_middle_of_a_push_ends_there():
    watch = StopStrings(("\n\n",))
    assert run(watch, ["one\n", "\ntwo\n\nthree"]) == ["one", "", ""]
    watch = StopStrings(("\n\n",), include=True)
    assert run(watch, ["one\n", "\ntwo\n\nthree"]) == ["one", "\n\n", ""]


def test_the_earliest_start_wins_over_the_earliest_end():
    for last, matched, shown in (("d", "abcd", ""), ("x", "bc", "a")):
        watch = StopStrings(("bc", "abcd"))
        assert (watch.push("abc"), watch.matched) == ("", None)
        assert (watch.push(last), watch.matched) == (shown, matched)
    watch = StopStrings(("bc", "abcd"))
    assert (watch.push("abc"), watch.finish(), watch.matched) == ("", "a", "bc")


@pytest.mark.parametrize("stops", [("ab", "abc"), ("abc", "ab")])
def test_of_two_that_start_together_the_shorter_is_complete_first(stops):
    watch = StopStrings(stops)
    assert run(watch, ["xabc"]) == ["x", ""]
    assert watch.matched == "ab"


def test_characters_with_a_meaning_in_patterns_are_ordinary():
    watch = StopStrings((".*", "[", "|"))
    assert run(watch, ["a.b", "*", "."]) == ["a.b", "*", "", "."]
    assert watch.matched is None
    assert (watch.push("x["), watch.matched) == ("x", "[")


def test_without_stop_strings_nothing_is_held_back():
    watch = StopStrings(())
    assert run(watch, ["a", "", "b"]) == ["a", "", "b", ""]


@pytest.mark.parametrize("stops", [("",), ("a", ""), "ab", (b"a",), (None,)])
def test_what_is_no_stop_string_is_refused(stops):
    """BR-54: an empty one would end every text at once; a bare string would be its letters."""
    with pytest.raises(ValueError, match="stop"):
        StopStrings(stops)
