"""Checkpoints: a training run on disk, and back.

Read `manager` first; docs/checkpoints.md describes the format and the guarantees.

    manager             `CheckpointManager`
    callback            `CheckpointCallback`: `fit` that resumes where it was killed
    writer              writes a training run to a checkpoint
    reader              `Checkpoint`: compared with the model before it is used
    stores              what `writer` and `reader` need of the place of checkpoints
    local_store         checkpoints in a local directory, committed by one rename
    remote_store        checkpoints on a remote file system, committed by an object that is written last
    remote_files        files on a remote file system, with retries
    leases              the right to save to a remote directory
    staging             temporary local files on their way to a remote file system
    bundles             TensorFlow's tensor bundles
    bundle_index        where each box lies in the files of a bundle
    byte_ranges         the ranges of bytes that a box needs
    manifest            the contents of a checkpoint, as JSON, with every field checked
    reduction_state     the state that reductions of gradients keep between steps
    files               names, syncing, opening without following links
    held_shards         local shards out of the devices' tensors, and back into them
    training_state      every variable of a training run, under a key that survives a restart
    keras_files         Keras's file formats and safetensors, one variable at a time
    transformers_files  KerasHub's export to transformers, one tensor at a time
    safetensors_files   the safetensors format
    weight_names        the names of weights in safetensors files
    written_files       files that the first client writes while the others take part
"""

from tfshard.checkpoints.callback import CheckpointCallback
from tfshard.checkpoints.keras_files import export, import_weights
from tfshard.checkpoints.manager import CheckpointManager
from tfshard.checkpoints.reader import Checkpoint
from tfshard.checkpoints.transformers_files import export_to_transformers

__all__ = [
    "Checkpoint",
    "CheckpointCallback",
    "CheckpointManager",
    "export",
    "export_to_transformers",
    "import_weights",
]
