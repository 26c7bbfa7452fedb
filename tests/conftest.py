"""Four logical CPU devices for every test of this process: TensorFlow fixes them once."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import tfshard  # noqa: E402

tfshard.initialize(num_devices=4, device_type="CPU")
