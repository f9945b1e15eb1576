"""A ledger with a bit of everything in it, made by real operations: what is lawful."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tenure.ledger import Death, Ledger, Limits, Work, engine, operation, secret_digest
from tenure.ledger.submissions import Submission
from tests.ledger.kit import ELSEWHERE, Worker

LIMITS = Limits(2, 2)
SECRET = 'a "secret" für its holder'


@operation("test.fail")
def fail(work: Work, payload: dict[str, Any]) -> dict[str, Any]:
    raise ZeroDivisionError


@dataclass
class Lawful:
    """A ledger with a bit of everything, made by real operations in two epochs."""

    ledger: Ledger
    agent: Worker = field(init=False)  # adopted; 1 create, 2 append of two, 3 usage, 4 step, 5 and 6 children,
    # 7 a reservation refused, 8 usage, 9 failed; adopted again; 10 append, 11 and 12 children that live
    closed: Worker = field(init=False)  # a child that finished; 1 create, 2 append, 3 child, 4 finish
    grandchild: Worker = field(init=False)  # retired with its parent; 1 append, 2 a reservation refused
    ended: Worker = field(init=False)  # a child retired by a restart; 1 end of session, 2 append refused
    live: Worker = field(init=False)
    idle: Worker = field(init=False)
    first_holder: Worker = field(init=False)  # finished; 1 append, 2 finish
    second_holder: Worker = field(init=False)  # of the same session; 1 append; adopted; 2 append, 3 and 4 poisoned
    own_words: Worker = field(init=False)  # ended its session as only tenure does; 1 end, 2 finish
    discarded: Worker = field(init=False)
    silent: Worker = field(init=False)  # registered, never heard of again
    dead: Worker = field(init=False)  # its process is gone; 1 child
    orphan: Worker = field(init=False)  # its child, elsewhere; 1 append

    def __post_init__(self) -> None:
        first = self.ledger.begin_epoch("the first owner")
        self.ledger.recover(first)
        self.agent = Worker(self.ledger, first, secret=SECRET).register()
        self._work_of_the_agent()
        self._children()
        self._other_roots(first)
        second = self.ledger.begin_epoch("the second owner")
        self.ledger.recover(second)
        self._second_epoch(second)
        self.ledger.submit(
            second, Submission("request-1", "test.flow", '{"args":[],"kwargs":{}}', "", "p", "agents", 3)
        )

    def _work_of_the_agent(self) -> None:
        agent = self.agent
        facts = {"source": "cli", "model": "m1", "model_config": {"b": [1.5], "a": "ä"}, "system_prompt": "be brief"}
        agent.apply("session.create", facts)
        agent.say("hello", "world")
        agent.apply("usage.record", {"model": "m1", "input_tokens": 7, "cost": 0.25})
        agent.apply("step.record", {"name": "fetch", "input_digest": "0" * 64, "result": [None, "refused"]})
        self.closed, self.ended = agent.reserve(), agent.reserve()
        full = agent.apply("child.reserve", {"secret_digest": secret_digest("a secret of nobody")})
        assert full.refused == "delegation_capacity"
        agent.apply("usage.record", {"model": "m2", "output_tokens": 5, "reasoning_tokens": 2})
        assert agent.apply("test.fail").refused == "operation_failed"

    def _children(self) -> None:
        self.closed.apply("session.create", {"source": "cli", "model_config": {"temperature": 0}})
        self.closed.say("on it")
        self.grandchild = self.closed.reserve()
        self.grandchild.say("deeper")
        too_deep = self.grandchild.apply("child.reserve", {"secret_digest": secret_digest("a secret of nobody")})
        assert too_deep.refused == "delegation_depth_exceeded"
        assert self.closed.finish({"result": {"found": 1}}).result["retired"] == [self.grandchild.execution_id]
        self.ended.apply("session.end", {"end_reason": "done"})
        assert self.ended.say("too late").refused == "session_ended"

    def _other_roots(self, epoch: int) -> None:
        self.first_holder = Worker(self.ledger, epoch, session_id="shared").register()
        self.first_holder.say("one")
        self.first_holder.finish({"result": "ok"})
        self.second_holder = Worker(self.ledger, epoch, session_id="shared").register()
        assert self.second_holder.generation == 2
        self.second_holder.say("two")
        self.own_words = Worker(self.ledger, epoch).register()
        self.own_words.apply("session.end", {"end_reason": "agent_close"})
        self.own_words.finish()
        self.discarded = Worker(self.ledger, epoch).register()
        self.discarded.say("lost")
        self.silent = Worker(self.ledger, epoch).register()

    def _second_epoch(self, epoch: int) -> None:
        self.agent.adopt(epoch)
        self.ledger.discard(self.discarded.execution_id, by="an operator")
        self.agent.say("back")
        self.live, self.idle = self.agent.reserve(), self.agent.reserve()
        self.second_holder.adopt(epoch)
        self.second_holder.say("three")
        self._poison(self.second_holder, "usage.record", {"model": "m1", "input_tokens": 1})
        self._poison(self.second_holder, "execution.finish", {})
        self.dead = Worker(self.ledger, epoch).register()
        self.orphan = self.dead.reserve()
        self.orphan.attach(ELSEWHERE)
        self.orphan.say("still here")
        death = Death(self.dead.execution_id, self.dead.identity, "no_such_process")
        assert self.ledger.recover(epoch, deaths=[death]).unknown == [self.dead.execution_id]

    def _poison(self, worker: Worker, operation: str, payload: dict[str, Any]) -> None:
        """Refuse an operation as one that has killed its owner time and again."""
        checked = engine.read(worker.request(operation, payload), self.ledger.registry)
        with self.ledger.transaction(worker.epoch) as tx:
            worker.sequence = engine.apply(tx, checked, verdict={"refused": "poisoned", "attempts": 5}).sequence
