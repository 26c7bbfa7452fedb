"""What tools/mutate.sh breaks, a line at a time, and the test of the ordinary run that fails for it."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutation:
    """A line that is broken.

    Attributes:
        area: What it is about.
        file: The file, from the root of the repository.
        old: The text that is replaced; it is in the file once.
        new: What takes its place.
        what: What is wrong then.
        killed_by: The test that fails, as pytest names it.
    """

    area: str
    file: str
    old: str
    new: str
    what: str
    killed_by: str

    @property
    def title(self) -> str:
        return f"{self.area}: {self.what} ({self.file})"

    def applied(self, text: str) -> str:
        """The file's text with the broken line."""
        assert text.count(self.old) == 1, f"'{self.old}' is not once in {self.file}."
        return text.replace(self.old, self.new)


MUTATIONS = [
    Mutation(
        area="devices",
        file="tfshard/_private/context.py",
        old="is_async=False",
        new="is_async=True",
        what="DTensor runs behind Python, and failures go unnoticed",
        killed_by="tests/training/test_failures.py::test_a_failing_kernel_raises_what_plain_keras_raises_and_training_goes_on[check_numerics-0]",
    ),
    Mutation(
        area="devices",
        file="tfshard/devices/transfer.py",
        old="    if groups:\n",
        new="    if not groups:\n",
        what="devices do not meet before the first step",
        killed_by="tests/training/test_failures.py::test_the_first_step_of_a_process_may_fail",
    ),
    Mutation(
        area="steps",
        file="tfshard/storage/steps.py",
        old="        values = _small_copies_last(values)\n",
        new="",
        what="counters are written although the step fails",
        killed_by="tests/training/test_failures.py::test_a_failing_kernel_raises_what_plain_keras_raises_and_training_goes_on[check_numerics-0]",
    ),
    Mutation(
        area="variables",
        file="tfshard/storage/storage.py",
        old="        recorded = self.recorded()\n        if recorded is None:\n            with steps.reading_scope",
        new="        recorded = None\n        if recorded is None:\n            with steps.reading_scope",
        what="an update reads a slot as it was before the step",
        killed_by="tests/storage/test_stale_read.py::test_sharded_variables_do_not",
    ),
    Mutation(
        area="updates",
        file="tfshard/storage/group_update.py",
        old="tf.where(storage.format.mask(members), after, base)",
        new="after",
        what="a partial update writes the whole group",
        killed_by="tests/storage/test_groups.py::test_weight_decay_leaves_out_excluded_members",
    ),
    Mutation(
        area="updates",
        file="tfshard/storage/optimizer_kinds.py",
        old="    keras.optimizers.Ftrl,\n",
        new="    keras.optimizers.Ftrl,\n    keras.optimizers.Lamb,\n",
        what="Lamb takes its norms over a whole group",
        killed_by="TODO-A",
    ),
    Mutation(
        area="layouts",
        file="tfshard/layouts/variable_layout.py",
        old="[self.mesh_shape[axis], size // self.mesh_shape[axis]]",
        new="[size // self.mesh_shape[axis], self.mesh_shape[axis]]",
        what="model shards of a group's members are cut across",
        killed_by="tests/storage/test_groups.py::test_groups_follow_the_model_axis",
    ),
    Mutation(
        area="layouts",
        file="tfshard/layouts/boxes.py",
        old="first = location[data] * form.columns",
        new="first = 0 * form.columns",
        what="every device is said to hold the first row of a flat form",
        killed_by="TODO-B",
    ),
    Mutation(
        area="placement",
        file="tfshard/layouts/variable_layout.py",
        old="store_sharded=self.update_sharded)",
        new="store_sharded=self.store_sharded)",
        what="slots are sharded at stage 3 only",
        killed_by="tests/storage/test_memory.py::test_stages_shard_what_they_say",
    ),
    Mutation(
        area="placement",
        file="tfshard/layouts/groups.py",
        old="store_sharded=layout.store_sharded or not trained,",
        new="store_sharded=layout.store_sharded,",
        what="a group of frozen variables rests whole",
        killed_by="tests/storage/test_groups.py::test_frozen_variables_of_a_megabyte_in_all_share_a_sharded_buffer",
    ),
    Mutation(
        area="data",
        file="tfshard/devices/batching.py",
        old="tf.constant(parts[place - min(places)])",
        new="tf.constant(parts[0])",
        what="each device gets the first rows of a client",
        killed_by="TODO-C",
    ),
    Mutation(
        area="data",
        file="tfshard/training/datasets.py",
        old="self._next = host\n",
        new="self._next = None\n",
        what="a resumed run begins its data anew",
        killed_by="TODO-D",
    ),
    Mutation(
        area="operations",
        file="tfshard/operations/rewrites.py",
        old="mesh_shape.data if dim == 0 and divides else None for dim",
        new="None for dim",
        what="devices draw the same random numbers",
        killed_by="tests/operations/test_tensor_parallel_random.py::test_dropout_on_a_mesh_of_two_axes_is_independent_on_shards_and_equal_on_replicas",
    ),
    Mutation(
        area="operations",
        file="tfshard/operations/slices.py",
        old="    upstream = _reversed(upstream, backwards)\n",
        new="",
        what="the gradient of a reversed slice is not reversed",
        killed_by="tests/operations/test_rewrites.py::test_a_slice_and_its_gradient_are_those_of_one_device[t[::-1]]",
    ),
    Mutation(
        area="operations",
        file="tfshard/operations/vocabulary.py",
        old="(numbers < labels)",
        new="(numbers > labels)",
        what="of equal scores the last one is the prediction",
        killed_by="tests/operations/test_vocabulary.py::test_metrics_match_one_device_and_gather_nothing[sparse-model4]",
    ),
    Mutation(
        area="measure",
        file="tfshard/measure/consistency.py",
        old="if piece.numpy().tobytes() != expected[1]:",
        new="if piece.numpy().nbytes != len(expected[1]):",
        what="copies that differ are taken for equal",
        killed_by="tests/storage/test_groups.py::test_check_consistency_names_the_variable_that_differs",
    ),
    Mutation(
        area="adoption",
        file="tfshard/training/adoption.py",
        old="        self._functions.clear()\n        _forget_functions(model)\n",
        new="",
        what="functions go on with the storages that variables have left",
        killed_by="tests/training/test_late_building.py::test_a_submodel_that_predicted_before_it_was_sharded_predicts_with_the_trained_weights",
    ),
]
