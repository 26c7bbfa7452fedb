"""The quick tests: `pytest -m quick`. A few cheap tests of each subpackage, listed only here.

A file with `None` takes part with all its tests; otherwise with the named tests. A parametrized test takes part with
the named case, or with all its cases.
"""

QUICK = {
    # _private
    "test_sweeps.py": None,
    "test_versions.py": None,
    "test_design.py": None,
    # layouts
    "test_analyzer.py": None,
    "test_linter.py": (
        "test_a_correct_map_has_no_findings",
        "test_an_indivisible_dim_is_an_error",
        "test_two_rules_for_one_weight_are_an_error",
        "test_an_axis_that_is_not_in_the_mesh_is_an_error",
    ),
    "test_keras_distribution.py": ("test_paths_are_not_patterns", "test_a_device_mesh_without_the_axis_is_refused"),
    # devices
    "test_mesh.py": None,
    "test_collectives.py": ("test_one_process_gets_its_own_value_back", "test_wrong_values_are_refused"),
    "test_tensor_parallel_random.py": ("test_dtensor_by_itself_gives_replicas_different_masks",),
    # storage
    "test_memory.py": ("test_stages_shard_what_they_say",),
    "test_variable_surface.py": ("test_an_optimizers_counters_are_numbers",),
    "test_groups.py": (
        "test_a_group_is_one_buffer_and_its_slots_are_one_each",
        "test_groups_follow_the_model_axis",
        "test_sync_stats_tell_the_groups",
    ),
    # graph
    "test_auto_layout.py": ("test_names_do_not_matter", "test_a_chain_of_layers_alternates"),
    # launch
    "test_watchdog.py": None,
    "test_channel.py": None,
    "test_launch.py": ("test_clients_without_a_launcher_are_refused",),
    # operations
    "test_rewrites.py": (
        "test_a_slice_update_in_an_eager_step_is_that_of_one_device",
        "test_dtensor_by_itself_slices_before_a_sharded_dim_without_its_all_to_all",
    ),
    "test_vocabulary.py": ("test_ids_beyond_the_table_and_negative_ones_are_as_on_one_device",),
    # planning
    "test_planning.py": (
        "test_an_abstract_model_has_the_variables_of_a_real_one_and_no_values",
        "test_variables_are_planned_in_the_order_of_the_layers",
        "test_an_unknown_optimizer_is_refused",
    ),
    "test_machine.py": (
        "test_the_work_of_a_step_is_what_its_layers_multiply",
        "test_a_machine_comes_back_from_its_file",
        "test_prices_are_those_with_which_steps_take_what_they_took",
    ),
    "test_simulation.py": ("test_slow_links_between_hosts_are_used_once_for_each_replica",),
    # measure; its report is tested in test_memory.py and test_groups.py
    "test_verify.py": ("test_what_is_no_sharded_model_is_refused",),
    # callbacks
    "test_telemetry.py": ("test_wrong_arguments_are_refused", "test_a_clock_without_steps_knows_nothing"),
    # training
    "test_optimizers.py": ("test_training_matches_one_device[adam-batch4-3-grouped]",),
    "test_models.py": ("test_model_matches_one_device[mlp-batch4-3]",),
    "test_compile.py": None,
    "test_surface.py": (
        "test_evaluate_and_predict_match_one_device",
        "test_summary_count_params_and_weights",
        "test_run_eagerly_matches_one_device",
    ),
    # contrib
    "test_schedules.py": None,
    "test_pipeline.py": ("test_the_numbers_are_those_of_one_device[stage 3]", "test_the_plan_is_what_is_measured"),
    # checkpoints
    "test_checkpoint.py": (
        "test_runs_are_boxes_in_row_major_order",
        "test_a_manifest_comes_back_and_refuses_pieces_that_do_not_cover",
        "test_state_of_every_kind_comes_back",
        "test_keep_deletes_older_steps_and_saving_a_step_again_replaces_it",
    ),
    "test_resharding.py": ("test_pieces_are_written_once_and_tensorflow_reads_whole_variables",),
    "test_corruptions.py": ("test_links_are_not_followed[file]",),
    "test_kills.py": ("test_every_change_of_the_disk_is_a_point",),
    "test_export.py": ("test_wrong_arguments_are_refused", "test_nothing_in_an_archive_is_run"),
    # cli
    "test_cli.py": ("test_plan_prints_a_table_for_an_importable_module",),
}


def is_quick(file: str, test: str, case: str) -> bool:
    """Return whether a test is in the list, by its file and its name, or its name with the case in brackets."""
    names = QUICK.get(file, ())
    return names is None or test in names or case in names
