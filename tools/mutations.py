"""What tools/mutate.sh breaks, a line at a time, and the test of the ordinary run that fails for it."""

import dataclasses
import pathlib

DOCS = pathlib.Path(__file__).parents[1] / "docs" / "testing.md"
MARK = "<!-- The table below is written by tools/mutate.sh --write -->\n"


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


def table(mutations: list[Mutation]) -> str:
    """The table of docs/testing.md."""
    lines = ["| Area | File | What is broken | Fails |", "|---|---|---|---|"]
    for mutation in mutations:
        test = mutation.killed_by.replace("|", "\\|")
        lines.append(f"| {mutation.area} | {mutation.file} | {mutation.what} | `{test}` |")
    return "\n".join(lines) + "\n"


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
        killed_by="tests/training/test_failures.py::test_the_first_steps_of_a_process_may_fail",
    ),
    Mutation(
        area="devices",
        file="tfshard/devices/transfer.py",
        old="        return _copied(tensor, dim, axes, mesh)\n    sizes",
        new="        return tensor\n    sizes",
        what="a shard of a gradient keeps the whole gradient alive",
        killed_by="tests/storage/test_gradients.py::test_devices_hold_shards_of_gradients_from_stage_2_on[batch4]",
    ),
    Mutation(
        area="placement",
        file="tfshard/layouts/variable_layout.py",
        old="store_sharded=stage >= (1 if slot else 3)",
        new="store_sharded=stage >= 3",
        what="slots of other shapes are sharded at stage 3 only",
        killed_by="tests/storage/test_optimizers.py::test_training_matches_one_device[adafactor-batch2_model2-1-alone]",
    ),
    Mutation(
        area="placement",
        file="tfshard/layouts/variable_layout.py",
        old="update_sharded=stage >= 1",
        new="update_sharded=stage >= 2",
        what="slots are whole at stage 1",
        killed_by="tests/storage/test_optimizers.py::test_training_matches_one_device[muon-batch4-1-alone]",
    ),
    Mutation(
        area="placement",
        file="tfshard/layouts/variable_layout.py",
        old="reduce_scatter=stage >= 2",
        new="reduce_scatter=stage >= 3",
        what="gradients are whole at stage 2",
        killed_by="tests/storage/test_gradients.py::test_gradients_come_in_shards_from_stage_2_on_and_the_report_measures_it[2-batch4]",
    ),
    Mutation(
        area="placement",
        file="tfshard/layouts/variable_layout.py",
        old="reduce_scatter=stage >= 2",
        new="reduce_scatter=stage >= 1",
        what="gradients are scattered at stage 1",
        killed_by="tests/storage/test_gradients.py::test_gradients_come_in_shards_from_stage_2_on_and_the_report_measures_it[1-batch4]",
    ),
    Mutation(
        area="placement",
        file="tfshard/layouts/variable_layout.py",
        old="    return candidates[0] if candidates else None",
        new="    return None",
        what="variables that could be cut are padded",
        killed_by="tests/storage/test_optimizers.py::test_training_matches_one_device[adafactor-batch4-2-mixed]",
    ),
    Mutation(
        area="placement",
        file="tfshard/layouts/groups.py",
        old="0 < bytes_ < self.group_threshold_bytes",
        new="0 < bytes_",
        what="large variables are grouped",
        killed_by="tests/storage/test_optimizers.py::test_training_matches_one_device[sgd-batch2_model2-3-mixed]",
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
        area="layouts",
        file="tfshard/layouts/variable_layout.py",
        old="elements * itemsize >= ALIGNMENT_BYTES",
        new="elements * itemsize > ALIGNMENT_BYTES",
        what="a member of 64 bytes is not aligned",
        killed_by="tests/layouts/test_analyzer.py::test_members_of_64_bytes_and_more_begin_at_a_multiple_of_64",
    ),
    Mutation(
        area="layouts",
        file="tfshard/layouts/boxes.py",
        old="first = location[data] * form.columns",
        new="first = 0 * form.columns",
        what="every device is said to hold the first row of a flat form",
        killed_by="tests/checkpoints/test_resharding.py::test_pieces_are_written_once_and_tensorflow_reads_whole_variables",
    ),
    Mutation(
        area="planning",
        file="tfshard/planning/variable_traffic.py",
        old="    return elements * variable_layout.itemsize(dtype)",
        new="    return elements * 4",
        what="every dtype is counted as four bytes",
        killed_by="tests/planning/test_planning.py::test_bytes_of_large_variables_follow_the_stage[0-8388608-8388608-16777216]",
    ),
    Mutation(
        area="planning",
        file="tfshard/planning/local_shares.py",
        old="            found[ref] *= mesh_shape[axis]\n",
        new="            pass\n",
        what="the predicted peak counts activations whole that a model axis shards",
        killed_by="tests/planning/test_peak.py::test_the_predicted_peak_is_the_measured_one[blocks-options9]",
    ),
    Mutation(
        area="planning",
        file="tfshard/planning/liveness.py",
        old="                if cost is not None and cost.kind is Kind.JOINED:\n",
        new="                if False:\n",
        what="the buffer of joined gradients is planned for the end of the backward pass only",
        killed_by="tests/planning/test_peak.py::test_the_buffer_of_joined_gradients_is_there_with_the_first",
    ),
    Mutation(
        area="steps",
        file="tfshard/storage/steps.py",
        old="        values = _small_copies_last(values, tokens + self._tokens)\n",
        new="",
        what="counters are written although the step fails",
        killed_by="tests/training/test_failures.py::test_a_failing_kernel_raises_what_plain_keras_raises_and_training_goes_on[check_numerics-0]",
    ),
    Mutation(
        area="steps",
        file="tfshard/storage/steps.py",
        old="        for storage, value in zip(written, values, strict=True):",
        new="        for storage, value in ():",
        what="what a branch writes is lost",
        killed_by="tests/training/test_microbatches.py::test_a_step_that_overflows_is_skipped_as_on_one_device",
    ),
    Mutation(
        area="microbatches",
        file="tfshard/training/microbatches.py",
        old="        total = next(self._totals)",
        new="        total = count * reduced.divisor",
        what="a loss of a part is divided by what the part has",
        killed_by="tests/training/test_microbatches.py::"
        "test_parts_have_the_numbers_of_the_whole_batch_on_one_device[masked, sum_over_batch_size, no weights]",
    ),
    Mutation(
        area="microbatches",
        file="tfshard/training/microbatches.py",
        old="            share = 1.0 if id(optimizer) in scaled else 1 / count",
        new="            share = 1.0",
        what="gradients of parts are added up where their mean is meant",
        killed_by="tests/training/test_microbatches.py::test_a_loop_of_ones_own_is_done_in_parts_where_it_trains",
    ),
    Mutation(
        area="microbatches",
        file="tfshard/training/microbatches.py",
        old="            return loss / tf.cast(count, loss.dtype)",
        new="            scaled.clear()\n            return loss",
        what="gradients of float16 overflow in a part where they would not in the batch",
        killed_by="tests/training/test_microbatches.py::test_a_step_that_overflows_is_skipped_as_on_one_device",
    ),
    Mutation(
        area="microbatches",
        file="tfshard/storage/steps.py",
        old="        if id(variable) in self._updated_later:",
        new="        if False:",
        what="a part reads what is updated after the last one",
        killed_by="tests/training/test_microbatches.py::test_what_is_updated_later_is_not_read",
    ),
    Mutation(
        area="loops",
        file="tfshard/operations/loops.py",
        old='        if operand.op.type == "Placeholder" or _is_constant(operand):',
        new='        if operand.op.type == "Placeholder":',
        what="constants that a custom gradient takes are made outside of the branch",
        killed_by="tests/training/test_microbatches.py::"
        "test_parts_have_the_numbers_of_the_whole_batch_on_one_device[branches]",
    ),
    Mutation(
        area="turns",
        file="tfshard/storage/turns.py",
        old="        if self._tie is not None:\n            stored, other",
        new="        if False:\n            stored, other",
        what="gathers do not wait for their turn",
        killed_by="tests/storage/test_turns.py::test_a_step_holds_a_layer_or_two_whole_and_not_all",
    ),
    Mutation(
        area="turns",
        file="tfshard/storage/turns.py",
        old="        if self._made is None:\n            return\n",
        new="        return\n",
        what="the backward pass does not wait for updates",
        killed_by="tests/storage/test_turns.py::test_a_step_holds_a_layer_or_two_whole_and_not_all",
    ),
    Mutation(
        area="turns",
        file="tfshard/storage/turns.py",
        old="        sent = {key: dtype for key, dtype in sent_dtypes(uses).items() if dtype in narrow}\n",
        new="        sent = {}\n",
        what="gathers send float32 under mixed precision",
        killed_by="tests/storage/test_turns.py::test_gathers_send_the_compute_dtype[mixed_bfloat16]",
    ),
    Mutation(
        area="adapters",
        file="tfshard/operations/rewrites.py",
        old='exchange["BatchMatMulV3"] = products.of_integers',
        new="pass",
        what="products of integers are whole on every device",
        killed_by="tests/operations/test_products.py::test_a_product_of_integers_is_that_of_one_device"
        "[batch x model-column-True]",
    ),
    Mutation(
        area="adapters",
        file="tfshard/storage/formats.py",
        old="        elif layout.flat.word > 1:\n",
        new="        elif False:\n",
        what="integers of 8 bits are gathered as int32",
        killed_by="tests/training/test_adapters.py::"
        "test_integers_are_gathered_in_a_quarter_of_the_bytes_and_no_kernel_is_reduced",
    ),
    Mutation(
        area="adapters",
        file="tfshard/storage/turns.py",
        old="        _leave_out(operations, values)\n",
        new="",
        what="custom gradients take what they do not give",
        killed_by="tests/training/test_adapters.py::"
        "test_integers_are_gathered_in_a_quarter_of_the_bytes_and_no_kernel_is_reduced",
    ),
    Mutation(
        area="adapters",
        file="tfshard/training/adoption.py",
        old="        adapters.install(model)\n",
        new="",
        what="the gradient of a whole kernel is reduced for that of its adapter",
        killed_by="tests/training/test_adapters.py::"
        "test_integers_are_gathered_in_a_quarter_of_the_bytes_and_no_kernel_is_reduced",
    ),
    Mutation(
        area="adapters",
        file="tfshard/graph/adapters.py",
        old='"lora_enabled": False, "bias": None',
        new='"lora_enabled": False',
        what="a bias is added twice where there is an adapter",
        killed_by="tests/training/test_adapters.py::test_adapters_train_to_the_numbers_of_one_device[LoRA-batch-3]",
    ),
    Mutation(
        area="host slots",
        file="tfshard/storage/storage.py",
        old="            if step is not None and tied:\n",
        new="            if False:\n",
        what="slots come from the host when the step begins",
        killed_by="tests/storage/test_host_slots.py::test_a_slot_comes_once_and_not_before_the_gradient[{'analyzer': None}]",
    ),
    Mutation(
        area="host slots",
        file="tfshard/layouts/variable_layout.py",
        old="            on_host=self.slots_on_host and is_moment",
        new="            on_host=False and is_moment",
        what="slots stay on the devices",
        killed_by="tests/storage/test_host_slots.py::test_slots_on_the_host_train_as_on_one_device[alone]",
    ),
    Mutation(
        area="recomputing",
        file="tfshard/storage/recomputing.py",
        old="        made = dict(zip(incoming, tied[2:], strict=True))\n",
        new="        made = {}\n",
        what="what is computed again is merged with what was computed first",
        killed_by="tests/storage/test_recomputing.py::test_activations_of_blocks_are_freed[False-0.7]",
    ),
    Mutation(
        area="recomputing",
        file="tfshard/storage/recomputing.py",
        old="        for user, number in users:\n",
        new="        for user, number in []:\n",
        what="the forward pass is fused where it was not",
        killed_by="tests/storage/test_recomputing.py::test_losses_keep_their_bits[3-batch2-dense]",
    ),
    Mutation(
        area="placement",
        file="tfshard/layouts/variable_layout.py",
        old="            stored_dtype=self.slot_dtype if narrow else None,\n",
        new="            stored_dtype=self.slot_dtype,\n",
        what="sums of gradients rest in bfloat16",
        killed_by="tests/storage/test_slot_dtype.py::test_training_stays_near_float32[bfloat16-accumulation-alone-0]",
    ),
    Mutation(
        area="slot dtypes",
        file="tfshard/storage/eight_bits.py",
        old="    code = tf.where(tf.equal(values, 0),",
        new="    code = tf.where(tf.equal(values, 0) | (magnitude < 1e-7),",
        what="second moments that are small next to others become zero",
        killed_by="tests/storage/test_slot_dtype.py::test_gradients_of_all_sizes_never_divide_by_a_second_moment_of_zero",
    ),
    Mutation(
        area="slot dtypes",
        file="tfshard/storage/storage.py",
        old="            return self.format.in_update(self._recorded_buffer(recorded))\n",
        new="            return self.format.for_update(self.format.at_rest(self._recorded_buffer(recorded)))\n",
        what="an update goes on with what it has rounded",
        killed_by="tests/storage/test_slot_dtype.py::test_updates_are_those_of_one_device_whose_slots_are_rounded_after_each",
    ),
    Mutation(
        area="slot dtypes",
        file="tfshard/storage/formats.py",
        old="        value = pin(tf.transpose(value, rows.to_front), rows.moved_axes)\n    return pin",
        new="        value = pin(tf.reshape(value, rows.moved_shape), rows.moved_axes)\n    return pin",
        what="rows of shards are cut without their axes in front",
        killed_by="tests/storage/test_slot_dtype.py::test_blocks_are_of_what_a_device_holds[batch2_model2-3]",
    ),
    Mutation(
        area="planning",
        file="tfshard/planning/variable_traffic.py",
        old="        return self.dtypes.get(spec.path, spec.dtype)\n",
        new="        return spec.dtype\n",
        what="gradients are planned in the dtypes of their variables under mixed precision",
        killed_by="tests/planning/test_planning.py::test_a_step_under_mixed_precision_reduces_what_was_planned[mixed_float16-batch4-1]",
    ),
    Mutation(
        area="birth",
        file="tfshard/storage/initial_values.py",
        old="        if type(initializer) not in _OF_KERAS:\n",
        new="        if True:\n",
        what="all values of a model wait on the host for its layouts",
        killed_by="tests/training/test_birth.py::test_values_are_drawn_once_in_their_place_and_are_those_of_one_device[mlp-auto-3]",
    ),
    Mutation(
        area="birth",
        file="tfshard/training/adoption.py",
        old="                reshard.settle(self._placed(model), self.mesh, waiting=True)\n",
        new="",
        what="a file of weights waits on the host for the end of the scope",
        killed_by="tests/training/test_birth.py::test_a_file_of_weights_goes_to_the_devices_one_variable_after_the_other[mlp-auto]",
    ),
    Mutation(
        area="birth",
        file="tfshard/storage/storage.py",
        old="            empty(handle, self.buffer.dtype, self.buffer.shape.rank)\n            with",
        new="            with",
        what="a piece is there besides the one that it replaces",
        killed_by="tests/training/test_birth.py::test_a_piece_is_gone_before_the_one_that_takes_its_place_is_made[0]",
    ),
    Mutation(
        area="steps",
        file="tfshard/storage/steps.py",
        old="            assert recorded is not None\n            storage.write(recorded)\n        self._postponed",
        new="            assert recorded is not None\n        self._postponed",
        what="what an update writes to a group in a branch is lost",
        killed_by="tests/training/test_precision.py::test_mixed_precision_trains_as_on_one_device[mixed_float16-3-True-batch2_model2]",
    ),
    Mutation(
        area="variables",
        file="tfshard/storage/storage.py",
        old="        return self.in_update(self.recorded())\n",
        new="        return self.in_update(None)\n",
        what="an update reads a slot as it was before the step",
        killed_by="tests/storage/test_optimizers.py::test_training_matches_one_device[adam-batch2_model2-2-mixed]",
    ),
    Mutation(
        area="variables",
        file="tfshard/storage/variables.py",
        old="state.packed in (self.storage, self.storage.root)",
        new="self.storage.root is state.packed",
        what="a slot that stands alone in a flat form is updated in its own shape",
        killed_by="tests/storage/test_gradients.py::test_accumulated_gradients_are_sharded_and_match_one_device[batch4-2]",
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
        killed_by="tests/storage/test_optimizers.py::test_training_matches_one_device[lamb-batch4-1-grouped]",
    ),
    Mutation(
        area="updates",
        file="tfshard/training/hooks.py",
        old="        with update_scope(after=after):",
        new="        with contextlib.nullcontext():",
        what="variables that stand alone are updated whole",
        killed_by="tests/storage/test_optimizers.py::test_variables_that_stand_alone_are_updated_in_pieces[1]",
    ),
    Mutation(
        area="data",
        file="tfshard/devices/batching.py",
        old="tf.constant(parts[place - min(places)])",
        new="tf.constant(parts[0])",
        what="each device gets the first rows of its client",
        killed_by="tests/launch/test_launched_fit.py::test_clients_that_feed_their_own_rows_train_to_the_numbers_of_one_device",
    ),
    Mutation(
        area="data",
        file="tfshard/checkpoints/callback.py",
        old="None if position.fresh else host",
        new="None",
        what="a resumed run begins its data anew",
        killed_by="tests/checkpoints/test_resume.py::test_a_run_that_goes_on_on_another_mesh_has_the_losses_and_weights_of_one_device",
    ),
    Mutation(
        area="operations",
        file="tfshard/operations/rewrites.py",
        old="    return transfer.relayout(random, random_axes(tuple(random.shape), axis_sizes(mesh)), mesh)",
        new="    return random",
        what="devices that should draw the same random numbers do not",
        killed_by="tests/operations/test_tensor_parallel_random.py::test_dropout_on_a_mesh_of_two_axes_is_independent_on_shards_and_equal_on_replicas[batch, model]",
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
        area="operations",
        file="tfshard/operations/rows.py",
        old="    return _with_gradient(lambda tensor, mesh: tf.identity(tensor), total, tensor, mesh)",
        new="    return _with_gradient(lambda tensor, mesh: tf.identity(tensor), shared, tensor, mesh)",
        what="the gradient of what all rows use is that of one device's rows",
        killed_by="tests/operations/test_control_flow.py::test_results_and_gradients_are_those_of_one_device[batch4-map_fn of all rows]",
    ),
    Mutation(
        area="operations",
        file="tfshard/operations/batch_moments.py",
        old="+ (means - mean) ** 2, 0",
        new=", 0",
        what="a batch has the spread of one device's rows",
        killed_by="tests/operations/test_batch_moments.py::test_normalization_and_its_gradients_are_those_of_one_device[vectors-of1]",
    ),
    Mutation(
        area="operations",
        file="tfshard/_private/graphs.py",
        old="true_fn() if value else false_fn()",
        new="false_fn() if value else true_fn()",
        what="a branch that is known is the other one",
        killed_by="tests/operations/test_control_flow.py::test_results_and_gradients_are_those_of_one_device[batch4-cond by a shape]",
    ),
    Mutation(
        area="operations",
        file="tfshard/operations/selects.py",
        old="    return tf.where(tf.equal(tf.expand_dims(indices, axis), classes), on_value, off_value)",
        new="    return tf.where(tf.expand_dims(indices, axis) >= classes, on_value, off_value)",
        what="a token goes to all experts before its own",
        killed_by="tests/graph/test_more_families.py::test_a_family_trains_to_the_numbers_of_one_device[qwen3_moe-batch2_model2]",
    ),
    Mutation(
        area="measuring",
        file="tfshard/measure/consistency.py",
        old="if piece.numpy().tobytes() != expected[1]:",
        new="if piece.numpy().nbytes != len(expected[1]):",
        what="copies that differ are taken for equal",
        killed_by="tests/storage/test_groups.py::test_check_consistency_names_the_variable_that_differs",
    ),
    Mutation(
        area="measuring",
        file="tfshard/training/hooks.py",
        old="            var.note_gradient(args[0])\n",
        new="            pass\n",
        what="the report does not see gradients",
        killed_by="tests/storage/test_gradients.py::test_gradients_come_in_shards_from_stage_2_on_and_the_report_measures_it[0-batch4]",
    ),
    Mutation(
        area="saving",
        file="tfshard/checkpoints/writer.py",
        old="        os.rename(self.temporary, self.final)\n        files.sync(self.root)\n",
        new="        os.rename(self.temporary, self.final)\n",
        what="the name of a commit is not synced",
        killed_by="tests/checkpoints/test_kills.py::test_a_power_loss_at_each_change_of_the_disk_leaves_what_was_committed[one that deletes others-False]",
    ),
    Mutation(
        area="saving",
        file="tfshard/checkpoints/writer.py",
        old="            files.sync(path)\n            digest = None",
        new="            digest = None",
        what="data are not synced before the commit",
        killed_by="tests/checkpoints/test_kills.py::test_a_power_loss_at_each_change_of_the_disk_leaves_what_was_committed[one that deletes others-False]",
    ),
    Mutation(
        area="saving",
        file="tfshard/checkpoints/writer.py",
        old="        self._commit(snapshot, stored)\n        self._prune()",
        new="        self._prune()\n        self._commit(snapshot, stored)",
        what="older steps are deleted before the commit",
        killed_by="tests/checkpoints/test_kills.py::test_a_kill_at_each_change_of_the_disk_leaves_what_was_committed_with_its_values[one that deletes others]",
    ),
    Mutation(
        area="saving",
        file="tfshard/checkpoints/files.py",
        old="    os.rename(path, doomed)\n    shutil.rmtree(doomed)",
        new="    shutil.rmtree(path)",
        what="a step is deleted under its own name",
        killed_by="tests/checkpoints/test_kills.py::test_a_kill_at_each_change_of_the_disk_leaves_what_was_committed_with_its_values[one that deletes others]",
    ),
    Mutation(
        area="saving",
        file="tfshard/checkpoints/writer.py",
        old="kept = {self.step, *(",
        new="kept = {*(",
        what="a save deletes what it wrote",
        killed_by="tests/checkpoints/test_checkpoint.py::test_a_step_that_is_older_than_those_that_are_kept_is_there_when_it_was_saved",
    ),
    Mutation(
        area="restoring",
        file="tfshard/checkpoints/reader.py",
        old="return None if checksums.of_array(array) == piece.checksum else",
        new="return None if array is not None else",
        what="pieces are not compared with their checksums",
        killed_by="tests/checkpoints/test_corruptions.py::test_200_corruptions_are_found_before_a_variable_changes_and_training_goes_on",
    ),
    Mutation(
        area="data",
        file="tfshard/training/models.py",
        old="        if _is_known(spec):",
        new="        if False:",
        what="a batch is drawn to build the model, and shuffles go on from there",
        killed_by="tests/training/test_data_order.py::test_fit_sees_the_batches_of_plain_keras[tf.data]",
    ),
    Mutation(
        area="data",
        file="tfshard/devices/batching.py",
        old="    clients.here().note_value(tensor, host)\n",
        new="",
        what="other batches on other clients are not noticed",
        killed_by="tests/devices/test_clients.py::test_the_batches_that_clients_are_given_are_noted_to_be_compared",
    ),
    Mutation(
        area="watchdog",
        file="tfshard/launch/watchdog.py",
        old="elif digest != other_digest:",
        new="elif False:",
        what="clients that train on other batches go on",
        killed_by="tests/launch/test_faults.py::test_every_fault_that_needs_no_tensorflow_ends_everything_in_time_and_is_named",
    ),
    Mutation(
        area="watchdog",
        file="tfshard/launch/leader.py",
        old="if self._clock.now - host.heard > HOST_SECONDS:",
        new="if False:",
        what="a host that is silent is waited for",
        killed_by="tests/launch/test_faults.py::test_every_fault_that_needs_no_tensorflow_ends_everything_in_time_and_is_named",
    ),
    Mutation(
        area="watchdog",
        file="tfshard/launch/processes.py",
        old="prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)",
        new="prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)",
        what="clients outlive their launcher",
        killed_by="tests/launch/test_faults.py::test_every_fault_that_needs_no_tensorflow_ends_everything_in_time_and_is_named",
    ),
    Mutation(
        area="watchdog",
        file="tfshard/launch/leader.py",
        old="self._places = left",
        new="pass",
        what="a client that does not come back is waited for",
        killed_by="tests/launch/test_faults.py::test_a_run_is_restarted_and_a_client_that_does_not_come_back_is_left_out",
    ),
    Mutation(
        area="channel",
        file="tfshard/devices/channel.py",
        old='struct.pack(">Q", number) + text',
        new='struct.pack(">Q", 0) + text',
        what="a message is not bound to its place in the conversation",
        killed_by="tests/launch/test_channel.py::test_a_changed_byte_is_a_control_error_and_nothing_behind_it_is_taken",
    ),
]
