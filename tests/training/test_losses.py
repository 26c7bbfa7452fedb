"""Keras's losses in steps behave as docs/losses.md says."""

import itertools

import keras
import pytest

from built_in_losses import LOSSES, MESHES, documented, loss_outcome, short
from sweeps import table


def test_every_loss_of_keras_is_tried():
    classes = {name for name, value in vars(keras.losses).items() if isinstance(value, type)}
    assert classes - {"Loss"} == set(LOSSES)


def test_the_docs_list_every_loss():
    assert set(LOSSES) <= set(documented()), "Write the table again: python tests/built_in_losses.py"


def test_no_loss_and_no_metric_is_wrong():
    assert not {name: outcomes for name, outcomes in documented().items() if "wrong" in " ".join(outcomes)}


@pytest.mark.sweep(1)
@pytest.mark.filterwarnings("ignore:.*:tfshard.errors.LayoutWarning")
@table(
    "losses", ("name", "mesh"), itertools.product(LOSSES, MESHES), sample=3,
    always=[(name, "batch4") for name in LOSSES] + [("CategoricalCrossentropy", "batch2_model2")],
)  # fmt: skip
def test_a_loss_does_what_the_docs_say(name, mesh):
    assert short(loss_outcome(name, mesh)) == documented()[name][list(MESHES).index(mesh)]
