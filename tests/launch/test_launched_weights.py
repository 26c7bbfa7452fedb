"""Weights of a launched run (launched_weights.py)."""

import launched
import transformers_directories


def test_one_client_writes_the_files_of_weights_and_all_read_them(tmp_path):
    transformers_directories.write("gpt2", tmp_path / "gpt2")
    done = launched.launch(
        "--num_processes=2", "--devices_per_process=1", str(launched.HERE / "launched_weights.py"), str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    first, second = (client["weights"] for client in launched.found(done, 2))
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["sharded"] > 10, "premise: it is sharded"
    assert (
        first["paths"]
        == second["paths"]
        == {
            "one": "one.safetensors",
            "several": "several.safetensors.index.json",
            "keras": "keras.weights.json",
            "transformers": "exported/model.safetensors",
        }
    )
    for client in (first, second):
        assert client["same"] == {"one": True, "several": True, "keras": True, "method": True}
        assert client["left"] == []
