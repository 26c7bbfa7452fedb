"""The prepared run on one GPU: cutting libraries down, sending archives in pieces, and its checks on CPU devices."""

import collections
import json
import pathlib
import random
import struct
import subprocess
import sys
import tarfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "tools" / "gpu"
sys.path[:0] = [str(FOLDER), str(FOLDER / "quarter")]

import checks  # noqa: E402
import fatbins  # noqa: E402
import gpu_trace  # noqa: E402
import libraries  # noqa: E402
import pieces  # noqa: E402
import sizes  # noqa: E402


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    """Return an entry of a fatbin, with a header of 64 bytes."""
    begin = fatbins.ENTRY.pack(kind, 0x0101, 64, len(code)).ljust(fatbins.ARCHITECTURE_OFFSET, b"\0")
    return (begin + struct.pack("<I", architecture)).ljust(64, b"\0") + code


def fatbin(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return fatbins.HEADER.pack(fatbins.MAGIC, 1, fatbins.HEADER.size, len(content)) + content


def library(path: pathlib.Path, content: bytes, section: bytes = b".nv_fatbin") -> pathlib.Path:
    """Write an ELF file with sections for code, for fatbins and for names."""
    names = b"\0.text\0" + section + b"\0.shstrtab\0"
    text = b"\x50\xed\x55\xba" * 4  # The fatbins' magic number in another section.
    offsets = [64, 64 + len(text), 64 + len(text) + len(content)]
    headers = [bytes(64)]
    for name, offset, part in zip((b".text", section, b".shstrtab"), offsets, (text, content, names), strict=True):
        headers.append(struct.pack("<IIQQQQIIQQ", names.index(name), 1, 0, 0, offset, len(part), 0, 0, 1, 0))
    first = offsets[-1] + len(names)
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = struct.pack("<16sHHIQQQIHHHHHH", ident, 3, 62, 1, 0, 0, first, 0, 64, 0, 0, 64, len(headers), 3)
    path.write_bytes(header + text + content + names + b"".join(headers))
    return path


def codes(path: pathlib.Path) -> list[tuple[int, int, bool]]:
    """Return the kind and the architecture of each entry, and whether its code is still there."""
    data = path.read_bytes()
    return [
        (each.kind, each.architecture, any(data[each.offset : each.offset + each.size]))
        for section in fatbins.sections(data)
        for entries in fatbins.fatbins(data, *section)
        for each in entries
    ]


CUBIN, PTX = fatbins.CUBIN, fatbins.PTX


@pytest.mark.parametrize("section", fatbins.SECTIONS)
def test_only_code_that_the_gpu_loads_is_kept(tmp_path, section):
    """A GPU runs cubins of its architecture, and compiles PTX only of a fatbin that has no such cubin."""
    with_cubin = fatbin(entry(CUBIN, 80, b"a" * 24), entry(CUBIN, 90, b"b" * 40), entry(PTX, 90, b"c" * 8))
    only_text = fatbin(
        entry(PTX, 75, b"d" * 8), entry(PTX, 80, b"e" * 8), entry(PTX, 100, b"f" * 8), entry(CUBIN, 80, b"g" * 16)
    )
    path = library(tmp_path / "lib.so", with_cubin + bytes(16) + only_text, section)
    before = path.read_bytes()
    assert fatbins.clear(path, 90) == (40 + 8, 24 + 8 + 8 + 8 + 16)
    assert codes(path) == [
        (CUBIN, 80, False), (CUBIN, 90, True), (PTX, 90, False),
        (PTX, 75, False), (PTX, 80, True), (PTX, 100, False), (CUBIN, 80, False),
    ]  # fmt: skip
    after = path.read_bytes()
    assert len(after) == len(before)
    changed = bytes(a for a, b in zip(before, after, strict=True) if a != b)
    assert collections.Counter(changed) == collections.Counter(b"a" * 24 + b"c" * 8 + b"d" * 8 + b"f" * 8 + b"g" * 16)


def test_a_section_of_an_unknown_structure_is_refused_and_left_as_it_is(tmp_path):
    whole = fatbin(entry(CUBIN, 90, b"a" * 8))
    for content, message in ((b"x" * 64, "No fatbin at byte"), (whole[:-8], "No fatbin at byte")):
        path = library(tmp_path / "lib.so", content)
        before = path.read_bytes()
        with pytest.raises(fatbins.FatbinError, match=message):
            fatbins.clear(path, 90)
        assert path.read_bytes() == before
    text = tmp_path / "text.so"
    text.write_text("INPUT(libother.so)")
    with pytest.raises(fatbins.FatbinError, match="ELF"):
        fatbins.clear(text, 90)


def test_an_entry_larger_than_its_fatbin_is_refused(tmp_path):
    long = bytearray(fatbin(entry(CUBIN, 90, b"a" * 8)))
    struct.pack_into("<Q", long, fatbins.HEADER.size + 8, 1000)
    with pytest.raises(fatbins.FatbinError, match="larger than its fatbin"):
        fatbins.clear(library(tmp_path / "lib.so", bytes(long)), 90)


@pytest.fixture
def archive(tmp_path):
    """A tar file of random bytes, which do not compress."""
    source = tmp_path / "source"
    (source / "package").mkdir(parents=True)
    for number in range(3):
        (source / "package" / f"{number}.bin").write_bytes(random.Random(number).randbytes(30_000))
    with tarfile.open(tmp_path / "packages.tar", "w") as tar:
        tar.add(source / "package", "package")
    return tmp_path / "packages.tar"


def sent(archive: pathlib.Path) -> list[pathlib.Path]:
    target = archive.parent / "sent"
    manifest = pieces.split(archive, target, 40_000, block_bytes=16_384)
    return [target / each.file for each in manifest.pieces]


def test_pieces_join_in_any_order_and_again(archive, tmp_path):
    folders = sent(archive)
    assert len(folders) >= 3
    assert all((each / "piece.xz").stat().st_size <= 40_000 for each in folders)
    target = tmp_path / "target"
    last, *others = reversed(folders)
    for each in (*others, *others):
        assert "Missing" in pieces.receive(each, target)
        assert not (target / "package").exists()
    assert "all" in pieces.receive(last, target)
    assert "already extracted" in pieces.receive(others[0], target)
    for number in range(3):
        content = random.Random(number).randbytes(30_000)
        assert (target / "package" / f"{number}.bin").read_bytes() == content
    assert sum(each.stat().st_size for each in (target / ".pieces").iterdir()) == 0


def test_a_damaged_piece_is_refused_and_may_come_again(archive, tmp_path):
    folders = sent(archive)
    piece = folders[1] / "piece.xz"
    content = piece.read_bytes()
    piece.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(pieces.PieceError, match=r"Piece 'packages\.2' is damaged"):
        pieces.receive(folders[1], tmp_path / "target")
    piece.write_bytes(content)
    assert [pieces.receive(each, tmp_path / "target") for each in folders][-1].startswith("packages: all")


def test_the_shell_script_receives_pieces(archive, tmp_path):
    folders = sent(archive)
    done = subprocess.run(
        ["bash", str(FOLDER / "quarter.sh"), "receive", *map(str, folders)],
        capture_output=True, text=True, env={"PATH": f"{pathlib.Path(sys.executable).parent}:/usr/bin:/bin",
                                             "TFSHARD_QUARTER": str(tmp_path / "target")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(folders)
    assert (tmp_path / "target" / "package" / "2.bin").exists()


def test_a_library_of_another_version_stands_in_for_a_missing_one(tmp_path):
    machine = tmp_path / "machine"
    machine.mkdir()
    for name in ("libcublas.so", "libcublas.so.9", "libcublas.so.13", "libnccl.so.2", "libnccl.so.3"):
        (machine / name).touch()
    found = libraries.link(tmp_path / "lib", ["libcublas.so.12", "libnccl.so.2", "libcufft.so.11"], [machine])
    assert found == {
        "libcublas.so.12": machine / "libcublas.so.13",
        "libnccl.so.2": machine / "libnccl.so.2",
        "libcufft.so.11": None,
    }
    assert (tmp_path / "lib" / "libcublas.so.12").resolve() == machine / "libcublas.so.13"
    assert sorted(each.name for each in (tmp_path / "lib").iterdir()) == ["libcublas.so.12", "libnccl.so.2"]


def test_copies_beside_kernels_count_as_hidden():
    streams = {
        "Stream #1": [("gemm", 0.0, 2.0), ("add", 3.0, 1.0)],
        "Stream #2": [("MemcpyD2D", 1.0, 1.0), ("MemcpyH2D", 5.0, 3.0)],
    }
    figures = gpu_trace.figures(streams)
    assert figures["gpu_events"] == {"kernel": 2, "MemcpyD2D": 1, "MemcpyH2D": 1}
    assert (figures["computing_ms"], figures["idle_ms"], figures["copying_ms"]) == (3000, 1000, 4000)
    assert figures["copies_hidden"] == 0.25


def test_the_model_flops_of_gpt2_are_six_for_each_parameter_and_token():
    size = sizes.SIZES["124M"]
    parameters = 12 * 12 * 768**2 + 50257 * 768
    assert size.step_flops == size.tokens * (6 * parameters + 12 * 12 * 1024 * 768)


def test_the_time_limits_fit_the_lease():
    """A command has 600 s, and all have 900 s, of which starting and sending take up to 240 s."""
    first, second = checks.chosen("a,b,g,h,i"), checks.chosen("c,d,e,f,j")
    names = sorted(each.name for each in (*first, *second))
    assert names == sorted(each.name for each in checks.CHECKS)
    assert max(checks.seconds_of(first), checks.seconds_of(second)) <= 580
    assert checks.seconds_of(first) + checks.seconds_of(second) <= 660


def test_the_table_of_checks_has_each_check_with_its_time_limit():
    page = (ROOT / "benchmarks" / "GPU.md").read_text()
    for each in checks.CHECKS:
        assert f"| {each.name}{'+' if each.beside else ''} | {each.what} | {each.seconds} | " in page
    assert f"the checks at most {checks.seconds_of(checks.CHECKS)} s" in page


def script(tmp_path: pathlib.Path, text: str) -> tuple[str, ...]:
    (tmp_path / "script.py").write_text(text)
    return (str(tmp_path / "script.py"),)


def results(folder: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_a_check_that_hangs_prints_its_stacks_and_the_next_check_runs(tmp_path):
    hangs = script(tmp_path, "import time\nprint('{\"done\": 1}', flush=True)\ndef waits(): time.sleep(600)\nwaits()\n")
    run = (
        checks.Check("x", "hangs", hangs, hangs, 6),
        checks.Check("y", "prints no result", ("-m", "platform"), ("-m", "platform"), 30),
    )
    assert checks.run_all(run, checks.Results(tmp_path / "out"), seconds=60, dry=False) == ["x"]
    first, end, printed, ended = results(tmp_path / "out")
    assert first == {"check": "x", "done": 1}
    assert end["ended"] == "no end within 6 s" and "in waits" in end["last"]
    assert "Linux" in printed["output"] and ended["ended"] == "ok"
    assert "in waits" in (tmp_path / "out" / "log.txt").read_text()
    assert len((tmp_path / "out" / "results.md").read_text().splitlines()) == 2 + 4


def test_a_check_without_time_is_named(tmp_path):
    check = checks.CHECKS[0]
    assert checks.run_all([check], checks.Results(tmp_path), seconds=1, dry=False) == [check.name]
    assert results(tmp_path)[0]["ended"] == "not run: no time left"


@pytest.mark.slow
@pytest.mark.on_cpu("dry runs are for CPU devices")
def test_light_checks_run_dry(tmp_path):
    done = subprocess.run(
        ["bash", str(FOLDER / "quarter.sh"), "dry", f"--only={','.join(checks.LIGHT)}", f"--out={tmp_path}"],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ends = {line["check"]: line["ended"] for line in results(tmp_path) if "ended" in line}
    assert ends == dict.fromkeys(checks.LIGHT, "ok")
