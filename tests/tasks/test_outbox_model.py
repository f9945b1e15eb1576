"""The outbox against a plain list, through any course of changes, reopenings and torn ends."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tenure.ledger.errors import AdmissionConflict, InvalidParams, OutboxFull
from tenure.tasks.journal import MAGIC, framed_size
from tenure.tasks.outbox import Entry, Outbox, Scope

CAP = 1500
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
operations = st.tuples(st.sampled_from(["transcript.append", "usage.record", "é"]), texts)
sequences = st.integers(0, 40)


class Model(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.pending, self.rejected = [], []  # [sequence, operation, payload]
        self.next = self.generation = 1
        self.box = None

    def open(self):
        self.box = Outbox.open(
            self.directory,
            Scope("e", "s", "p"),
            secret_digest="ab" * 32,
            generation=1,
            cap_bytes=CAP,
            compact_bytes=200,
        )

    @initialize()
    def begin(self):
        self.open()

    def teardown(self):
        if self.box:
            self.box.close()
        shutil.rmtree(self.directory)

    def held(self, n):
        return next((item for item in self.pending if item[0] == n), None)

    def size(self):
        return sum(framed_size(Entry(*item)) for item in self.pending)

    @rule(items=st.lists(operations, max_size=4))
    def append(self, items):
        new = [[self.next + index, *item] for index, item in enumerate(items)]
        if self.size() + sum(framed_size(Entry(*item)) for item in new) > CAP:
            with pytest.raises(OutboxFull):
                self.box.append_many(items)
            return
        assert self.box.append_many(items) == [Entry(*item) for item in new]
        self.pending += new
        self.next += len(new)

    @rule(wanted=st.lists(sequences, max_size=5))
    def settle(self, wanted):
        found = [n for n in dict.fromkeys(wanted) if self.held(n)]
        assert self.box.settle_many(wanted) == found
        self.pending = [item for item in self.pending if item[0] not in found]

    @rule()
    def settle_the_first(self):
        if self.pending:
            assert self.box.settle(self.pending.pop(0)[0])

    @rule(n=sequences, renumber=st.booleans())
    def give_up(self, n, renumber):
        item = self.held(n)
        give_up = self.box.reject if renumber else self.box.drop
        if item is None:
            with pytest.raises(InvalidParams):
                give_up(n, "r", "d")
            return
        behind = [other for other in self.pending if other[0] > n]
        if renumber and len(behind) != self.next - n - 1:
            with pytest.raises(AdmissionConflict):
                give_up(n, "r", "d")
            return
        moved = give_up(n, "r", f"d{n}")
        self.pending.remove(item)
        self.rejected.append([*item, "r", f"d{n}"])
        if renumber:
            assert moved == [(other[0], other[0] - 1) for other in behind]
            for other in behind:
                other[0] -= 1
            self.next -= 1

    @rule(generation=st.integers(0, 3), ahead=st.integers(-2, 3))
    def advance(self, generation, ahead):
        if 0 < generation < self.generation:
            return
        self.box.advance(generation=generation, next_sequence=max(1, self.next + ahead))
        self.generation = max(generation, self.generation)
        self.next = max(self.next, self.next + ahead)

    @precondition(lambda self: self.generation == 1)
    @rule(torn=st.binary(max_size=0) | st.sampled_from([MAGIC[:1], MAGIC[:3], MAGIC, MAGIC + bytes(15)]))
    def reopen(self, torn):
        self.box.close()
        with self.box.path.open("ab") as file:
            file.write(torn)
        self.open()

    @precondition(lambda self: self.generation > 1)
    @rule()
    def reopen_later_generation(self):
        self.box.close()
        self.box = Outbox.open(
            self.directory, Scope("e", "s", "p"), secret_digest="ab" * 32, cap_bytes=CAP, compact_bytes=200
        )

    @invariant()
    def it_says_what_the_list_says(self):
        if self.box is None:
            return
        assert self.box.pending() == [Entry(*item) for item in self.pending]
        assert (self.box.next_sequence, self.box.generation) == (self.next, self.generation)
        assert self.box.pending_bytes == self.size() <= CAP
        said = [[r.sequence, r.operation, r.payload, r.reason, r.detail] for r in self.box.rejected()]
        assert said == self.rejected[-100:]


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
