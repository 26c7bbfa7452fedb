"""Train a small model in a launched run, with a fault if `python -m tools.faults` asks for one.

    tfshard launch --num_processes=2 tools/fault_runs/client.py --steps=20
    tfshard launch --num_processes=2 tools/fault_runs/client.py --fault=raise --client=1 --at_step=5

The client prints its process id and each step. With --state it saves checkpoints, and continues from the last
checkpoint after a restart. Every step has a different batch, which is the same in every run.
"""

import kinds
from absl import app


def main(argv: list[str]) -> None:
    del argv
    fault, at_step = kinds.fault()
    kinds.before_joining(fault)
    # The process is up before it imports TensorFlow, which takes seconds.
    import training

    kinds.at_joining(fault, training.clients)
    training.train(fault, at_step)


if __name__ == "__main__":
    app.run(main)
