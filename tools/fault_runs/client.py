"""Trains a small model in a launched run, with a fault where `python -m tools.faults` asks for one.

    tfshard launch --num_processes=2 tools/fault_runs/client.py --steps=20
    tfshard launch --num_processes=2 tools/fault_runs/client.py --fault=raise --client=1 --at_step=5

It prints its process id and each step. With --state it saves checkpoints, and goes on from the last one when it is
restarted. Every step has a batch of its own, the same in every run.
"""

import kinds
from absl import app


def main(argv: list[str]) -> None:
    del argv
    fault, at_step = kinds.fault()
    kinds.before_joining(fault)
    # The process is there before it imports TensorFlow, which takes seconds.
    import training

    kinds.at_joining(fault, training.clients)
    training.train(fault, at_step)


if __name__ == "__main__":
    app.run(main)
