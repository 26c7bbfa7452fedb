"""How do tensors get to devices and back, and who else is there?

A *client* is one of several processes that train together; a process by itself is `Alone`. Read `transfer` first.

    startup       `initialize`: environment switches, logical devices, starts DTensor
    mesh          `create_mesh`: names and sizes of axes to a mesh
    allocators    the allocators of host memory
    transfer      tensors to devices and back, from layout to layout
    host_meshes   the mesh of the host's processors beside a mesh of GPUs, and copies between the two
    host_memory   arrays and tensors on the host, with few copies
    mesh_tensors  `MeshTensor`: a tensor on the mesh that eager code uses as one on the host
    batching      batches to the mesh
    messages      tensors and values from one client to another
    between_meshes    tensors to another mesh of the same axes
    instances     clients number collectives alike, when they have compiled other ones
    words         arrays of any dtype as words that collectives take
    device_order  the order of the devices of a group: their mesh's, and TensorFlow's
    tasks         which task of TensorFlow's cluster each client is
    clients       who else takes part in a run, what is agreed on and done together
    process_lock  the lock with which the threads of a process take turns on the mesh
    channel       the control channel of a launched run: authenticated messages
    checksums     CRC-32 of what is compared
    gathers       which collective gathers, on which mesh
    merges        which all-reduces are merged
    reductions    in which dtype gradients are added up
    replicas      collectives of the devices of one replica, and between replicas
    exchanges     lists of any length that devices send each other
    expansions    which operations without an expansion are computed whole on every device
"""

from tfshard.devices.batching import InputShard
from tfshard.devices.mesh import create_mesh
from tfshard.devices.startup import Runtime, initialize

__all__ = ["InputShard", "Runtime", "create_mesh", "initialize"]
