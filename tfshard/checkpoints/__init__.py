"""How does a run survive?

Read `manager` first; docs/checkpoints.md has the format and what is promised.

    manager           `CheckpointManager`
    callback          `CheckpointCallback`: `fit` that goes on where it was killed
    writer            a training run to a checkpoint, committed by one rename
    reader            `Checkpoint`: compared before it is used
    manifest          what a checkpoint holds, as JSON, with nothing in it trusted
    unsent            what devices had not sent of compressed gradients
    files             names, syncing, opening without following links
    held_pieces       pieces out of the devices' tensors, and back into them
    training_state    every variable of a training run, under a key that survives a restart
    keras_files       Keras's own files, a variable at a time
"""

from tfshard.checkpoints.callback import CheckpointCallback
from tfshard.checkpoints.keras_files import export, import_weights
from tfshard.checkpoints.manager import CheckpointManager
from tfshard.checkpoints.reader import Checkpoint

__all__ = ["Checkpoint", "CheckpointCallback", "CheckpointManager", "export", "import_weights"]
