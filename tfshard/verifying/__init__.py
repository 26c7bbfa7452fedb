"""Verification: one training step runs sharded and on one device, and the first difference is named.

Read `comparison` first.

    verification       `verify`
    comparison         compares a sharded step with a step on one device, and finds the faulty operation
    step_recording     runs one training step, sharded or on one device, and records its values
    operation_check    finds the operation of a sharded step that is computed wrongly
    subject            the state of a step: saved, restored, swapped for plain variables
    verdict            the result of `verify`
"""

from tfshard.verifying.verdict import Verification
from tfshard.verifying.verification import verify

__all__ = ["Verification", "verify"]
