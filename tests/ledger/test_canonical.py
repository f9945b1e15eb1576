"""The quick way to the canonical text and the thorough one give the same text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tenure.ledger import canonical

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXT
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4))


@given(VALUES)
def test_both_ways_give_the_same_text(value):
    quick = canonical._simply(value)
    assert quick is not None
    assert quick.decode() == canonical._encode(value)


def test_what_needs_a_closer_look_goes_the_thorough_way():
    for value in (1.5, "a\0b", {"a": [2**64]}, {1: 2}, ("a",)):
        assert canonical._simply(value) is None
