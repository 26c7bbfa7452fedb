"""Saves to a local S3 server that are killed by SIGKILL at each request that changes something.

    python tests/killed_remote_saves.py DIRECTORY SAMPLE
    python tests/killed_remote_saves.py DIRECTORY SAMPLE --launched

The program starts the server behind two proxies (tests/s3_server.py). The proxy of a client kills it at a request:
before the server sees the request, or after the server has answered. As in tests/killed_saves.py, each start checks the
result of the start before, and then starts the save of another case and is killed in it. SAMPLE is how many kills an
ordinary run takes; TFSHARD_SWEEP=1 takes all. With `--launched`, two clients save.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import traceback

import s3_server
import sweeps
import tfshard
from fault_proxy import control
from killed_saves import CASES, LAUNCHED, NEXT, SAVED, Case, build, check, save
from tfshard.checkpoints import files
from tfshard.checkpoints.remote_store import RemoteStore
from tfshard.devices import clients

ROOT = f"s3://{s3_server.BUCKET}"


def expected(case: Case, seen: list[str], client: int, number: int, phase: str) -> tuple[int, int] | None:
    """Return step and number of the last commit when a client is killed at a request.

    Args:
        case: The save.
        seen: The requests of the first client.
        client: The client that is killed.
        number: The number of the request.
        phase: `"before"` or `"after"` the server has answered.
    """
    (commit,) = [i for i, each in enumerate(seen) if each.startswith("PUT") and is_manifest(each)]
    is_committed = client == 0 and (number > commit or (number == commit and phase == "after"))
    return (case.step, SAVED) if is_committed else case.last


def is_manifest(request: str) -> bool:
    return request.partition("?")[0].endswith(f"/{files.MANIFEST}")


class Start:
    """A start of the program. Its number counts the starts before it."""

    def __init__(self, directory: pathlib.Path, sample: int, doors: list[int], number: int):
        tfshard.initialize(num_devices=None if clients.here().is_launched else 2, device_type="CPU")
        self.here = clients.here()
        self.directory = directory
        self.sample = sample
        self.number = number
        self.door = doors[self.here.rank]
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{self.door}"
        self.model = build()

    def run(self) -> None:
        if self.number == 0:
            self._list()
        plan = json.loads((self.directory / "plan.json").read_text())
        if self.number:
            self._check(*plan[self.number - 1])
        if self.number == len(plan):
            if self.here.rank == 0:
                print(f"PASSED {self.number}", flush=True)
            return
        name, client, number, phase, request, _ = plan[self.number]
        if self.here.rank == client:
            print(f"KILLED in {name}: {phase} {request}", flush=True)
        url = self._prepared(name, self.number)
        kill = {"kill": [os.getpid(), number, phase]} if self.here.rank == client else {}
        self._save(CASES[name], url, kill)
        # The other client may come here before it is killed, too.
        self.here.barrier("a kill")
        raise AssertionError("It was not killed.")

    def _check(self, name: str, client: int, number: int, phase: str, request: str, found: list | None) -> None:
        control(self.door)
        case, url = CASES[name], f"{ROOT}/kill-{self.number - 1}/run"
        check(url, self.model, found and tuple(found))
        save(tfshard.CheckpointManager(url, keep=case.keep), self.model, case.step + 1, NEXT)
        check(url, self.model, (case.step + 1, NEXT))
        self.here.barrier("what was checked")
        store = RemoteStore(url, writes=False)
        committed = {files.name_of(*each) for each in store.checkpoints()}
        assert {path.partition("/")[0] for path in store.root.find()} == committed, store.root.find()
        assert not list(pathlib.Path(os.environ["TMPDIR"]).glob("tfshard-staging-*")), "local files are left"

    def _list(self) -> None:
        """Make the plan: case, client, request and phase of each kill, and the state it leaves."""
        found: list[tuple] = []
        (self.directory / "seen").mkdir(exist_ok=True)
        for name in CASES if self.here.count == 1 else LAUNCHED:
            url = self._prepared(name, "listed")
            seen = self._save(CASES[name], url, {})
            (self.directory / "seen" / f"{self.here.rank}.json").write_text(json.dumps(seen))
            self.here.barrier("requests")
            first = json.loads((self.directory / "seen" / "0.json").read_text())
            for client in range(self.here.count):
                theirs = json.loads((self.directory / "seen" / f"{client}.json").read_text())
                for number, request in enumerate(theirs):
                    for phase in ("before", "after"):
                        if client and number == len(theirs) - 1 and phase == "after":
                            continue  # The first client may commit before the launcher ends it, or not.
                        then = expected(CASES[name], first, client, number, phase)
                        found.append((name, client, number, phase, request, then))
            self.here.barrier("cases")
        if self.here.rank == 0:
            plan = sweeps.taken(f"remote kills of {self.here.count}", found, sample=self.sample)
            (self.directory / "plan.json").write_text(json.dumps(plan))
            print(f"PLAN {len(plan)} of {len(found)}", flush=True)
        self.here.barrier("a plan")

    def _prepared(self, name: str, number: int | str) -> str:
        """Make the initial state of a case in a new directory."""
        url = f"{ROOT}/kill-{number}/run" if number != "listed" else f"{ROOT}/listed/{list(CASES).index(name)}/run"
        for step, values in CASES[name].before:
            save(tfshard.CheckpointManager(url), self.model, step, values)
        self.here.barrier("what is there")
        return url

    def _save(self, case: Case, url: str, faults: dict) -> list[str]:
        control(self.door, **faults)
        manager = tfshard.CheckpointManager(url, keep=case.keep)
        save(manager, self.model, case.step, SAVED, wait=case.wait)
        manager.wait()
        return control(self.door)["seen"]


def main() -> None:
    directory, sample = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    if "TFSHARD_RESTART" in os.environ:  # A client of a launched run.
        Start(directory, sample, json.loads(os.environ["DOORS"]), int(os.environ["TFSHARD_RESTART"])).run()
        return
    (directory / "tmp").mkdir(exist_ok=True)
    with s3_server.running(doors=2) as server:
        os.environ.update(server.environment(), TMPDIR=str(directory / "tmp"), DOORS=json.dumps(server.doors))
        if "--launched" in sys.argv:
            command = ["-m", "tfshard", "launch", "--num_processes=2", "--devices_per_process=1", "--max_restarts=1000"]
            done = subprocess.run([sys.executable, *command, *sys.argv[:3]])
            sys.exit(done.returncode)
        number = 0
        while True:
            process = os.fork()
            if not process:
                code = 1
                try:
                    Start(directory, sample, list(server.doors), number).run()
                    code = 0
                finally:
                    # Not by an exception: the parent stops the server.
                    if code:
                        traceback.print_exc()
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            if code != -signal.SIGKILL:
                sys.exit(code)
            number += 1


if __name__ == "__main__":
    main()
