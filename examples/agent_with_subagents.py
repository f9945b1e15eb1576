"""An agent that delegates to three sub-agents at once, and answers from what they found.

    python examples/agent_with_subagents.py

Every model call is a step: if the agent's process dies, another one goes on without asking the model again. Each
sub-agent has a transcript of its own; the owner mints it, counts it against the cap, and ends it with its parent.
Here owner and workers run in this process (`tenure.testing`); on a fleet the same functions run as Celery tasks.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tenure import Refusal, Run, workflow
from tenure.ledger import reads
from tenure.testing import Workbench

TOPICS = ("price", "quality", "delivery")


def ask_model(prompt: str) -> dict[str, Any]:
    """Stand in for a model's API: it answers, and says how many tokens that took."""
    return {"text": f"About {prompt}: good.", "input_tokens": len(prompt.split()), "output_tokens": 4}


@workflow("example.research")
def research(run: Run, question: str, topic: str) -> str:
    """Look into one topic: the sub-agent."""
    run.append([{"role": "user", "content": f"{question} Look into the {topic}."}])
    answer = run.step(ask_model, topic)
    run.append([{"role": "assistant", "content": answer["text"]}])
    run.record_usage("stand-in", input_tokens=answer["input_tokens"], output_tokens=answer["output_tokens"])
    return str(answer["text"])


@workflow("example.agent")
def agent(run: Run, question: str) -> dict[str, Any]:
    """Delegate one topic to each sub-agent, and answer from what they found."""
    run.append([{"role": "user", "content": question}])
    asked = [run.delegate(research, question, topic, retries=1) for topic in TOPICS]
    handles = [one for one in asked if not isinstance(one, Refusal)]  # a refusal says that the cap is reached
    found = [result.value for result in run.gather(handles) if result.completed]
    answer = run.step(ask_model, f"{len(found)} findings")
    run.append([{"role": "assistant", "content": answer["text"]}])
    return {"answer": answer["text"], "findings": found}


def main() -> None:
    """Run the agent, with a crash in the middle, and show every transcript."""
    with tempfile.TemporaryDirectory() as folder, Workbench(Path(folder)) as bench:
        bench.crash_at("after_journal", nth=2)  # the agent has journalled its first reservation, and dies
        state = bench.run(agent, "Which supplier?", request_id="question-1")
        print(f"{state.outcome}, after {bench.crashes} crash: {state.result['answer']}")
        with bench.ledger.read() as connection:
            for execution in reads.tree(reads.executions(connection)):
                print(f"{'  ' * execution.depth}{execution.kind} {execution.status_reason}")
                for message in reads.transcript(connection, execution.session_id):
                    print(f"{'  ' * execution.depth}  {message['role']}: {message['content']}")


if __name__ == "__main__":
    main()
