"""Features that plug into tfshard at named extension points. No other subpackage of tfshard imports them.

    compression       gradients that devices send compressed, with error feedback
    embedding_tables  tables that a step reads and updates by rows
    experts           mixtures of experts, whose tokens go to the devices of their experts
    pipeline          pipeline parallelism: groups of devices compute different layers
    simulate          predictions of steps on clusters of any size
    sketched          SketchedDense: a linear layer through random sketches

`tfshard/__init__.py` imports this package, so that the extensions register themselves.
"""
