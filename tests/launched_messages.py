"""Train pipelines in several clients, with messages through the hosts as on GPUs. Record the order of all messages."""

import contextlib
import json
import os
import pathlib
import sys
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

from tensorflow.python.eager import context

import launched_pipelines
import tfshard
from tfshard.contrib.pipeline.pipeline import Pipeline, _PipelineStep
from tfshard.contrib.pipeline.runner import Runner
from tfshard.contrib.pipeline.schedules import Schedule
from tfshard.devices import messages

# Axes, stages, schedule and number of clients, by name. With four clients, those of a pipeline rank reduce gradients.
WAYS = {
    "gpipe": ({"pipeline": 2, "batch": 2}, 2, "gpipe", 2),
    "1f1b": ({"pipeline": 2, "batch": 2}, 2, "1f1b", 2),
    "interleaved": ({"pipeline": 2, "batch": 2}, 4, "interleaved", 2),
    "four clients": ({"pipeline": 2, "batch": 2}, 2, "1f1b", 4),
}


class Recorder:
    """Records the tasks, collectives and messages of pipelines.

    Attributes:
        steps: The events of each step, each `[thread, kind, *arguments]`. Events of a thread are in their order.
        senders: The devices that took part in broadcasts.
    """

    def __init__(self) -> None:
        self.steps: list[list[list]] = []
        self.senders: set[str] = set()

    def note(self, *event: object) -> None:
        if self.steps:
            self.steps[-1].append([threading.current_thread().name, *event])

    def of(self, owner: Any, name: str, around: Callable) -> contextlib.AbstractContextManager:
        """Let `around(original, *arguments)` take the place of a function."""
        original = getattr(owner, name)
        return mock.patch.object(owner, name, lambda *arguments: around(original, *arguments))

    def recording(self) -> contextlib.ExitStack:
        """Record inside the returned context."""
        stack = contextlib.ExitStack()
        for replacement in (
            self.of(messages, "send", self.send),
            self.of(messages, "received", self.received),
            self.of(messages, "_device", self.device),
            self.of(_PipelineStep, "do", self.do),
            mock.patch.object(_PipelineStep, "_on", staticmethod(self.on(_PipelineStep._on))),
            self.of(Runner, "run", self.run),
            *(self.of(Pipeline, name, self.step) for name in ("train", "test", "predict")),
        ):
            stack.enter_context(replacement)
        return stack

    def step(self, original, *arguments):
        self.steps.append([])
        return original(*arguments)

    def send(self, original, tensor, source, target):
        self.note("send", source, target)
        return original(tensor, source, target)

    def received(self, original, shape, dtype, source, target):
        self.note("receive", source, target)
        return original(shape, dtype, source, target)

    def device(self, original, end):
        self.senders.add(original(end))
        return original(end)

    def do(self, original, step, task):
        rank, count = task.stage % len(step._pipeline.ranks), len(step._cut.stages)
        schedule = Schedule.of("gpipe", ranks=count, stages=count, microbatches=step.count)
        self.note("begin", str(task), [str(each) for each in schedule.needs(task)])
        self.note("collective", rank)
        original(step, task)
        self.note("collective", rank)
        self.note("end", str(task))

    def on(self, original):
        def with_collective(rank, function, *arguments):
            self.note("collective", rank.number)
            return original(rank, function, *arguments)

        return with_collective

    def run(self, original, *arguments):
        found = original(*arguments)
        self.note("join")
        return found


def main(directory: pathlib.Path, names: list[str]) -> None:
    # As if the devices were GPUs.
    os.environ["DTENSOR_GPU_USE_NCCL_COMMUNICATION"] = "1"
    messages._goes_through_host = lambda end: not end.startswith("host:")
    for name in names:
        recorder = Recorder()
        model = launched_pipelines.compiled(WAYS[name][:3])
        with recorder.recording():
            found = launched_pipelines.found_of(model)
        devices = [messages.devices_of(rank.strategy.mesh) for rank in launched_pipelines.pipeline_of(model).ranks]
        found |= {"steps": recorder.steps, "devices": devices, "senders": sorted(recorder.senders)}
        found["collective_nccl"] = context.context().config.experimental.collective_nccl
        (directory / f"found {tfshard.collectives.rank()} {name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
