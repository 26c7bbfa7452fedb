"""Move tensors to devices and back, and coordinate clients.

A *client* is one of several processes that train together. A single process is `Alone`. Read `transfer` first.

    startup       `initialize`: sets environment switches, makes logical devices, starts DTensor
    mesh          `create_mesh`: builds a mesh from the names and sizes of axes
    keras_devices  the devices and meshes of `keras.distribution`
    allocators    allocators of host memory
    transfer      tensors to devices and back, from layout to layout
    local_shards  runs operations on each device's local shards: `to_local`, `from_local`, "parted" layouts
    host_meshes   a GPU mesh's mesh of host processors, and copies between the two
    host_memory   arrays and tensors on the host, with few copies
    mesh_tensors  `MeshTensor`: a mesh tensor that eager code uses like a host tensor
    batching      batches to the mesh
    messages      tensors and values between clients
    between_meshes    tensors to another mesh with the same axes
    instances     equal collective numbers on clients that compiled different collectives
    words         arrays of any dtype as integer words for collectives
    device_order  the device order of a group on the mesh and in TensorFlow
    gpus          NVIDIA GPUs of the machine, their links, and NCCL
    device_memory the memory of a device, as the system and the driver tell it
    tasks         the TensorFlow cluster task of each client
    cluster_members   joins the run of a cluster that started this process itself
    clients       the clients of a run, their agreements and joint operations
    process_lock  the lock that lets one thread of a process use the mesh
    channel       the control channel of a launched run: authenticated messages
    key_exchange  two ends of a connection agree on a key
    enrolment     hands the run's secret to members that have none
    visible_gpus  the GPUs that each client of a host sees
    checksums     CRC-32 of values to compare
    gathers       the collective for a gather on each mesh
    merges        the all-reduces to merge
    reductions    the dtype of gradient sums
    uneven_exchanges  all-to-all of lists with lengths that only the step knows
    replicas      collectives within a replica and between replicas
    expansions    operations without a DTensor expansion, computed in full on every device
"""

from tfshard.devices.batching import InputShard
from tfshard.devices.mesh import create_mesh
from tfshard.devices.startup import Runtime, initialize, shutdown

__all__ = ["InputShard", "Runtime", "create_mesh", "initialize", "shutdown"]
