"""TensorFlow's checkpoints and Keras's files of a launched run (launched_checkpoints.py)."""

import launched
import launched_checkpoints


def test_one_client_writes_checkpoints_and_files_and_all_read_them(tmp_path):
    done = launched.launch(
        "--num_processes=2", "--devices_per_process=1", str(launched.HERE / "launched_checkpoints.py"), str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    said = (done.stdout + done.stderr).count("Nothing was trained: ")
    assert said == 1, "only client 0 warns that the second fit had nothing to do"
    clients = [client["saves"] for client in launched.found(done, 2)]
    assert clients[0] == clients[1], "all have the same paths and see the same files"
    assert clients[0]["same"] == [True] * (2 * launched_checkpoints.SAVES + 1)
    last = launched_checkpoints.SAVES
    kept = [f"ckpt-{number}" for number in (last - 1, last)]
    ends = (".data-00000-of-00001", ".index")
    assert clients[0]["files"] == sorted(["checkpoint", *(name + end for name in kept for end in ends)])
