"""The protocol buffers in the index of a tensor bundle."""

from typing import Any

from google.protobuf.message import DecodeError as DecodeError
from tensorflow.core.protobuf.tensor_bundle_pb2 import BundleEntryProto


def bundle_entry(content: bytes) -> Any:
    """Return the entry of a tensor, or of a slice of a tensor.

    Raises:
        DecodeError: The bytes are no entry.
    """
    return BundleEntryProto.FromString(content)
